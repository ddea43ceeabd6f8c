from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from ... import combine
from ..._check import (
    as_column,
    check_floating_arrays,
    check_number,
    check_regression,
    check_row_weights,
    check_variance,
    check_weights,
    value_error,
)
from ..._weighting import blank_unweighted
from ...scores._engine import CheckedRowWeights, Reduction, log_density, reduce
from ._check import check_increasing_levels, check_parameters, check_quantiles, check_raw


def pinball_loss(
    quantiles: Float[ArrayLike, "*batch levels"],
    targets: Real[ArrayLike, "*batch"],
    *,
    levels: Real[ArrayLike, " levels"],
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of a head that predicts several quantiles: the mean of their pinball scores, in the unit of the target.

    $\frac1L \sum_l \max(\tau_l (y - q_l), (\tau_l - 1) (y - q_l))$. Twice its value at the levels $(l - \frac12) / L$
    approximates the CRPS.

    **Arguments:**

    - `quantiles`: `(*batch, levels)`, the unchanged outputs of a last layer.
    - `targets`: `(*batch,)`.
    - `levels`: `(levels,)`, increasing, between 0 and 1.

    ```python
    quantiles, levels = jnp.array([[0.0, 2.0, 3.0]]), jnp.array([0.1, 0.5, 0.9])
    # (0.1 * 2 + 0.5 * 0 + 0.1 * 1) / 3 = 0.1
    ee.methods.heads.pinball_loss(quantiles, jnp.array([2.0]), levels=levels)
    ```

    ??? cite
        [Koenker and Bassett 1978](https://doi.org/10.2307/1913643)
    """
    checked = check_quantiles(quantiles)
    every_level = check_increasing_levels(levels, checked)
    _, observed = check_regression(targets, members=False, quantiles=checked[..., 0])
    dtype = observed.dtype  # float64 where the targets are
    rows = check_row_weights(row_weights, observed.shape, dtype, reduction=reduction)
    known = rows.blank(checked.astype(dtype))
    return _pinball_loss(known, rows.blank(observed), every_level.astype(dtype), rows.weights, reduction)


def sort_quantiles(quantiles: Float[ArrayLike, "*batch levels"]) -> Float[Array, "*batch levels"]:
    """Sorts predicted quantiles, which may cross. This never increases the pinball loss of a row.

    Sort predictions, not outputs during training. Combine members level by level. Two levels are an interval, for
    [`eqx_ensemble.conformal.cqr`][] and [`eqx_ensemble.scores.interval_score`][].

    **Returns:** `(*batch, levels)`, like `quantiles`, of increasing levels. A row with a NaN is NaN at every level.

    ```python
    ee.methods.heads.sort_quantiles(jnp.array([1.0, 3.0, 2.0]))  # [1.0, 2.0, 3.0]
    ```

    ??? cite
        [Chernozhukov et al. 2010](https://doi.org/10.3982/ECTA7880)
    """
    checked = check_quantiles(quantiles)
    unknown = jnp.any(jnp.isnan(checked), axis=-1, keepdims=True)
    return jnp.where(unknown, jnp.nan, jnp.sort(checked, axis=-1))


@partial(jax.jit, static_argnames="reduction")
def _pinball_loss(
    quantiles: Float[Array, "*batch levels"],
    targets: Float[Array, "*batch"],
    levels: Float[Array, " levels"],
    row_weights: CheckedRowWeights | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    error = targets[..., None] - quantiles
    own = jnp.broadcast_to(levels, error.shape)
    return reduce(jnp.mean(jnp.where(error < 0, own - 1, own) * error, axis=-1), reduction, row_weights)


class MixtureDensity(NamedTuple):
    """Parameters of a mixture of Gaussians per entry; the last axis holds the components.

    **Attributes:** `logits`, whose softmax gives the weights; `mean` and `variance`, above 0, of each component.
    """

    logits: Float[Array, "... components"]
    mean: Float[Array, "... components"]
    variance: Float[Array, "... components"]


class MixtureComponents(NamedTuple):
    """The components of all members, as separate members with one weight per row.

    **Attributes:** `mean`, `variance`, `weights`, each `(members * components, *batch)`.
    """

    mean: Float[Array, "components ..."]
    variance: Float[Array, "components ..."]
    weights: Float[Array, "components ..."]


def mixture_density(raw: Float[ArrayLike, "*batch outputs"], *, floor: float = 1e-6) -> MixtureDensity:
    """The head of a mixture density network: maps the outputs of a last layer to a mixture of Gaussians.

    The first third are logits of the components, the second their means; variances are the softplus of the last third,
    plus `floor`.

    **Arguments:**

    - `raw`: `(*batch, 3 * components)`.
    - `floor`: zero or more. Without one, a component may collapse onto a target; 1e-3 is usual for standardised
        targets.

    **Returns:** [`eqx_ensemble.methods.heads.MixtureDensity`][], three arrays `(*batch, components)`.

    ```python
    # logits [0, 0], means [-1, 1], variances [0.693, 0.693]
    ee.methods.heads.mixture_density(jnp.array([0.0, 0.0, -1.0, 1.0, 0.0, 0.0]))
    ```

    ??? cite
        [Bishop 1994](https://publications.aston.ac.uk/id/eprint/373/)
    """
    least = check_number(floor, "floor", least=0)
    array = check_raw(raw, multiple=3, exact=False, parameters="logits, means and raw variances of the components")
    logits, mean, variance = jnp.split(array, 3, axis=-1)
    return MixtureDensity(logits, mean, jax.nn.softplus(variance) + least)


def mixture_density_moments(parameters: MixtureDensity) -> combine.Gaussian:
    r"""Mean and variance of each mixture: $\sum_k \pi_k \mu_k$, and $\sum_k \pi_k (\sigma_k^2 + (\mu_k - \mu)^2)$.

    With a `members` axis they are per member, for [`eqx_ensemble.combine.gaussian`][] and
    [`eqx_ensemble.uncertainty.decompose_variance`][].

    **Returns:** [`eqx_ensemble.combine.Gaussian`][], without the axis of components.

    ```python
    means = jnp.array([-1.0, 1.0])
    parameters = ee.methods.heads.MixtureDensity(jnp.zeros(2), means, jnp.ones(2))
    ee.methods.heads.mixture_density_moments(parameters)  # mean 0, variance 2
    ```
    """
    logits, mean, variance = check_density(parameters)
    check_variance(parameters.variance, positive=False)
    first = lambda x: jnp.moveaxis(x, -1, 0)
    return combine.gaussian(first(mean), first(variance), weights=first(jax.nn.softmax(logits, axis=-1)))


def mixture_components(
    parameters: MixtureDensity, *, weights: Real[ArrayLike, " members"] | None = None
) -> MixtureComponents:
    """The components of the mixture over all members, as Gaussian members with one weight per row.

    `ee.scores.nll_gaussian_mixture(mean, variance, targets, weights=weights)` is the score of the whole ensemble;
    [`eqx_ensemble.combine.gaussian`][] takes them too.

    **Arguments:**

    - `parameters`: those of ALL members, [`eqx_ensemble.methods.heads.MixtureDensity`][] of arrays `(members, *batch,
        components)`.
    - `weights`: weights of the members, `(members,)`, normalised to sum to 1.

    **Returns:** [`eqx_ensemble.methods.heads.MixtureComponents`][].

    ```python
    parameters = ee.methods.heads.MixtureDensity(*jnp.ones((3, 5, 7, 2)))  # five members
    mean, variance, weights = ee.methods.heads.mixture_components(parameters)  # (10, 7)
    ee.scores.nll_gaussian_mixture(mean, variance, jnp.ones(7), weights=weights)  # 0.919
    ```
    """
    logits, mean, variance = check_density(parameters)
    if mean.ndim < 2 or mean.shape[0] < 1:
        needs = "`parameters` of arrays (members, *batch, components)"
        fix = "One member? `jax.tree.map(lambda x: x[None], parameters)`."
        raise value_error(needs, f"got shape {mean.shape}", fix)
    check_variance(parameters.variance, positive=False, weights=weights)
    num_members = mean.shape[0]
    convex = check_weights(weights, num_members, mean.dtype)
    logits, mean, variance = (blank_unweighted(x, convex, fill=1) for x in (logits, mean, variance))
    if convex is None:
        convex = jnp.full(num_members, 1 / num_members, mean.dtype)
    shares = jax.nn.softmax(logits, axis=-1) * as_column(convex, mean.ndim)
    flat = lambda x: jnp.moveaxis(x, -1, 1).reshape((-1, *x.shape[1:-1]))
    return MixtureComponents(flat(mean), flat(variance), flat(shares))


def check_density(parameters: MixtureDensity) -> tuple[Array, ...]:
    """Raises unless parameters have one shape `(*batch, components)`. Returns their arrays in one dtype."""
    check_parameters(parameters, MixtureDensity, "mixture_density")
    arrays = check_floating_arrays(**parameters._asdict())
    if arrays[0].ndim < 1 or arrays[0].shape[-1] < 1:
        needs, fix = "`parameters` of arrays (*batch, components)", "The components are the last axis."
        raise value_error(needs, f"got shape {arrays[0].shape}", fix)
    return arrays


def mixture_density_loss(
    parameters: MixtureDensity,
    targets: Real[ArrayLike, "*batch"],
    *,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of a mixture density network: $-\log \sum_k \pi_k \, \mathcal{N}(y; \mu_k, \sigma_k^2)$, in nats.

    For the mixture over all members see [`eqx_ensemble.methods.heads.mixture_components`][].

    **Arguments:**

    - `parameters`: [`eqx_ensemble.methods.heads.MixtureDensity`][] of arrays `(*batch, components)`.
    - `targets`: `(*batch,)`. Several outputs per row are separate entries, each with its mixture.

    ```python
    parameters = ee.methods.heads.mixture_density(jnp.zeros((4, 6)))
    ee.methods.heads.mixture_density_loss(parameters, jnp.zeros(4))  # 0.736
    ```

    ??? cite
        [Bishop 1994](https://publications.aston.ac.uk/id/eprint/373/)
    """
    logits, mean, variance = check_density(parameters)
    _, observed = check_regression(targets, members=False, parameters=mean[..., 0])
    dtype = observed.dtype  # float64 where the targets are
    rows = check_row_weights(row_weights, observed.shape, dtype, reduction=reduction)
    check_variance(parameters.variance, positive=True, rows=rows.known_along(variance.ndim))
    arrays = zip((logits, mean, variance), (0, 0, 1), strict=True)
    known = (rows.blank(x.astype(dtype), fill=fill) for x, fill in arrays)
    return _loss(MixtureDensity(*known), rows.blank(observed), rows.weights, reduction)


@partial(jax.jit, static_argnames="reduction")
def _loss(
    parameters: MixtureDensity,
    targets: Float[Array, "*batch"],
    row_weights: CheckedRowWeights | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    every = jnp.broadcast_to(targets[..., None], parameters.mean.shape)
    logs = jax.nn.log_softmax(parameters.logits, axis=-1) + log_density(parameters.mean, parameters.variance, every)
    return reduce(-jax.nn.logsumexp(logs, axis=-1), reduction, row_weights)
