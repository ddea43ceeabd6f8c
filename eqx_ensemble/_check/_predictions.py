import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

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
    kept_rows,
    needs_message,
    one_member_text,
    promote,
)


def check_logits(name: str, logits: ArrayLike, *, members: bool = True, of_votes: bool = False) -> Array:
    """Raises unless logits are `(members, *batch, classes)`, or `(*batch, classes)`. Returns them in one dtype.

    Warns if they look like probabilities, except for functions `of_votes`, which use the most likely classes only.
    """
    array = check_floating(name, "logits", logits)
    axes = "(members, *batch, classes)" if members else "(*batch, classes)"
    if array.ndim < 1 + members:
        fix = one_member_text("logits") if members else "The classes are the last axis."
        raise ValueError(needs_message(name, f"`logits` of shape {axes}", f"got shape {array.shape}", fix))
    if array.shape[-1] < 2:
        fix = (
            "One logit per row (sigmoid)? Pass `jnp.concatenate([jnp.zeros_like(logits), logits], axis=-1)`, with the "
            "classes on the last axis."
        )
        raise ValueError(
            needs_message(
                name, f"at least two classes on the last axis of `logits`, {axes}", f"got shape {array.shape}", fix
            )
        )
    if members and array.shape[0] < 1:
        raise ValueError(
            needs_message(
                name, f"at least one member in `logits`, {axes}", f"got shape {array.shape}", one_member_text("logits")
            )
        )
    if not of_votes:
        _warn_of_probabilities(name, logits)
    return promote(array)[0]


_ROWS_LOOKED_AT = 32


def _warn_of_probabilities(name: str, logits: ArrayLike) -> None:
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
            f"`{name}` takes logits, but every row of these sums to 1, as probabilities do. The softmax of "
            "probabilities is nearly uniform.\nPass `jnp.log(probabilities)`, or the estimator's `predict_log_proba`."
        )


def check_labels(
    name: str,
    labels: ArrayLike,
    logits: Array,
    mask: ArrayLike | None = None,
    *,
    argument: str = "logits",
    members: bool = True,
) -> Array:
    """Raises unless there is one integer label per row of checked logits, in range if concrete. Returns them.

    Booleans are accepted as labels of two classes.
    """
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "OUST":
        fix = "Number the classes: `classes, labels = np.unique(labels, return_inverse=True)`."
        raise TypeError(needs_message(name, "integer class labels", f"got dtype {labels.dtype}", fix))
    array = check_array(name, "labels", labels)
    rows, classes = logits.shape[int(members) : -1], logits.shape[-1]
    if array.dtype == bool and array.shape == rows and classes == 2:
        array = array.astype(int)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        one_hot = array.shape == (*rows, classes)
        fix = "One-hot labels? Pass `jnp.argmax(labels, axis=-1)`." if one_hot else "Pass `labels.astype(int)`."
        raise TypeError(
            needs_message(name, "integer class labels", f"got dtype {array.dtype}, shape {array.shape}", fix)
        )
    if array.shape != rows:
        fix = _row_fix_text("labels", array.shape, argument, logits.shape[:-1], members=members)
        if array.shape == (*rows, classes):
            fix = "One-hot labels? Pass `jnp.argmax(labels, axis=-1)`."
        axes = "(members, *batch, classes)" if members else "(*batch, classes)"
        got = f"expected {rows}, as `{argument}` are {axes} = {logits.shape}; got {array.shape}"
        raise ValueError(needs_message(name, f"one label per row of the {argument}", got, fix))
    host, kept = concrete(labels), kept_rows(mask)
    if host is not None and kept is not None and (wrong := ((host < 0) | (host >= classes)) & kept).any():
        fix = "Leave rows that carry a mark such as -1 out (`mask`), and count classes from 0."
        raise ValueError(
            needs_message(
                name, f"labels from 0 to {classes - 1}, as there are {classes} classes", first_text(host, wrong), fix
            )
        )
    # Smaller integers may not hold the number of classes, with which they are compared.
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def check_moments(
    name: str, mean: ArrayLike, variance: ArrayLike, *, members: bool = True, weights: ArrayLike | None = None
) -> tuple[Array, ...]:
    """Raises unless means and variances have one shape, with members if `members`. Returns them in one dtype."""
    check = check_values if members else check_floating
    means, variances = check(name, "mean", mean), check(name, "variance", variance)
    check_same_shape(name, mean=means, variance=variances)
    check_variance(name, variance, positive=False, weights=weights)
    return promote(means, variances)


def check_variance(
    name: str,
    variance: ArrayLike,
    *,
    positive: bool,
    mask: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> None:
    """Raises for a negative variance, or a zero if `positive`, in members and rows that count; if concrete."""
    host, kept = concrete(variance), kept_rows(mask)
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
        raise ValueError(needs_message(name, needs, first_text(host, wrong), fix))


def check_regression(name: str, targets: ArrayLike, *, members: bool, **predictions: ArrayLike) -> tuple[Array, ...]:
    """Raises unless predictions have one shape, and targets that of their rows. Returns all in one dtype."""
    check = check_values if members else check_floating
    arrays = {argument: check(name, argument, values) for argument, values in predictions.items()}
    check_same_shape(name, **arrays)
    argument, first = next(iter(arrays.items()))
    rows = first.shape[1:] if members else first.shape
    array = check_array(name, "targets", targets)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(
            needs_message(
                name, "real-valued `targets`", f"got dtype {array.dtype}", "Predictions come first, targets last."
            )
        )
    if array.shape != rows:
        axes = "(members, *batch)" if members else "(*batch)"
        got = f"expected {rows}, as `{argument}` is {axes} = {first.shape}; got {array.shape}"
        fix = _row_fix_text("targets", array.shape, argument, first.shape, members=members)
        raise ValueError(needs_message(name, "one target per row of the prediction", got, fix))
    return promote(*arrays.values(), array)


def check_fitted_members(name: str, expected: int, got: int) -> None:
    """Raises unless the predictions have as many members as the calibration was fitted on."""
    if got != expected:
        fix = (
            "Pass the predictions of all members, before any combination. A calibration belongs to the ensemble that "
            "it was fitted on: for another one fit it anew."
        )
        raise ValueError(
            needs_message(
                name, "predictions of the members that it was fitted on", f"expected {expected} members, got {got}", fix
            )
        )


def _row_fix_text(name: str, got: Shape, prediction: str, shape: Shape, *, members: bool) -> str:
    """The likely fix, for a prediction of this shape, with its `members` axis and without its classes."""
    rows = shape[1:] if members else shape
    if got == (*rows, 1):
        return f"A trailing axis of length one would broadcast to every pair of rows: pass `{name}[..., 0]`."
    if rows == (*got, 1):
        return f"The prediction has a last axis of length one: pass `{prediction}[..., 0]`."
    if members and got == shape:
        return f"{one_member_text(prediction)} Targets repeated for every member? Pass them once: `{name}[0]`."
    if not members and got == shape[1:]:
        return (
            "This function takes no `members` axis: combine the members first, or take the score of the mixture. "
            "For one value per member map it with `jax.vmap`, its predictions over axis 0."
        )
    return "Prediction and target must hold the same rows in the same order."
