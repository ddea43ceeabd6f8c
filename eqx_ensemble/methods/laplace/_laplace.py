from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ... import _check, _keys
from ..._caller import caller
from ..._ensemble import Ensemble, take
from ..._map import over_members
from ..._marks import Each
from ..._predict import predict
from ..._pytree import PyTree
from ._likelihood import LINKS, Link
from ._member import LaplaceMember, Outputs, Predict

M = TypeVar("M")


class Laplace(eqx.Module, Generic[M]):
    """Gaussian posteriors over the weights of all members, the result of [`eqx_ensemble.methods.laplace.fit`][].

    `posterior[[0, 2]]` selects members.

    **Attributes:**

    - `members`: an ensemble of the members with their posteriors.
    - `state`: the stacked `equinox.nn.State` of stateful members, else `None`.
    """

    members: Ensemble[LaplaceMember[M]]
    state: eqx.nn.State | None

    def __getitem__(self, index: Any) -> "Laplace[M]":
        """Selects members by an integer, a slice, a list of integers or a mask."""
        return take(self, index if isinstance(index, slice) else np.atleast_1d(index))

    @property
    def ensemble(self) -> Ensemble[M]:
        """The ensemble of the members' trained weights, the means of the posteriors."""
        is_none = lambda x: x is None
        axes = jax.tree.leaves(self.members.in_axes().stacked.model, is_leaf=is_none)
        return Ensemble(self.members.stacked.model, tuple(axes))

    @property
    def prior_precision(self) -> Float[Array, " members"]:
        """The precision of each member's prior."""
        return self.members.stacked.posterior.prior_precision

    @property
    def noise(self) -> Float[Array, " members"] | None:
        """The standard deviation of the noise of each member; `None` for classes."""
        return self.members.stacked.posterior.noise

    def sample(self, num_samples: int, *, key: Any) -> Ensemble[M]:
        """Draws members from the posteriors: their selected weights are replaced.

        Draws use the model itself, `predict` its linearisation: for inner layers draws predict worse.

        **Arguments:**

        - `num_samples`: the number of draws from each member.
        - `key`: one key, or one per member: [`eqx_ensemble.member_keys`][]`(key, members, purpose="laplace")`.

        **Returns:** the ensemble of all draws, those of one member adjacent.
        States are `ee.tree.take(posterior.state, np.repeat(np.arange(num_members), num_samples))`.
        """
        num_samples = _check.check_positive_int(num_samples, "num_samples")
        keys = _keys.member_keys(key, len(self.members), purpose="laplace")
        old, drawn = self.ensemble, run_members(LaplaceMember.draw, self.members, Each(keys), jnp.arange(num_samples))
        own = lambda x, axis, new: new.reshape(-1, *new.shape[2:]) if axis == 0 else x
        is_none = lambda x: x is None
        leaves, treedef = jax.tree.flatten(old.stacked, is_leaf=is_none)
        rows = zip(leaves, old.axes, jax.tree.leaves(drawn, is_leaf=is_none), strict=True)
        return Ensemble(jax.tree.unflatten(treedef, [own(*row) for row in rows]), old.axes)

    def predict(
        self, x: PyTree, *, link: Link = "probit", num_samples: int = 100, key: Any = None, **options: Any
    ) -> Any:
        r"""Posterior predictions of all members, with the models linearised in the weights.

        Outputs are Gaussian, with mean $f(x)$ and covariance $S = J P^{-1} J^\top$; for regression the variance
        includes the noise. For classes `link` approximates the mean probabilities:

        - `"probit"`, the default: $p_c \propto 1 / \sum_j \exp(-d_{cj})$ with $d_{cj} = (f_c - f_j) / \sqrt{1 + \pi
            \operatorname{Var}(f_c - f_j) / 8}$. Its error is below 0.02 for two classes; for three, with random
            covariances, it was 0.25 at most.
        - `"mc"`: `num_samples` draws per row, exact up to sampling error.

        **Arguments:**

        - `x`, `options`: as for [`eqx_ensemble.predict`][]; its `combine` may be [`eqx_ensemble.combine.mixture`][] for
            classes, [`eqx_ensemble.combine.gaussian`][] for regression.
        - `link`: for classes, as above.
        - `num_samples`, `key`: for `link="mc"`.

        **Returns:** for classes, log-probabilities `(members, rows, classes)`, also for two classes; for regression,
        [`eqx_ensemble.combine.Gaussian`][] `(members, rows, ...)`. With `combine`, its result.
        """
        _check.check_word(link, "link", LINKS)
        _check.check_positive_int(num_samples, "num_samples")
        if link == "mc" and key is None:
            raise TypeError(f'`{caller()}` needs `key` with `link="mc"`.')
        chance = {} if key is None else {"key": key, "inference": True}
        return predict(self.members, x, fn=Predict(link, num_samples), state=self.state, **chance, **options)

    def outputs(self, x: PyTree, **options: Any) -> Outputs:
        """The Gaussian distribution of each member's outputs for each row, from the linearised model, without noise.

        **Arguments:**

        - `x`, `options`: as for [`eqx_ensemble.predict`][], without `combine`.

        **Returns:** [`eqx_ensemble.methods.laplace.Outputs`][].
        """
        return predict(self.members, x, fn=LaplaceMember.outputs, state=self.state, **options)

    def log_marginal_likelihood(self, prior_precision: Any = None, noise: Any = None) -> Float[Array, " members"]:
        r"""The log marginal likelihood (evidence) of each member, in nats.

        $$\log p(y \mid w) - \tfrac12 \big(\log\det P - \log\det P_0 + \delta \lVert w \rVert^2\big)$$

        with $P_0 = \delta I$. Only posteriors over the same selection of weights are comparable.

        **Arguments:**

        - `prior_precision`, `noise`: one number or `(members,)` each; by default those of the fit.

        **Returns:** `(members,)`.
        """
        own = check_per_member("prior_precision", prior_precision, self.prior_precision)
        noises = check_per_member("noise", noise, self.noise)
        return run_members(LaplaceMember.log_evidence, self.members, own, noises)

    def optimise_prior(self, *, fit_noise: bool = False) -> "Laplace[M]":
        r"""Maximises the marginal likelihood of each member over its prior precision.

        The maximum is MacKay's fixed point $\delta = \gamma / \lVert w \rVert^2$ with $\gamma = \sum_i l_i / (l_i +
        \delta)$ and the eigenvalues $l_i$ of $P - \delta I$. The weights do not change: if the prior differs much from
        that of training, retrain.

        **Arguments:**

        - `fit_noise`: for regression, whether to optimise the noise too, $s^2 = \lVert y - f \rVert^2 / (N - \gamma)$.

        **Returns:** a new [`eqx_ensemble.methods.laplace.Laplace`][].

        **Raises:** `ValueError` if the marginal likelihood has no maximum.
        """
        precision, noise = run_members(_best_prior, self.members, fit_noise)
        found = jnp.isfinite(precision) & (precision > 1e-30)
        if noise is not None:
            found &= jnp.isfinite(noise) & (noise > 0)
        fix = "Their selected weights are zero, or the outputs do not depend on them."
        check_members(found, "a maximum of the marginal likelihood", "have none", fix)
        return replace(self, prior_precision=precision, noise=noise)


@eqx.filter_jit
def run_members(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn` of every member, compiled once for each function: its options are arguments, not those of a partial."""
    return over_members(fn)(*args)


def _best_prior(member: LaplaceMember, with_noise: bool) -> tuple[Array, Array | None]:  # noqa: FBT001
    """The prior precision and the noise that maximise the evidence of one member, with fixed weights."""
    own, (vector, _) = member.posterior, member.problem.weights(member.model)
    square = vector @ vector

    def precision(values: Float[Array, " weights"]) -> Float[Array, ""]:
        above = lambda precision: precision * square > jnp.sum(values / (values + precision))
        return _bisect(above, values.size / square)

    if own.noise is None or not with_noise:
        return precision(own.values if own.noise is None else own.values / own.noise**2), own.noise
    # The best noise has `loss / noise^2 + gamma` equal to the number of targets. With the best precision for each,
    # `gamma` is `precision |w|^2`, which rises with `1 / noise^2` as the first term does, so there is one root.
    above = lambda inverse: inverse * own.loss + precision(own.values * inverse) * square > own.count
    inverse = _bisect(above, own.count / own.loss)
    return precision(own.values * inverse), 1 / jnp.sqrt(inverse)


def _bisect(above: Callable[[Array], Array], most: Float[Array, ""]) -> Float[Array, ""]:
    """The smallest number up to `most` at which `above` holds, by bisection of its logarithm.

    64 halvings of a bracket of 80 are below the rounding of double precision.
    """
    high = jnp.log(most)

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (ends[0] + ends[1]) / 2
        is_above = above(jnp.exp(middle))
        return jnp.where(is_above, ends[0], middle), jnp.where(is_above, middle, ends[1])

    low, high = jax.lax.fori_loop(0, 64, halve, (high - 80.0, high))
    return jnp.exp((low + high) / 2)


def replace(posterior: Laplace[M], *, prior_precision: Any = None, noise: Any = None) -> Laplace[M]:
    """Replaces the prior precision or the noise of posteriors, without access to the data.

    The result equals a fit with these values: a prior precision can be selected on held-out rows.

    **Arguments:**

    - `posterior`: the result of [`eqx_ensemble.methods.laplace.fit`][].
    - `prior_precision`, `noise`: one number or `(members,)` each; unchanged by default.

    **Returns:** [`eqx_ensemble.methods.laplace.Laplace`][].

    ```python
    laplace = ee.methods.laplace
    ensemble = ee.build(lambda key: eqx.nn.MLP(2, 3, 8, 1, key=key), 4, key=key)
    data = jax.random.normal(key, (60, 2)), jnp.arange(60) % 3
    options = {"likelihood": "classification", "where": lambda model: model.layers[-1]}
    posterior = laplace.fit(ensemble, data, **options)
    posterior = laplace.replace(posterior, prior_precision=10.0)
    ```
    """
    if not isinstance(posterior, Laplace):
        raise TypeError(f"`{caller()}` needs what `methods.laplace.fit` returned, got {_check.kind_text(posterior)}.")
    priors = check_per_member("prior_precision", prior_precision, posterior.prior_precision)
    noises = check_per_member("noise", noise, posterior.noise)
    get = lambda members: (members.stacked.posterior.prior_precision, members.stacked.posterior.noise)
    new = [None if each is None else each.value for each in (priors, noises)]
    return Laplace(eqx.tree_at(get, posterior.members, new, is_leaf=lambda x: x is None), posterior.state)


def check_per_member(argument: str, value: Any, own: Array | None) -> Each | None:
    """Raises unless `value` is one positive number, or one per member. Returns one per member; `own` by default."""
    if value is None:
        return None if own is None else Each(own)
    if own is None:
        raise TypeError(f"`{caller()}` takes `{argument}` for regression only: classes have no noise.")
    array = _check.check_array(argument, value)
    if array.shape not in ((), own.shape):
        got = f"expected () or {own.shape}, got {array.shape}"
        raise _check.value_error(f"one `{argument}`, or one per member", got, "It is a scalar or `(members,)`.")
    fix = "`prior_precision` is that of a proper prior, `noise` a standard deviation in the unit of the targets."
    is_wrong = lambda host: ~((host > 0) & np.isfinite(host))
    _check.check_entries(f"`{argument}` above zero and finite", array, is_wrong, fix)
    return Each(jnp.broadcast_to(array.astype(own.dtype), own.shape))


def check_members(is_right: Array, needs: str, got: str, fix: str) -> None:
    """Raises an error that lists members unless all are right, if that can be read."""
    host = _check.concrete(is_right)
    if host is not None and not host.all():
        raise _check.value_error(needs, f"members {', '.join(map(str, np.flatnonzero(~host)))} {got}", fix)
