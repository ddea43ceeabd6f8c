import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .._check import (
    check_array,
    check_floating,
    check_mask,
    check_nonnegative,
    concrete,
    needs_message,
    promote,
)


def check_ranking(
    name: str, scores: ArrayLike, positives: ArrayLike, row_weights: ArrayLike | None, mask: ArrayLike | None
) -> tuple[Array, Array, Array]:
    """Scores, which of them are positive, and the weights of rows, all flat; there are positive and negative rows."""
    values, truth = check_floating(name, "scores", scores), check_array(name, "positives", positives)
    if truth.dtype != jnp.bool_:
        fix = "For example `labels == 1`, or `jnp.arange(n) >= num_inside`."
        raise TypeError(needs_message(name, "boolean `positives`", f"got dtype {truth.dtype}", fix))
    _same_rows(name, "scores", values, "positives", truth)
    rows = check_mask(name, mask, values.shape)
    if row_weights is None:
        (values,) = promote(values)
        weights = jnp.ones(values.shape, values.dtype)
    else:
        array = check_array(name, "row_weights", row_weights)
        _same_rows(name, "scores", values, "row_weights", array)
        check_nonnegative(name, "row_weights", row_weights, fix="Rows of weight zero are ignored.", mask=mask)
        values, weights = promote(values, array)
    weights = weights if rows is None else jnp.where(rows, weights, 0)
    counts = concrete(weights)
    if counts is not None and (host := concrete(positives)) is not None:
        for kind, found in (("positive", host), ("negative", ~host)):
            if not (counts[found] > 0).any():
                raise ValueError(
                    needs_message(
                        name,
                        "positive and negative rows",
                        f"got no {kind} row that counts",
                        "The ranking of one kind of rows has no score.",
                    )
                )
    return jnp.ravel(values), jnp.ravel(truth), jnp.ravel(weights)


def check_selection(
    name: str, uncertainty: ArrayLike, losses: ArrayLike, mask: ArrayLike | None
) -> tuple[Array, Array, Array]:
    """Uncertainties, losses and which rows count, all flat."""
    values, array = check_floating(name, "uncertainty", uncertainty), check_array(name, "losses", losses)
    _same_rows(name, "uncertainty", values, "losses", array)
    if values.size == 0:
        raise ValueError(
            needs_message(name, "at least one row", f"got shape {values.shape}", "Was every row filtered out?")
        )
    rows = check_mask(name, mask, values.shape)
    values, array = promote(values, array)
    counted = jnp.ones(values.shape, bool) if rows is None else rows
    return jnp.ravel(values), jnp.ravel(array), jnp.ravel(counted)


def _same_rows(name: str, argument: str, values: Array, other: str, array: Array) -> None:
    if array.shape != values.shape:
        got = f"got `{argument}` {values.shape}, `{other}` {array.shape}"
        fix = "Nothing is broadcast. One score per member? Use `jax.vmap`."
        raise ValueError(needs_message(name, f"`{argument}` and `{other}` of one shape", got, fix))


def check_rows_of_scores(
    name: str, values: ArrayLike, row_weights: ArrayLike | None, mask: ArrayLike | None
) -> tuple[Array, Array | None, Array | None]:
    """Scores `(..., rows)`, rows on the last axis, one weight per row, and the mask over rows."""
    array = promote(check_floating(name, "values", values))[0]
    if array.ndim < 1 or array.shape[-1] == 0:
        fix = 'Pass one score per row, what `reduction="none"` gives.'
        raise ValueError(
            needs_message(name, "`values` with at least one row on the last axis", f"got shape {array.shape}", fix)
        )
    rows = check_mask(name, mask, array.shape[-1:])
    if row_weights is None:
        return array, None, rows
    weights = check_array(name, "row_weights", row_weights)
    if weights.shape != array.shape[-1:]:
        got = f"expected shape {array.shape[-1:]}, got {weights.shape}"
        raise ValueError(
            needs_message(name, "one of `row_weights` per row", got, "Rows are on the last axis of `values`.")
        )
    fix = "Rows of weight zero are drawn but do not count; use `mask` to exclude rows."
    check_nonnegative(name, "row_weights", row_weights, fix=fix, mask=mask, all_zero=False)
    return array, weights.astype(array.dtype), rows
