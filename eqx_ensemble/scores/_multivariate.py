"""Shared code of the multi-output scores: checks, and the call of scoringrules."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import (
    CountedRows,
    RowWeightsLike,
    as_column,
    check_array,
    check_nonnegative,
    check_number,
    check_regression,
    check_row_weights,
    concrete,
    value_error,
)
from .._weighting import blank_unweighted
from ._crps import check_estimator
from ._reduce import Reduction, import_scoringrules, reduce, scoringrules_config, without_gradient


def dawid_sebastiani(
    samples: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Dawid-Sebastiani score of the mean and the variance of the members' point predictions.

    $(y - \mu)^2 / \sigma^2 + \log \sigma^2$ with the members' mean $\mu$ and variance $\sigma^2$ (ddof 1). For members
    that predict variances use [`eqx_ensemble.scores.nll_gaussian`][]. Needs `scoringrules`.

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
    rules = import_scoringrules()
    points, observed = check_regression(targets, members=True, samples=samples)
    if points.shape[0] < 2:
        fix = "For one member that predicts a variance use `scores.nll_gaussian`."
        raise value_error("at least two members to compute a variance", f"got {points.shape[0]}", fix)
    rows = check_row_weights(row_weights, observed.shape, points.dtype, reduction=reduction)
    # Ignored rows are overwritten with 0, 1, 2...: equal members would give a NaN gradient.
    numbers = jnp.arange(points.shape[0], dtype=points.dtype)
    # Errors, not values: the mean of large numbers would lose precision.
    errors = points - observed[None]
    errors = rows.blank(errors, before=1, fill=as_column(numbers, points.ndim))
    with scoringrules_config():
        each = rules.dssuv_ensemble(jnp.zeros_like(observed), errors, m_axis=0, backend="jax")
    return reduce(each, reduction, rows.weights)


def check_order(order: float | int) -> float:
    """Raises unless `order` is a positive number. Returns it."""
    number = check_number(order, "order")
    if number <= 0:
        raise value_error("`order` above zero", f"got {order}", "0.5, 1 and 2 are usual.")
    return number


def check_pair_weights(pair_weights: ArrayLike | None, out: int, dtype: jnp.dtype) -> Array | None:
    """Raises unless `pair_weights` are non-negative numbers `(out, out)`. Returns them as an array."""
    if pair_weights is None:
        return None
    array = check_array("pair_weights", pair_weights)
    if array.shape != (out, out):
        got = f"expected {(out, out)}, got {array.shape}"
        raise value_error("`pair_weights` for pairs of outputs", got, "They are `(out, out)`.")
    fix = "A pair of weight zero does not count."
    check_nonnegative("pair_weights", pair_weights, fix=fix)
    return array.astype(dtype)


class Vectors(NamedTuple):
    """Samples `(members, *batch, out)`, targets `(*batch, out)`, weights of members and of rows."""

    samples: Array
    targets: Array
    weights: Array | None
    rows: CountedRows


def check_vectors(
    samples: ArrayLike,
    targets: ArrayLike,
    weights: ArrayLike | None,
    row_weights: ArrayLike | None,
    estimator: str,
    reduction: Reduction,
) -> Vectors:
    """Raises for invalid arguments of a multi-output score. Returns them as arrays."""
    points, observed = check_regression(targets, members=True, samples=samples)
    if points.ndim < 2:
        fix = "One output? That is `crps`; with `samples[..., None]` it is the same score."
        raise value_error("`samples` of shape (members, *batch, out)", f"got shape {points.shape}", fix)
    if weights is not None and concrete(weights) is None:
        fix = "Close over the weights instead of passing them into `jax.jit`."
        raise value_error("concrete `weights`, because scoringrules reads their values", "got a traced array", fix)
    convex = check_estimator(estimator, points, weights)
    rows = check_row_weights(row_weights, observed.shape[:-1], points.dtype, reduction=reduction)
    return Vectors(points, observed, convex, rows)


def score_vectors(
    name: str, rule: Callable[[Array, Array, Array | None], Array], vectors: Vectors, reduction: Reduction
) -> Array:
    """Calls `rule(targets, samples, weights)`, with weights `(members, *batch)`, and reduces over rows."""
    samples, targets, convex, rows = vectors

    def score(samples: Array, targets: Array) -> Array:
        expanded = None
        if convex is not None:
            expanded = jnp.broadcast_to(as_column(convex, samples.ndim - 1), samples.shape[:-1])
        with scoringrules_config():
            return rule(targets, samples, expanded).astype(samples.dtype)

    samples = rows.blank(blank_unweighted(samples, convex), before=1)
    return reduce(without_gradient(name, score)(samples, rows.blank(targets)), reduction, rows.weights)


def energy_score(
    samples: Float[ArrayLike, "members *batch out"],
    targets: Real[ArrayLike, "*batch out"],
    *,
    estimator: Literal["nrg", "fair"] = "nrg",
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Energy score of the members' multi-output predictions as samples.

    $\sum_m w_m \lVert x_m - y \rVert - \frac12 \sum_{mn} w_m w_n \lVert x_m - x_n \rVert$ with Euclidean norms over
    outputs of one unit. Needs `scoringrules`, which allocates `(*batch, members, members, out)`.

    **Arguments:**

    - `samples`: `(members, *batch, out)`.
    - `targets`: `(*batch, out)`.
    - the others: as for [`eqx_ensemble.scores.crps`][]; `weights` are concrete.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    `NotImplementedError` when differentiated.

    ```python
    samples, targets = jnp.array([[[0.0, 0.0]], [[6.0, 8.0]]]), jnp.array([[3.0, 4.0]])
    ee.scores.energy_score(samples, targets)  # 5 - 10 / 4 = 2.5
    ```

    ??? cite
        [Gneiting and Raftery, JASA 2007](https://doi.org/10.1198/016214506000001437)
    """
    name = "scores.energy_score"
    rules = import_scoringrules()
    vectors = check_vectors(samples, targets, weights, row_weights, estimator, reduction)
    options = {"m_axis": 0, "estimator": estimator, "backend": "jax"}
    rule = lambda y, x, weights: rules.es_ensemble(y, x, ens_w=weights, **options)
    return score_vectors(name, rule, vectors, reduction)


def variogram_score(
    samples: Float[ArrayLike, "members *batch out"],
    targets: Real[ArrayLike, "*batch out"],
    *,
    order: float | int = 0.5,
    pair_weights: Real[ArrayLike, "out out"] | None = None,
    estimator: Literal["nrg", "fair"] = "nrg",
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Variogram score of the members' multi-output predictions as samples.

    $\sum_{ij} w_{ij} (|y_i - y_j|^p - \sum_m w_m |x_{mi} - x_{mj}|^p)^2$ over all ordered pairs of outputs: it measures
    their dependence, but ignores an offset common to all. Needs `scoringrules`, which allocates
    `(*batch, members, out, out)`; for `"fair"` `(*batch, members, members, out, out)`.

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
    name = "scores.variogram_score"
    rules = import_scoringrules()
    vectors = check_vectors(samples, targets, weights, row_weights, estimator, reduction)
    points, observed = vectors.samples, vectors.targets
    pairs = check_pair_weights(pair_weights, points.shape[-1], points.dtype)
    wide = None if pairs is None else jnp.broadcast_to(pairs, (*observed.shape, observed.shape[-1]))
    options = {"w": wide, "m_axis": 0, "p": check_order(order), "estimator": estimator, "backend": "jax"}
    rule = lambda y, x, weights: rules.vs_ensemble(y, x, ens_w=weights, **options)
    return score_vectors(name, rule, vectors, reduction)
