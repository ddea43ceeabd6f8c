"""What is ranked or counted row by row: which rows count, which are positive, and at which level."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ._arrays import _fail, _first, _floating, _kept, as_array, check_mask, concrete, promoted


def check_scalar(fn: str, name: str, value: ArrayLike, dtype: jnp.dtype) -> Array:
    """One number, in the dtype that is computed in."""
    array = as_array(fn, name, value)
    if array.shape != ():
        _fail(fn, f"one number as `{name}`", f"got shape {array.shape}", "It is the same for all entries.")
    return array.astype(dtype)


def check_temperature(fn: str, temperature: ArrayLike, dtype: jnp.dtype) -> Array:
    """A temperature above zero, where concrete."""
    array = check_scalar(fn, "temperature", temperature, dtype)
    host = concrete(temperature)
    if host is not None and not 0 < host < np.inf:
        fix = "Logits are divided by it; 1 leaves them as they are."
        _fail(fn, "a finite `temperature` above zero", f"got {host}", fix)
    return array


def check_levels(fn: str, levels: ArrayLike, dtype: jnp.dtype, *, ends: bool) -> tuple[Array, Array]:
    """Levels, a number or `(levels,)`, and how far each is below one; with or without 0 and 1 themselves."""
    array = as_array(fn, "levels", levels)
    if array.ndim > 1:
        _fail(fn, "`levels` as a number or `(levels,)`", f"got shape {array.shape}", "Write 90 % as 0.9.")
    host = concrete(levels)
    if host is None:
        return array.astype(dtype), 1 - array.astype(dtype)
    host = np.asarray(host, np.float64)
    inside = (0 <= host) & (host <= 1) if ends else (0 < host) & (host < 1)
    if not inside.all():
        words = "`levels` from 0 to 1" if ends else "`levels` between 0 and 1"
        _fail(fn, words, _first(host, ~inside), "Write 90 % as 0.9.")
    # The distance to one is exact in float64, where float32 would have lost a level such as 1 - 1e-9.
    return jnp.asarray(host, dtype), jnp.asarray(1 - host, dtype)


def check_ranking(
    fn: str, scores: ArrayLike, positives: ArrayLike, row_weights: ArrayLike | None, mask: ArrayLike | None
) -> tuple[Array, Array, Array]:
    """Scores, which of them are positive, and the weight of each row, all flat; both kinds among those that count."""
    values, truth = _floating(fn, "scores", scores), as_array(fn, "positives", positives)
    if truth.dtype != jnp.bool_:
        fix = "True where a high score is right: `labels == 1`, or `jnp.arange(n) >= num_inside`."
        _fail(fn, "boolean `positives`", f"got dtype {truth.dtype}", fix, TypeError)
    _same_rows(fn, "scores", values, "positives", truth)
    rows = check_mask(fn, mask, values.shape)
    if row_weights is None:
        (values,) = promoted(values)
        weights = jnp.ones(values.shape, values.dtype)
    else:
        array = as_array(fn, "row_weights", row_weights)
        _same_rows(fn, "scores", values, "row_weights", array)
        _not_negative(fn, "row_weights", row_weights, mask)
        values, weights = promoted(values, array)
    weights = weights if rows is None else jnp.where(rows, weights, 0)
    counts = concrete(weights)
    if counts is not None and (host := concrete(positives)) is not None:
        for kind, found in (("positive", host), ("negative", ~host)):
            if not (counts[found] > 0).any():
                _fail(fn, "both kinds of rows", f"got no {kind} row that counts", "A ranking of one kind has no score.")
    return jnp.ravel(values), jnp.ravel(truth), jnp.ravel(weights)


def check_selection(
    fn: str, uncertainty: ArrayLike, losses: ArrayLike, mask: ArrayLike | None
) -> tuple[Array, Array, Array]:
    """Uncertainties, losses and which rows count, all flat."""
    values, array = _floating(fn, "uncertainty", uncertainty), as_array(fn, "losses", losses)
    _same_rows(fn, "uncertainty", values, "losses", array)
    if values.size == 0:
        _fail(fn, "at least one row", f"got shape {values.shape}", "Was every row filtered out?")
    rows = check_mask(fn, mask, values.shape)
    values, array = promoted(values, array)
    counted = jnp.ones(values.shape, bool) if rows is None else rows
    return jnp.ravel(values), jnp.ravel(array), jnp.ravel(counted)


def check_rows_of_members(
    fn: str, name: str, values: ArrayLike, mask: ArrayLike | None, *, binary: bool = False
) -> tuple[Array, Array]:
    """Values `(members, rows)` made flat, and which rows count; zeros, ones and NaN only where `binary`."""
    array = as_array(fn, name, values)
    if array.dtype == jnp.bool_ and binary:
        array = array.astype(jnp.float32)
    array = _floating(fn, name, array)
    if array.ndim < 2 or array.shape[0] < 1:
        _fail(fn, f"`{name}` of shape (members, *batch)", f"got shape {array.shape}", "The members axis comes first.")
    rows = check_mask(fn, mask, array.shape[1:])
    host, kept = concrete(values), _kept(mask)
    if binary and host is not None and kept is not None:
        exact = np.asarray(host, np.float64)
        wrong = ~np.isin(exact, (0, 1)) & ~np.isnan(exact) & kept
        if wrong.any():
            fix = "They are `scores.per_member(scores.accuracy, logits, labels, reduction='none')`."
            _fail(fn, f"zeros and ones in `{name}`", _first(exact, wrong), fix)
    counted = jnp.ones(array.shape[1:], bool) if rows is None else rows
    return jnp.reshape(promoted(array)[0], (array.shape[0], -1)), jnp.ravel(counted)


def _same_rows(fn: str, name: str, values: Array, other: str, array: Array) -> None:
    if array.shape != values.shape:
        got = f"got `{name}` {values.shape}, `{other}` {array.shape}"
        fix = "Nothing is broadcast. Scores of every member? Map over them with `jax.vmap`."
        _fail(fn, f"`{name}` and `{other}` of one shape", got, fix)


def _not_negative(fn: str, name: str, values: ArrayLike, mask: ArrayLike | None) -> None:
    host, kept = concrete(values), _kept(mask)
    if host is None or kept is None:
        return
    if (wrong := ~((host >= 0) & np.isfinite(host)) & kept).any():
        _fail(fn, f"finite `{name}` of zero or more", _first(np.asarray(host), wrong), "Zero leaves a row out.")
