"""What is ranked or counted row by row: which rows count, which are positive, and at which level."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ._arrays import check_array, check_floating, check_mask, concrete, first_text, kept_rows, needs_message, promote


def check_scalar(name: str, argument: str, value: ArrayLike, dtype: jnp.dtype) -> Array:
    """One number, in the dtype that is computed in."""
    array = check_array(name, argument, value)
    if array.shape != ():
        raise ValueError(
            needs_message(
                name, f"one number as `{argument}`", f"got shape {array.shape}", "It is the same for all entries."
            )
        )
    return array.astype(dtype)


def check_temperature(name: str, temperature: ArrayLike, dtype: jnp.dtype) -> Array:
    """A temperature above zero, where concrete."""
    array = check_scalar(name, "temperature", temperature, dtype)
    host = concrete(temperature)
    if host is not None and not 0 < host < np.inf:
        fix = "Logits are divided by it; 1 leaves them as they are."
        raise ValueError(needs_message(name, "a finite `temperature` above zero", f"got {host}", fix))
    return array


def check_levels(name: str, levels: ArrayLike, dtype: jnp.dtype, *, ends: bool) -> tuple[Array, Array]:
    """Levels, a number or `(levels,)`, and how far each is below one; with or without 0 and 1 themselves."""
    array = check_array(name, "levels", levels)
    if array.ndim > 1:
        raise ValueError(
            needs_message(name, "`levels` as a number or `(levels,)`", f"got shape {array.shape}", "Write 90 % as 0.9.")
        )
    host = concrete(levels)
    if host is None:
        return array.astype(dtype), 1 - array.astype(dtype)
    host = np.asarray(host, np.float64)
    inside = (0 <= host) & (host <= 1) if ends else (0 < host) & (host < 1)
    if not inside.all():
        words = "`levels` from 0 to 1" if ends else "`levels` between 0 and 1"
        raise ValueError(needs_message(name, words, first_text(host, ~inside), "Write 90 % as 0.9."))
    # The distance to one is exact in float64, where float32 would have lost a level such as 1 - 1e-9.
    return jnp.asarray(host, dtype), jnp.asarray(1 - host, dtype)


def check_ranking(
    name: str, scores: ArrayLike, positives: ArrayLike, row_weights: ArrayLike | None, mask: ArrayLike | None
) -> tuple[Array, Array, Array]:
    """Scores, which of them are positive, and the weight of each row, all flat; both kinds among those that count."""
    values, truth = check_floating(name, "scores", scores), check_array(name, "positives", positives)
    if truth.dtype != jnp.bool_:
        fix = "True where a high score is right: `labels == 1`, or `jnp.arange(n) >= num_inside`."
        raise TypeError(needs_message(name, "boolean `positives`", f"got dtype {truth.dtype}", fix))
    _same_rows(name, "scores", values, "positives", truth)
    rows = check_mask(name, mask, values.shape)
    if row_weights is None:
        (values,) = promote(values)
        weights = jnp.ones(values.shape, values.dtype)
    else:
        array = check_array(name, "row_weights", row_weights)
        _same_rows(name, "scores", values, "row_weights", array)
        _not_negative(name, "row_weights", row_weights, mask)
        values, weights = promote(values, array)
    weights = weights if rows is None else jnp.where(rows, weights, 0)
    counts = concrete(weights)
    if counts is not None and (host := concrete(positives)) is not None:
        for kind, found in (("positive", host), ("negative", ~host)):
            if not (counts[found] > 0).any():
                raise ValueError(
                    needs_message(
                        name,
                        "both kinds of rows",
                        f"got no {kind} row that counts",
                        "A ranking of one kind has no score.",
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


def check_rows_of_members(
    name: str, argument: str, values: ArrayLike, mask: ArrayLike | None, *, binary: bool = False
) -> tuple[Array, Array]:
    """Values `(members, rows)` made flat, and which rows count; zeros, ones and NaN only where `binary`."""
    array = check_array(name, argument, values)
    if array.dtype == jnp.bool_ and binary:
        array = array.astype(jnp.float32)
    array = check_floating(name, argument, array)
    if array.ndim < 2 or array.shape[0] < 1:
        raise ValueError(
            needs_message(
                name,
                f"`{argument}` of shape (members, *batch)",
                f"got shape {array.shape}",
                "The members axis comes first.",
            )
        )
    rows = check_mask(name, mask, array.shape[1:])
    host, kept = concrete(values), kept_rows(mask)
    if binary and host is not None and kept is not None:
        exact = np.asarray(host, np.float64)
        wrong = ~np.isin(exact, (0, 1)) & ~np.isnan(exact) & kept
        if wrong.any():
            fix = "They are `scores.per_member(scores.accuracy, logits, labels, reduction='none')`."
            raise ValueError(needs_message(name, f"zeros and ones in `{argument}`", first_text(exact, wrong), fix))
    counted = jnp.ones(array.shape[1:], bool) if rows is None else rows
    return jnp.reshape(promote(array)[0], (array.shape[0], -1)), jnp.ravel(counted)


def _same_rows(name: str, argument: str, values: Array, other: str, array: Array) -> None:
    if array.shape != values.shape:
        got = f"got `{argument}` {values.shape}, `{other}` {array.shape}"
        fix = "Nothing is broadcast. Scores of every member? Map over them with `jax.vmap`."
        raise ValueError(needs_message(name, f"`{argument}` and `{other}` of one shape", got, fix))


def _not_negative(name: str, argument: str, values: ArrayLike, mask: ArrayLike | None) -> None:
    host, kept = concrete(values), kept_rows(mask)
    if host is None or kept is None:
        return
    if (wrong := ~((host >= 0) & np.isfinite(host)) & kept).any():
        raise ValueError(
            needs_message(
                name,
                f"finite `{argument}` of zero or more",
                first_text(np.asarray(host), wrong),
                "Zero leaves a row out.",
            )
        )
