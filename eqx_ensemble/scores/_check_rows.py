import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .._check import (
    check_array,
    check_floating,
    check_mask,
    concrete,
    kept_rows,
    needs_message,
    promote,
)
from ._reduce import check_row_weights, check_rows


def check_ranking(
    name: str, scores: ArrayLike, positives: ArrayLike, row_weights: ArrayLike | None, mask: ArrayLike | None
) -> tuple[Array, Array, Array]:
    """Raises unless there are positive and negative rows. Returns scores, positives and row weights, flattened."""
    values, truth = check_floating(name, "scores", scores), check_array(name, "positives", positives)
    if truth.dtype != jnp.bool_:
        fix = "For example `labels == 1`, or `jnp.arange(n) >= num_inside`."
        raise TypeError(needs_message(name, "boolean `positives`", f"got dtype {truth.dtype}", fix))
    _same_rows(name, "scores", values, "positives", truth)
    (values,) = promote(values)
    rows = check_rows(name, row_weights, mask, values.shape, values.dtype)
    weights = jnp.ones(values.shape, values.dtype) if rows.weights is None else rows.weights.astype(values.dtype)
    known, host = kept_rows(rows.known), concrete(positives)
    if known is not None and host is not None:
        for kind, found in (("positive", host), ("negative", ~host)):
            if not (known & found).any():
                raise ValueError(
                    needs_message(
                        name,
                        "positive and negative rows",
                        f"got no {kind} row that counts",
                        "Ranking scores need both kinds of rows.",
                    )
                )
    return jnp.ravel(values), jnp.ravel(truth), jnp.ravel(weights)


def check_selection(
    name: str, uncertainty: ArrayLike, losses: ArrayLike, row_weights: ArrayLike | None, mask: ArrayLike | None
) -> tuple[Array, Array, Array]:
    """Raises for invalid arguments. Returns uncertainties, losses and row weights, flattened."""
    values, array = check_floating(name, "uncertainty", uncertainty), check_array(name, "losses", losses)
    _same_rows(name, "uncertainty", values, "losses", array)
    if values.size == 0:
        raise ValueError(
            needs_message(name, "at least one row", f"got shape {values.shape}", "Was every row filtered out?")
        )
    values, array = promote(values, array)
    rows = check_rows(name, row_weights, mask, values.shape, values.dtype)
    counted = jnp.ones(values.shape, bool) if rows.weights is None else rows.weights
    return jnp.ravel(values), jnp.ravel(array), jnp.ravel(counted)


def _same_rows(name: str, argument: str, values: Array, other: str, array: Array) -> None:
    if array.shape != values.shape:
        got = f"got `{argument}` {values.shape}, `{other}` {array.shape}"
        fix = "Nothing is broadcast. One score per member? Use `jax.vmap`."
        raise ValueError(needs_message(name, f"`{argument}` and `{other}` of one shape", got, fix))


def check_rows_of_scores(
    name: str, values: ArrayLike, row_weights: ArrayLike | None, mask: ArrayLike | None
) -> tuple[Array, Array | None, Array | None]:
    """Raises for invalid arguments. Returns scores `(..., rows)`, row weights and the mask over rows."""
    array = promote(check_floating(name, "values", values))[0]
    if array.ndim < 1 or array.shape[-1] == 0:
        fix = 'Pass one score per row, what `reduction="none"` gives.'
        raise ValueError(
            needs_message(name, "`values` with at least one row on the last axis", f"got shape {array.shape}", fix)
        )
    rows = check_mask(name, mask, array.shape[-1:])
    if row_weights is None:
        return array, None, rows
    weights = check_row_weights(name, row_weights, array.shape[-1:], mask)
    return array, weights.astype(array.dtype), rows
