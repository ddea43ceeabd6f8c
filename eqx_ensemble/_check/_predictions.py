from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from .._caller import caller
from .._warnings import warn
from ._arrays import (
    Shape,
    as_column,
    check_array,
    check_floating,
    check_same_shape,
    check_values,
    concrete,
    first_rows,
    first_text,
    one_member_text,
    promote,
    type_error,
    value_error,
)
from ._leaves import Size, kind_text
from ._rows import ALL_ROWS, CountedRows, check_entries, check_nonnegative


def check_plain_weights(weights: object) -> None:
    """Raises for the result of a search for weights, in place of its weights."""
    if hasattr(weights, "weights"):
        got = f"got {kind_text(weights)}"
        raise type_error("`weights` as an array `(members,)`", got, "Pass its weights alone: `found.weights`.")


def check_weight_count(weights: Any, num_members: Size, *, rows: tuple[Size, ...] = ()) -> None:
    """Raises unless weights are `None`, `(members,)`, or `(members, ...)` with leading axes of `rows`."""
    check_plain_weights(weights)
    shape = np.shape(weights)
    shapes = [(num_members, *rows[:i]) for i in range(len(rows) + 1)]
    if weights is None or shape in shapes:
        return
    fix = "Weights are in the order of the members."
    if len(shape) > 1 and (*shape[-1:], *shape[:-1]) in shapes:
        fix = "The axis `members` comes first: `jnp.moveaxis(weights, -1, 0)`."
    elif len(shape) > 1 and not rows:
        fix += " For weights of each row, such as a gate's, call it for one row inside `jax.vmap`."
    expected = " or ".join(map(str, shapes if len(shape) > 1 else shapes[:1]))
    raise value_error("one weight per member", f"expected shape {expected}, got {shape}", fix)


def check_nonnegative_weights(weights: Any, *, rows: CountedRows = ALL_ROWS, all_zero: bool = True) -> None:
    """Raises unless weights are finite and not negative in rows that count, and not all zero unless `all_zero`."""
    fix = "A member of weight zero has no influence; `jax.nn.softmax` converts scores to weights."
    check_nonnegative("weights", weights, fix=fix, rows=rows, all_zero=all_zero)


def check_weights(
    weights: ArrayLike | None,
    num_members: Size,
    dtype: jnp.dtype,
    *,
    shape: tuple[Size, ...] = (),
    rows: CountedRows = ALL_ROWS,
) -> Array | None:
    """Raises unless weights are one per member, finite, not negative and not all zero. Returns them with sum 1.

    With a `shape`, that of the rows of the predictions, they may also differ between rows: `(members, ...)` with some
    of its leading axes. Each row is divided by its own sum. Rows that do not count are not checked, and get equal
    weights.
    """
    if weights is None:
        return None
    check_plain_weights(weights)
    with np.errstate(over="ignore"):  # concrete weights are divided by their sum in float64, below
        array = check_array("weights", weights)
    check_weight_count(array, num_members, rows=shape)
    if array.ndim > 1:
        return _check_weights_of_rows(weights, array, dtype, rows)
    check_nonnegative_weights(weights, all_zero=False)
    host = concrete(weights)
    if host is not None:
        exact = host.astype(np.float64)
        return jnp.asarray(exact / exact.sum(), dtype)
    return _normalise(array, dtype)


def _check_weights_of_rows(weights: ArrayLike, array: Array, dtype: jnp.dtype, rows: CountedRows) -> Array:
    """`check_weights` for weights that differ between rows; a row counts if one of its entries does."""
    over_entries = lambda x: x if x is None else x.any(axis=tuple(range(array.ndim - 1, x.ndim)))
    counted, known = over_entries(rows.counted), over_entries(rows.known)
    check_nonnegative_weights(weights, rows=CountedRows(known=known))
    host = concrete(weights)
    if host is not None and known is not None:
        empty = (host == 0).all(axis=0) & known
        if empty.any():
            index = tuple(int(i) for i in np.argwhere(empty)[0])
            got = f"got only zeros in row {index}, the first of {int(empty.sum())} such"
            fix = "They are divided by their sum in each row: at least one member needs a nonzero weight."
            raise value_error("`weights` that are not all zero in any row", got, fix)
        exact = np.where(known, host.astype(np.float64), 1)
        return jnp.asarray(exact / exact.sum(axis=0), dtype)
    return _normalise(array if counted is None else jnp.where(counted[None], array, jnp.ones_like(array)), dtype)


def _normalise(array: Array, dtype: jnp.dtype) -> Array:
    converted = array.astype(dtype)
    # Members of weight zero are overwritten, so that the gradient of such a weight would be wrong: it is set to zero.
    converted = jnp.where(converted == 0, 0, converted)
    return converted / jnp.sum(converted, axis=0, keepdims=array.ndim > 1)


def check_logits(logits: ArrayLike, *, members: bool = True, of_votes: bool = False) -> Array:
    """Raises unless logits are `(members, *batch, classes)`, or `(*batch, classes)`. Returns them in one dtype.

    Warns if they look like probabilities, except for functions `of_votes`, which use the most likely classes only.
    """
    array = check_floating("logits", logits)
    axes = "(members, *batch, classes)" if members else "(*batch, classes)"
    if array.ndim < 1 + members:
        fix = one_member_text("logits") if members else "The classes are the last axis."
        raise value_error(f"`logits` of shape {axes}", f"got shape {array.shape}", fix)
    if array.shape[-1] < 2:
        fix = (
            "One logit per row (sigmoid)? Pass `jnp.concatenate([jnp.zeros_like(logits), logits], axis=-1)`, with the "
            "classes on the last axis."
        )
        raise value_error(f"at least two classes on the last axis of `logits`, {axes}", f"got shape {array.shape}", fix)
    if members and array.shape[0] < 1:
        raise value_error(
            f"at least one member in `logits`, {axes}", f"got shape {array.shape}", one_member_text("logits")
        )
    if not of_votes:
        warn_of_probabilities(logits)
    return promote(array)[0]


_ROWS_LOOKED_AT = 32


def warn_of_probabilities(logits: ArrayLike) -> None:
    """Warns if the first rows look like probabilities: positive numbers that sum to one."""
    host = first_rows(logits, _ROWS_LOOKED_AT)
    if host is None:
        return
    rows = host.astype(np.float64)
    rounding = 1e-5 if host.dtype.itemsize > 2 else 1e-2
    are_distributions = (rows >= 0).all() and (abs(rows.sum(axis=-1) - 1) < rounding).all()
    # The softmax of equal numbers is the same; zeros and ones may be logits written by hand.
    if are_distributions and ((np.ptp(rows, axis=-1) > 1e-6) & (rows.max(axis=-1) < 1)).any():
        warn(
            f"`{caller()}` takes logits, but every row of these sums to 1, as probabilities do. The softmax of "
            "probabilities is nearly uniform.\nPass `jnp.log(probabilities)`, or the estimator's `predict_log_proba`."
        )


def check_labels(
    labels: ArrayLike, logits: Array, rows: CountedRows = ALL_ROWS, *, argument: str = "logits", members: bool = True
) -> Array:
    """Raises unless there is one integer label per row of checked logits, in range if concrete. Returns them.

    Booleans are accepted as labels of two classes.
    """
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "OUST":
        fix = "Number the classes: `classes, labels = np.unique(labels, return_inverse=True)`."
        raise type_error("integer class labels", f"got dtype {labels.dtype}", fix)
    array = check_array("labels", labels)
    shape, classes = logits.shape[int(members) : -1], logits.shape[-1]
    if array.dtype == bool and array.shape == shape and classes == 2:
        array = array.astype(int)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        one_hot = array.shape == (*shape, classes)
        fix = "One-hot labels? Pass `jnp.argmax(labels, axis=-1)`." if one_hot else "Pass `labels.astype(int)`."
        raise type_error("integer class labels", f"got dtype {array.dtype}, shape {array.shape}", fix)
    if array.shape != shape:
        fix = _row_fix_text("labels", array.shape, argument, logits.shape[:-1], members=members)
        if array.shape == (*shape, classes):
            fix = "One-hot labels? Pass `jnp.argmax(labels, axis=-1)`."
        axes = "(members, *batch, classes)" if members else "(*batch, classes)"
        got = f"expected {shape}, as `{argument}` are {axes} = {logits.shape}; got {array.shape}"
        raise value_error(f"one label per row of the {argument}", got, fix)
    fix = "Leave rows that carry a mark such as -1 out (`row_weights`), and count classes from 0."
    needs = f"labels from 0 to {classes - 1}, as there are {classes} classes"
    check_entries(needs, labels, lambda host: (host < 0) | (host >= classes), fix, rows)
    # Smaller integers may not hold the number of classes, with which they are compared.
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def check_moments(
    mean: ArrayLike, variance: ArrayLike, *, members: bool = True, weights: ArrayLike | None = None
) -> tuple[Array, ...]:
    """Raises unless means and variances have one shape, with members if `members`. Returns them in one dtype."""
    check = check_values if members else check_floating
    means, variances = check("mean", mean), check("variance", variance)
    check_same_shape(mean=means, variance=variances)
    check_variance(variance, positive=False, weights=weights)
    return promote(means, variances)


def check_variance(
    variance: ArrayLike, *, positive: bool, rows: CountedRows = ALL_ROWS, weights: ArrayLike | None = None
) -> None:
    """Raises for a negative variance, or a zero if `positive`, in members and rows that count; if concrete."""
    host, kept = concrete(variance), rows.known
    if host is None or kept is None:
        return
    with np.errstate(invalid="ignore"):
        least = host.min(initial=np.inf)  # NaN fails both comparisons
    if least > 0 or (least == 0 and not positive):
        return
    if weights is not None:
        share = concrete(weights)
        if share is None:
            return
        if 0 < share.ndim and share.shape == host.shape[: share.ndim]:  # `check_weights` rejects others
            kept = kept & as_column(share != 0, host.ndim)
    wrong = (host <= 0 if positive else host < 0) & kept
    if wrong.any():
        needs = "variances above zero" if positive else "variances of zero or more"
        fix = "A log-variance? Pass `jnp.exp(log_variance)`. A variance that shrinks to zero? Add a floor such as 1e-6."
        raise value_error(needs, first_text(host, wrong), fix)


def check_regression(targets: ArrayLike, *, members: bool, **predictions: ArrayLike) -> tuple[Array, ...]:
    """Raises unless predictions have one shape, and targets that of their rows. Returns all in one dtype."""
    check = check_values if members else check_floating
    arrays = {argument: check(argument, values) for argument, values in predictions.items()}
    check_same_shape(**arrays)
    argument, first = next(iter(arrays.items()))
    rows = first.shape[1:] if members else first.shape
    array = check_array("targets", targets)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise type_error("real-valued `targets`", f"got dtype {array.dtype}", "Predictions come first, targets last.")
    if array.shape != rows:
        axes = "(members, *batch)" if members else "(*batch)"
        got = f"expected {rows}, as `{argument}` is {axes} = {first.shape}; got {array.shape}"
        fix = _row_fix_text("targets", array.shape, argument, first.shape, members=members)
        raise value_error("one target per row of the prediction", got, fix)
    return promote(*arrays.values(), array)


def check_fitted_members(expected: int, got: int) -> None:
    """Raises unless the predictions have as many members as the calibration was fitted on."""
    if got != expected:
        fix = (
            "Pass the predictions of all members, before any combination. A calibration belongs to the ensemble that "
            "it was fitted on: for another one fit it anew."
        )
        raise value_error(
            "predictions of the members that it was fitted on", f"expected {expected} members, got {got}", fix
        )


def _row_fix_text(argument: str, got: Shape, prediction: str, shape: Shape, *, members: bool) -> str:
    """The likely fix, for a prediction of this shape, with its `members` axis and without its classes."""
    rows = shape[1:] if members else shape
    if got == (*rows, 1):
        return f"A trailing axis of length one would broadcast to every pair of rows: pass `{argument}[..., 0]`."
    if rows == (*got, 1):
        return f"The prediction has a last axis of length one: pass `{prediction}[..., 0]`."
    if members and got == shape:
        return f"{one_member_text(prediction)} Targets repeated for every member? Pass them once: `{argument}[0]`."
    if not members and got == shape[1:]:
        return (
            "This function takes no `members` axis: combine the members first, or take the score of the mixture. "
            "For one value per member map it with `jax.vmap`, its predictions over axis 0."
        )
    return "Prediction and target must hold the same rows in the same order."
