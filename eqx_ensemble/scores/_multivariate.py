"""Shared code of the multi-output scores: checks, and the call of scoringrules."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .._check import as_column, check_regression
from .._weighting import blank_unweighted
from ._check import check_known_weights, check_outputs, check_reduction
from ._crps import check_estimator
from ._reduce import Reduction, reduce
from ._row_weights import CountedRows, check_rows
from ._scoringrules import scoringrules_config, without_gradient


class Vectors(NamedTuple):
    """Samples `(members, *batch, out)`, targets `(*batch, out)`, weights of members and of rows."""

    samples: Array
    targets: Array
    weights: Array | None
    rows: CountedRows


def check_vectors(
    name: str,
    samples: ArrayLike,
    targets: ArrayLike,
    weights: ArrayLike | None,
    row_weights: ArrayLike | None,
    mask: ArrayLike | None,
    estimator: str,
    reduction: Reduction,
) -> Vectors:
    """Raises for invalid arguments of a multi-output score. Returns them as arrays."""
    points, observed = check_regression(name, targets, members=True, samples=samples)
    check_outputs(name, points)
    check_known_weights(name, weights)
    convex = check_estimator(name, estimator, points, weights)
    rows = check_rows(name, row_weights, mask, observed.shape[:-1], points.dtype)
    check_reduction(name, reduction, observed.shape[:-1])
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
