import dataclasses
import math
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from ... import _check, _keys
from ..._boundary import array_function, kinds
from ..._brief import brief_repr
from ..._caller import caller
from ..._ensemble import Ensemble, take
from ..._map import map_members
from ..._marks import Each
from ..._predict import predict
from ..._pytree import PyTree
from ...combine import Gaussian

M = TypeVar("M")
Link = Literal["probit", "mc"]


class Outputs(NamedTuple):
    """The result of [`eqx_ensemble.methods.laplace.Laplace.outputs`][], for each member and row.

    **Attributes:**

    - `mean`: `(members, rows, out)`, the outputs of the model, flattened to one axis.
    - `covariance`: `(members, rows, out, out)`.
    """

    mean: Float[Array, "*batch out"]
    covariance: Float[Array, "*batch out out"]

    def __repr__(self) -> str:
        return brief_repr(self)


class Setting(NamedTuple):
    """What is static, with the positions of the selected leaves of a model, and the shape of its outputs for a row."""

    likelihood: str
    structure: str
    positions: tuple[int, ...]
    shape: tuple[int, ...]
    fn: Callable[..., Any] | None

    def weights(self, model: M) -> tuple[Float[Array, " weights"], Callable[[Float[Array, " weights"]], M]]:
        """The selected weights as a vector, at least float32, and the function that puts others into the model."""
        leaves, treedef = jax.tree.flatten(model)
        own = {i: jnp.asarray(leaves[i]) for i in self.positions}
        dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in own.values()) else jnp.float32
        vector, unravel = jax.flatten_util.ravel_pytree({i: x.astype(dtype) for i, x in own.items()})

        def insert(vector: Float[Array, " weights"]) -> M:
            new = {i: x.astype(own[i].dtype) for i, x in unravel(vector).items()}
            return jax.tree.unflatten(treedef, [new.get(i, leaf) for i, leaf in enumerate(leaves)])

        return vector, insert

    def linearise(
        self, model: PyTree, x: PyTree, state: Any
    ) -> tuple[Float[Array, " out"], Float[Array, "out weights"]]:
        """The flattened outputs for one row, and their Jacobian with respect to the selected weights."""
        vector, insert = self.weights(model)
        outputs = lambda vector: outputs_of(self.fn, insert(vector), x, state).ravel().astype(vector.dtype)
        found, pull = jax.vjp(outputs, vector)
        return found, jax.vmap(pull)(jnp.eye(found.size, dtype=vector.dtype))[0]


def outputs_of(fn: Callable[..., Any] | None, model: Any, x: PyTree, state: eqx.nn.State | None) -> Any:
    """The outputs of a model for one row, not flattened."""
    given = (x,) if state is None else (x, state)
    out = model(*given) if fn is None else fn(model, *given)
    return out if state is None else out[0]


class LaplaceMember(eqx.Module, Generic[M]):
    """A model and the Gaussian posterior of its selected weights, centred at them.

    `values` are the eigenvalues of the generalised Gauss-Newton matrix, without noise, and the columns of `vectors` its
    eigenvectors, `None` for unit vectors. `loss` and `count` are sums over the rows: of the losses of the likelihood,
    and of the number of targets.
    """

    model: M
    values: Float[Array, " weights"]
    vectors: Float[Array, "weights weights"] | None
    prior_precision: Float[Array, ""]
    noise: Float[Array, ""] | None
    loss: Float[Array, ""]
    count: Float[Array, ""]
    setting: Setting = eqx.field(static=True)

    @property
    def precision(self) -> Float[Array, " weights"]:
        """The eigenvalues of the posterior's precision."""
        return self.prior_precision + (self.values if self.noise is None else self.values / self.noise**2)

    def outputs(self, x: PyTree, state: eqx.nn.State | None = None) -> Outputs:
        """Mean and covariance of the outputs for one row."""
        mean, jacobian = self.setting.linearise(self.model, x, state)
        scaled = (jacobian if self.vectors is None else jacobian @ self.vectors) / jnp.sqrt(self.precision)[None]
        return Outputs(mean, scaled @ scaled.T)

    def draw(self, key: Key[Array, ""], numbers: Int[Array, " draws"]) -> PyTree:
        """The arrays of models with weights drawn from the posterior, each `(draws, ...)`."""
        vector, insert = self.setting.weights(self.model)

        def one(number: Int[Array, ""]) -> PyTree:
            noise = jax.random.normal(jax.random.fold_in(key, number), vector.shape, vector.dtype)
            away = noise / jnp.sqrt(self.precision)
            return eqx.filter(insert(vector + (away if self.vectors is None else self.vectors @ away)), eqx.is_array)

        return jax.vmap(one)(numbers)

    def evidence(self) -> Float[Array, ""]:
        """The log marginal likelihood of the data, in nats."""
        vector, values, fit = self.setting.weights(self.model)[0], self.values, -self.loss
        if self.noise is not None:
            values = values / self.noise**2
            fit = fit / (2 * self.noise**2) - self.count * (jnp.log(self.noise) + math.log(2 * math.pi) / 2)
        # The determinants are that of the posterior's precision over that of the prior's.
        logdets = jnp.sum(jnp.log1p(values / self.prior_precision))
        return fit - (logdets + self.prior_precision * (vector @ vector)) / 2

    def best_prior(self, fit_noise: bool) -> tuple[Array, Array | None]:  # noqa: FBT001
        """The prior precision and the noise that maximise the evidence, with fixed weights."""
        vector = self.setting.weights(self.model)[0]
        square = vector @ vector

        def precision(values: Float[Array, " weights"]) -> Float[Array, ""]:
            above = lambda precision: precision * square > jnp.sum(values / (values + precision))
            return _bisect(above, values.size / square)

        if self.noise is None or not fit_noise:
            return precision(self.values if self.noise is None else self.values / self.noise**2), self.noise
        # The best noise has `loss / noise^2 + gamma` equal to the number of targets. With the best precision for each,
        # `gamma` is `precision |w|^2`, which rises with `1 / noise^2` as the first term does, so there is one root.
        above = lambda inverse: inverse * self.loss + precision(self.values * inverse) * square > self.count
        inverse = _bisect(above, self.count / self.loss)
        return precision(self.values * inverse), 1 / jnp.sqrt(inverse)


def _bisect(above: Callable[[Array], Array], most: Float[Array, ""]) -> Float[Array, ""]:
    """The smallest number up to `most` at which `above` holds, by 64 halvings of a bracket of 80 of its logarithm."""
    high = jnp.log(most)

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (ends[0] + ends[1]) / 2
        is_above = above(jnp.exp(middle))
        return jnp.where(is_above, ends[0], middle), jnp.where(is_above, middle, ends[1])

    low, high = jax.lax.fori_loop(0, 64, halve, (high - 80.0, high))
    return jnp.exp((low + high) / 2)


def probit(mean: Float[Array, " classes"], covariance: Float[Array, "classes classes"]) -> Float[Array, " classes"]:
    """Log-probabilities from differences of logits, divided by `sqrt(1 + pi / 8 * variance)` of the difference."""
    variances = jnp.diagonal(covariance)
    # Of a difference: what all logits share cancels. Rounding may leave it negative.
    spread = jnp.maximum(variances[:, None] + variances[None] - 2 * covariance, 0)
    differences = (mean[:, None] - mean[None]) / jnp.sqrt(1 + math.pi / 8 * spread)
    return jax.nn.log_softmax(-jax.nn.logsumexp(-differences, axis=1))


def monte_carlo(
    mean: Float[Array, " classes"], covariance: Float[Array, "classes classes"], num_samples: int, key: Key[Array, ""]
) -> Float[Array, " classes"]:
    """The logarithm of the mean probabilities over draws of the logits."""
    values, vectors = jnp.linalg.eigh(covariance)  # the covariance may be singular
    root = vectors * jnp.sqrt(jnp.maximum(values, 0))[None]
    noise = jax.random.normal(key, (num_samples, mean.shape[0]), mean.dtype)
    logs = jax.nn.log_softmax(mean[None] + noise @ root.T)
    return jax.nn.logsumexp(logs, axis=0) - math.log(num_samples)


@dataclasses.dataclass(frozen=True)
class Predict:
    """Calls a member for its prediction."""

    link: Link
    num_samples: int

    def __call__(self, member: LaplaceMember, x: PyTree, state: Any = None, *, key: Any = None) -> Any:
        (mean, covariance), setting = member.outputs(x, state), member.setting
        if member.noise is not None:
            variance = jnp.diagonal(covariance) + member.noise**2
            return Gaussian(mean.reshape(setting.shape), variance.reshape(setting.shape))
        if setting.likelihood == "binary":  # one logit: the other one is zero
            mean, covariance = jnp.pad(mean, (1, 0)), jnp.pad(covariance, ((1, 0), (1, 0)))
        return (
            probit(mean, covariance) if self.link == "probit" else monte_carlo(mean, covariance, self.num_samples, key)
        )


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
        axes = jax.tree.leaves(self.members.in_axes().stacked.model, is_leaf=_is_none)
        return Ensemble(self.members.stacked.model, tuple(axes))

    @property
    def prior_precision(self) -> Float[Array, " members"]:
        """The precision of each member's prior."""
        return self.members.stacked.prior_precision

    @property
    def noise(self) -> Float[Array, " members"] | None:
        """The standard deviation of the noise of each member; `None` for classes."""
        return self.members.stacked.noise

    def sample(self, num_samples: int, *, key: Any) -> Ensemble[M]:
        """Draws members from the posteriors: their selected weights are replaced.

        Draws use the model itself, `predict` its linearisation: for inner layers draws predict worse.

        **Arguments:**

        - `num_samples`: the number of draws from each member.
        - `key`: one key, or one per member: [`eqx_ensemble.member_keys`][]`(key, members, purpose="laplace")`.

        **Returns:** the ensemble of all draws, those of one member adjacent.
        States are `ee.tree.take(posterior.state, np.repeat(np.arange(num_members), num_samples))`.
        """
        old, keys = self.ensemble, _keys.member_keys(key, len(self.members), purpose="laplace")
        drawn = run_members(LaplaceMember.draw, self.members, Each(keys), jnp.arange(num_samples))
        pairs = zip(
            old.axes, *(jax.tree.leaves(x, is_leaf=_is_none) for x in (old.stacked, drawn.stacked)), strict=True
        )
        leaves = [new.reshape(-1, *new.shape[2:]) if axis == 0 else x for axis, x, new in pairs]
        return Ensemble(jax.tree.unflatten(jax.tree.structure(old.stacked, is_leaf=_is_none), leaves), old.axes)

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
        _check.check_word(link, "link", ("probit", "mc"))
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
        other = with_prior(self, prior_precision=prior_precision, noise=noise)
        return run_members(LaplaceMember.evidence, other.members)

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
        precision, noise = run_members(LaplaceMember.best_prior, self.members, fit_noise)
        fine = jnp.isfinite(precision) & (precision > 1e-30)
        if noise is not None:
            fine &= jnp.isfinite(noise) & (noise > 0)
        fix = "Their selected weights are zero, or the outputs do not depend on them."
        check_members(fine, "a maximum of the marginal likelihood", fix)
        return with_prior(self, prior_precision=precision, noise=noise)


_is_none = lambda x: x is None


@eqx.filter_jit
def run_members(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn` of every member, compiled once for each function: its options are arguments, not those of a partial."""
    return map_members(fn)(*args)


def with_prior(posterior: Laplace[M], *, prior_precision: Any = None, noise: Any = None) -> Laplace[M]:
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
    posterior = laplace.with_prior(posterior, prior_precision=10.0)
    ```
    """
    members = posterior.members.stacked
    own = for_members(len(posterior.members), members.setting.likelihood, prior_precision, noise)
    old = members.prior_precision, members.noise
    new = [x if y is None else y.astype(members.values.dtype) for x, y in zip(old, own, strict=True)]
    get = lambda members: (members.stacked.prior_precision, members.stacked.noise)
    return Laplace(eqx.tree_at(get, posterior.members, new, is_leaf=_is_none), posterior.state)


def for_members(num_members: int, likelihood: str, prior_precision: Any, noise: Any) -> list[Array | None]:
    """Raises unless both are `None`, or positive numbers, one or one for each member. Returns one for each."""
    if noise is not None and likelihood != "regression":
        raise TypeError(f"`{caller()}` takes `noise` for regression only: classes have no noise.")
    given = _above_zero(prior_precision=prior_precision, noise=noise)
    return [None if x is None else jnp.broadcast_to(x, (num_members,)) for x in given]


@array_function
def _above_zero(*, prior_precision: kinds.PriorPrecision = None, noise: kinds.NoiseOfTargets = None) -> Any:
    return prior_precision, noise


def check_members(is_right: Array, needs: str, fix: str) -> None:
    """Raises an error that lists members unless all are right, if that can be read."""
    host = _check.concrete(is_right)
    if host is not None and not host.all():
        raise _check.value_error(needs, f"members {', '.join(map(str, np.flatnonzero(~host)))} have none", fix)
