from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ... import _keys
from ..._axes import Each
from ..._caller import caller
from ..._check import check_flag, check_positive_int, kind_text
from ..._compiled import filter_jit
from ..._ensemble import Ensemble, check_index_of_members, take
from ..._predict import predict
from ..._pytree import PyTree
from ...plan._engine import over_members
from .._check import check_options
from ..trajectory._check import check_factor_ids
from ._check import check_link, check_optimum, check_per_member, check_sampling
from ._member import LaplaceMember, Link, Outputs, Predict, PredictOutputs, log_likelihood

_HALVINGS = 64  # of a bracket of width `_WIDTH` in log space: below the rounding of double precision
_WIDTH = 80.0
_MOST_ROUNDS = 1_000


def log_evidence(member: LaplaceMember, prior_precision: Any, noise: Any) -> Float[Array, ""]:
    """The log marginal likelihood of the data under one member, in nats."""
    posterior = member.posterior
    values = posterior.curvature.values if noise is None else posterior.curvature.values / noise**2
    vector = posterior.selection.vector(member.model)
    logdets = jnp.sum(jnp.log1p(values / prior_precision))  # log det of the posterior precision minus that of the prior
    fit = log_likelihood(member.problem.likelihood, posterior.loss, posterior.count, noise)
    return fit - (logdets + prior_precision * (vector @ vector)) / 2


def best_prior(member: LaplaceMember, *, with_noise: bool) -> tuple[Float[Array, ""], Float[Array, ""] | None]:
    """The prior precision and the noise that maximise the evidence of one member, with fixed weights.

    The derivatives with respect to the logarithms of precision and noise each have one root. They are bisected in turn,
    so the evidence never decreases.
    """
    posterior = member.posterior
    vector = posterior.selection.vector(member.model)
    values, square = posterior.curvature.values, vector @ vector
    if posterior.noise is None or not with_noise:
        scaled = values if posterior.noise is None else values / posterior.noise**2
        return _best_precision(scaled, square), posterior.noise

    def advance(carry: tuple) -> tuple:
        precision, inverse, _, count = carry
        new_precision = _best_precision(values * inverse, square)
        new_inverse = _best_inverse(values, new_precision, posterior.loss, posterior.count)
        moved = jnp.abs(jnp.log(new_precision / precision)) + jnp.abs(jnp.log(new_inverse / inverse))
        return new_precision, new_inverse, moved, count + 1

    def goes_on(carry: tuple) -> Array:
        *_, moved, count = carry
        return (moved > 4 * jnp.finfo(values.dtype).eps) & (count < _MOST_ROUNDS)

    start = posterior.prior_precision, 1 / posterior.noise**2, jnp.full_like(square, jnp.inf), 0
    precision, inverse, _, _ = jax.lax.while_loop(goes_on, advance, start)
    return precision, 1 / jnp.sqrt(inverse)


def _best_precision(values: Float[Array, " weights"], square: Float[Array, ""]) -> Float[Array, ""]:
    """The root of `precision |w|^2 = gamma`, MacKay's fixed point; 0 or infinite without one."""
    above = lambda precision: precision * square > jnp.sum(values / (values + precision))
    return _bisect(above, values.size / square)


def _best_inverse(
    values: Float[Array, " weights"], precision: Float[Array, ""], loss: Float[Array, ""], count: Float[Array, ""]
) -> Float[Array, ""]:
    """The root of `loss / noise^2 = count - gamma`, in `1 / noise^2`."""
    above = lambda inverse: inverse * loss + jnp.sum(values * inverse / (values * inverse + precision)) > count
    return _bisect(above, count / loss)


def _bisect(above: Any, most: Float[Array, ""]) -> Float[Array, ""]:
    """The smallest number up to `most` at which `above` holds, by bisection of its logarithm."""
    high = jnp.log(most)

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        is_above = above(jnp.exp(middle))
        return jnp.where(is_above, low, middle), jnp.where(is_above, middle, high)

    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, (high - _WIDTH, high))
    return jnp.exp((low + high) / 2)


_is_none = lambda x: x is None


def draw(members: Ensemble, ensemble: Ensemble, num_samples: int, key: Any) -> Ensemble[Any]:
    """An ensemble of draws from all members' posteriors."""
    keys = _keys.member_keys(key, members.ids, purpose="laplace")
    arrays = _draw(members, Each(keys), jnp.arange(num_samples))
    shape = lambda x: x.reshape(-1, *x.shape[2:])
    stacked = jax.tree.map(
        lambda old, new: None if old is None else shape(new), ensemble.arrays, arrays, is_leaf=_is_none
    )
    numbers = jnp.arange(num_samples, dtype=jnp.int32)
    ids = (members.ids[:, None] * num_samples + numbers[None]).astype(jnp.int32).ravel()
    return Ensemble(stacked, ensemble.shared, ids)


@filter_jit
def _draw(members: Ensemble, keys: Each, numbers: jax.Array) -> PyTree:
    """The arrays of all draws, each `(members, draws, ...)`."""

    def of_member(member: LaplaceMember, key: jax.Array) -> PyTree:
        posterior = member.posterior
        mean, precision = posterior.selection.vector(member.model), posterior.precision

        def one(number: jax.Array) -> PyTree:
            noise = jax.random.normal(jax.random.fold_in(key, number), precision.shape, precision.dtype)
            away = posterior.curvature.rotate(noise / jnp.sqrt(precision))
            return eqx.filter(posterior.selection.insert(member.model, mean + away), eqx.is_array)

        return jax.vmap(one)(numbers)

    return over_members(of_member)(members, keys)


M = TypeVar("M")


class Laplace(eqx.Module, Generic[M]):
    """Gaussian posteriors over the weights of all members, the result of [`eqx_ensemble.methods.laplace.fit`][].

    `posterior[[0, 2]]` selects members and keeps their ids.

    **Attributes:**

    - `members`: an ensemble of the members with their posteriors.
    - `state`: the stacked `equinox.nn.State` of stateful members, else `None`.
    """

    members: Ensemble[LaplaceMember[M]]
    state: eqx.nn.State | None

    def __getitem__(self, index: Any) -> "Laplace[M]":
        """Selects members by an integer, a slice, a list of integers or a mask."""
        check_index_of_members(index)
        if isinstance(index, int | np.integer):
            index = [index]
        elif isinstance(index, jax.Array | np.ndarray) and index.ndim == 0:
            index = index.reshape(1)
        return take(self, index)

    @property
    def ensemble(self) -> Ensemble[M]:
        """The ensemble of the members' trained weights, the means of the posteriors."""
        return Ensemble(self.members.stacked.model, self.members.shared.model, self.members.ids)

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
        - `key`: the root key. The random stream of a member is derived from its id.

        **Returns:** the ensemble of all draws, those of one member adjacent, with the ids `id * num_samples + i`.
        States are `ee.tree.take(posterior.state, np.repeat(np.arange(num_members), num_samples))`.
        """
        num_samples = check_positive_int(num_samples, "num_samples")
        key = _keys.root(key)
        check_factor_ids(self.members.ids, num_samples)
        return draw(self.members, self.ensemble, num_samples, key)

    def predict(
        self,
        x: PyTree,
        *,
        link: Link | None = None,
        num_samples: int | None = None,
        combine: Callable[..., Any] | None = None,
        key: Any = None,
        **options: Any,
    ) -> PyTree:
        r"""Posterior predictions of all members, with the models linearised in the weights.

        Outputs are Gaussian, with mean $f(x)$ and covariance $S = J P^{-1} J^\top$; for regression the variance
        includes the noise. For classes `link` approximates the mean probabilities:

        - `"probit"`, the default: $p_c \propto 1 / \sum_j \exp(-d_{cj})$ with $d_{cj} = (f_c - f_j) / \sqrt{1 + \pi
            \operatorname{Var}(f_c - f_j) / 8}$. Its error is below 0.02 for two classes; for three, with random
            covariances, it was 0.25 at most.
        - `"mc"`: `num_samples` draws per row, exact up to sampling error.
        - `"bridge"`: the Laplace bridge, which ignores the scale of $S$; `"bridge_norm"` rescales first. Not for
            `"binary"`.

        **Arguments:**

        - `x`, `options`: as for [`eqx_ensemble.predict`][].
        - `link`: for classes, as above.
        - `num_samples`, `key`: for `link="mc"`; 100 draws by default.
        - `combine`: such as [`eqx_ensemble.combine.mixture`][] for classes, [`eqx_ensemble.combine.gaussian`][] for
            regression.

        **Returns:** for classes, log-probabilities `(members, rows, classes)`, also for two classes; for regression,
        [`eqx_ensemble.combine.Gaussian`][] `(members, rows, ...)`. With `combine`, its result.
        """
        check_options(options, ("fn", "state"), "the posterior has them")
        link = check_link(link, self.members.stacked.problem.likelihood)
        num_samples = check_sampling(link, num_samples, key)
        fn = Predict(link or "probit", num_samples)
        chance = {} if key is None else {"key": key, "inference": True}
        return predict(self.members, x, fn=fn, combine=combine, state=self.state, **chance, **options)

    def outputs(self, x: PyTree, **options: Any) -> Outputs:
        """The Gaussian distribution of each member's outputs for each row, from the linearised model, without noise.

        **Arguments:**

        - `x`, `options`: as for [`eqx_ensemble.predict`][], without `combine`.

        **Returns:** [`eqx_ensemble.methods.laplace.Outputs`][].
        """
        check_options(options, ("fn", "state"), "the posterior has them")
        return predict(self.members, x, fn=PredictOutputs(), state=self.state, **options)

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
        return _log_evidence(self.members, own, noises)

    def optimise_prior(self, *, fit_noise: bool = False) -> "Laplace[M]":
        r"""Maximises the marginal likelihood of each member over its prior precision.

        The maximum is MacKay's fixed point $\delta = \gamma / \lVert w \rVert^2$ with $\gamma = \sum_i l_i / (l_i +
        \delta)$ and the eigenvalues $l_i$ of $P - \delta I$. The weights do not change: if the prior differs much from
        that of training, retrain.

        **Arguments:**

        - `fit_noise`: whether to optimise the noise too, $s^2 = \lVert y - f \rVert^2 / (N - \gamma)$.

        **Returns:** a new [`eqx_ensemble.methods.laplace.Laplace`][].

        **Raises:** `ValueError` if the marginal likelihood has no maximum.
        """
        with_noise = check_flag(fit_noise, "fit_noise")
        if with_noise:
            check_per_member("fit_noise", None if self.noise is not None else 1.0, self.noise)
        precision, noise = _best_prior(self.members, with_noise)
        check_optimum(precision, noise, self.members.ids)
        return with_values(self, precision, noise)


def with_values(posterior: Laplace[M], prior_precision: Array, noise: Array | None) -> Laplace[M]:
    """Replaces the prior precision and the noise of posteriors."""
    get = lambda members: (members.stacked.posterior.prior_precision, members.stacked.posterior.noise)
    members = eqx.tree_at(get, posterior.members, (prior_precision, noise), is_leaf=lambda x: x is None)
    return Laplace(members, posterior.state)


@filter_jit
def _log_evidence(members: Ensemble, prior_precision: Array, noise: Array | None) -> Float[Array, " members"]:
    return over_members(log_evidence)(members, Each(prior_precision), None if noise is None else Each(noise))


@filter_jit
def _best_prior(members: Ensemble, with_noise: bool) -> tuple[Array, Array | None]:  # noqa: FBT001
    return over_members(lambda member: best_prior(member, with_noise=with_noise))(members)


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
        raise TypeError(f"`{caller()}` needs what `methods.laplace.fit` returned, got {kind_text(posterior)}.")
    if prior_precision is None and noise is None:
        raise TypeError(f"`{caller()}` needs `prior_precision` or `noise`, got neither.")
    precision = check_per_member("prior_precision", prior_precision, posterior.prior_precision)
    return with_values(posterior, precision, check_per_member("noise", noise, posterior.noise))
