import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import array_function, counted_rows, kinds
from .._check import value_error
from .._leaves import as_column
from .._weighting import moments, weighted_mean
from ._distributions import Estimator, check_estimator
from ._groups import square_root


@array_function
def dawid_sebastiani(
    samples: kinds.Samples,
    targets: kinds.Targets,
    *,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Dawid-Sebastiani score of the mean and the variance of the members' point predictions.

    $(y - \mu)^2 / \sigma^2 + \log \sigma^2$ with the members' mean $\mu$ and variance $\sigma^2$ (ddof 1). For members
    that predict variances use [`eqx_ensemble.scores.nll_gaussian`][].

    **Arguments:**

    As [`eqx_ensemble.scores.crps`][]; at least two members, equally weighted.

    **Returns:**

    A scalar, or `(*batch,)`. Not finite where all members are equal.

    ```python
    ee.scores.dawid_sebastiani(jnp.array([[0.0], [2.0]]), jnp.array([1.0]))
    # log(2) = 0.693
    ```

    ??? cite
        [Dawid and Sebastiani, AoS 1999](https://doi.org/10.1214/aos/1018031101)
    """
    if samples.shape[0] < 2:
        fix = "For one member that predicts a variance use `scores.nll_gaussian`."
        raise value_error("at least two members to compute a variance", f"got {samples.shape[0]}", fix)
    errors = samples - targets[None]  # whose mean loses no precision to a common offset
    # Of ignored rows all members are equal, whose gradient would be NaN.
    numbers = as_column(jnp.arange(samples.shape[0], dtype=errors.dtype), errors.ndim)
    errors = errors if row_weights is None else jnp.where(counted_rows(row_weights)[None], errors, numbers)
    variance = jnp.var(errors, axis=0, ddof=1)
    return jnp.mean(errors, axis=0) ** 2 / variance + jnp.log(variance)


@array_function
def energy_score(
    samples: kinds.Vectors,
    targets: kinds.TargetVectors,
    *,
    estimator: Estimator = "nrg",
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Energy score of the members' multi-output predictions as samples.

    $\sum_m w_m \lVert x_m - y \rVert - \frac12 \sum_{mn} w_m w_n \lVert x_m - x_n \rVert$ with Euclidean norms over
    outputs of one unit.

    **Arguments:**

    - `samples`: `(members, *batch, out)`.
    - `targets`: `(*batch, out)`.
    - the others: as for [`eqx_ensemble.scores.crps`][].

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    samples, targets = jnp.array([[[0.0, 0.0]], [[6.0, 8.0]]]), jnp.array([[3.0, 4.0]])
    ee.scores.energy_score(samples, targets)  # 5 - 10 / 4 = 2.5
    ```

    ??? cite
        [Gneiting and Raftery, JASA 2007](https://doi.org/10.1198/016214506000001437)
    """
    check_estimator(estimator, samples.shape[0], weights)
    norm = lambda x: square_root(jnp.sum(x**2, axis=-1))

    @jax.checkpoint  # otherwise its gradient stores the differences of all pairs
    def to_all(one: Array) -> Array:
        return weighted_mean(norm(samples - one[None]), weights)

    between = weighted_mean(jax.lax.map(to_all, samples), weights)
    if estimator == "fair":
        between *= samples.shape[0] / (samples.shape[0] - 1)
    return weighted_mean(norm(samples - targets[None]), weights) - between / 2


@array_function
def variogram_score(
    samples: kinds.Vectors,
    targets: kinds.TargetVectors,
    *,
    order: float = 0.5,
    pair_weights: kinds.PairWeights | None = None,
    estimator: Estimator = "nrg",
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Variogram score of the members' multi-output predictions as samples.

    $\sum_{ij} w_{ij} (|y_i - y_j|^p - \sum_m w_m |x_{mi} - x_{mj}|^p)^2$ over all ordered pairs of outputs: it measures
    their dependence, but ignores an offset common to all. It allocates
    `(members, *batch, out, out)`.

    **Arguments:**

    - `order`: $p$, a positive number; 0.5, 1 and 2 are usual.
    - `pair_weights`: $w_{ij}$, non-negative, `(out, out)`.
    - the others: as for [`eqx_ensemble.scores.energy_score`][].

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    samples, targets = jnp.array([[[0.0, 1.0]], [[0.0, 9.0]]]), jnp.array([[0.0, 4.0]])
    # 2 * (2 - (1 + 3) / 2)**2 = 0
    ee.scores.variogram_score(samples, targets)
    ```

    ??? cite
        [Scheuerer and Hamill, MWR 2015](https://doi.org/10.1175/MWR-D-14-00269.1)
    """
    check_estimator(estimator, samples.shape[0], weights)
    if order <= 0:
        raise value_error("`order` above zero", f"got {order}", "0.5, 1 and 2 are usual.")
    num_outputs = targets.shape[-1]
    pairs = jnp.ones((num_outputs, num_outputs), targets.dtype) if pair_weights is None else pair_weights

    def distances(x: Array) -> Array:
        """Of all pairs of outputs, whose gradient is finite where they are equal."""
        gaps = jnp.abs(x[..., :, None] - x[..., None, :])
        return jnp.where(gaps == 0, 0, jnp.where(gaps == 0, 1, gaps) ** order)

    between = distances(samples)
    mean, variance = moments(between, weights)
    squared = (distances(targets) - mean) ** 2
    if estimator == "fair":
        squared -= variance / (samples.shape[0] - 1)
    return jnp.sum(jnp.broadcast_to(pairs, squared.shape) * squared, axis=(-2, -1))
