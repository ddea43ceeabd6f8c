from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from ._leaves import Size, kind_text

Shape = tuple[int, ...]


def concrete(values: object) -> np.ndarray | None:
    """The values on the host, or `None` where they cannot be read: while tracing, or when other hosts hold a part."""
    if isinstance(values, Tracer) or (isinstance(values, Array) and not values.is_fully_addressable):
        return None
    return np.asarray(values)


def check_array(name: str, argument: str, values: ArrayLike) -> Array:
    """The values as an array, if they are numbers."""
    try:
        return jnp.asarray(values)
    except (TypeError, ValueError) as error:
        got = f"got {values!r}" if isinstance(values, str | None) else f"got {kind_text(values)}: {error}"
        needs = f"`{name}` needs `{argument}` as an array of numbers.\n  {got}"
        raise TypeError(f"{needs}\nPass what `jnp.asarray` takes.") from error


def promote(*arrays: Array) -> tuple[Array, ...]:
    """All arrays in the one dtype that is computed in: float64 where any of them is, else float32."""
    dtype = jnp.float64 if any(array.dtype == jnp.float64 for array in arrays) else jnp.float32
    return tuple(array.astype(dtype) for array in arrays)


def check_values(name: str, argument: str, values: ArrayLike) -> Array:
    """A floating array with a `members` axis in front, of at least one member, in the dtype that is computed in."""
    array = check_floating(name, argument, values)
    if array.ndim < 1 or array.shape[0] < 1:
        raise ValueError(
            needs_message(
                name,
                f"`{argument}` with a leading `members` axis of at least one member",
                f"got shape {array.shape}",
                _one_member_text(argument),
            )
        )
    return promote(array)[0]


def check_logits(name: str, logits: ArrayLike, *, members: bool = True) -> Array:
    """Logits `(members, *batch, classes)`, or `(*batch, classes)`, in the dtype that is computed in."""
    array = check_floating(name, "logits", logits)
    axes = "(members, *batch, classes)" if members else "(*batch, classes)"
    if array.ndim < 1 + members:
        fix = _one_member_text("logits") if members else "The classes are the last axis."
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
                name, f"at least one member in `logits`, {axes}", f"got shape {array.shape}", _one_member_text("logits")
            )
        )
    return promote(array)[0]


def check_labels(
    name: str,
    labels: ArrayLike,
    logits: Array,
    mask: ArrayLike | None = None,
    *,
    argument: str = "logits",
    members: bool = True,
) -> Array:
    """Integer labels, one per row of checked logits `(members, *batch, classes)`; a range check where concrete."""
    array = check_array(name, "labels", labels)
    rows, classes = logits.shape[int(members) : -1], logits.shape[-1]
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
    # Smaller integers could not hold the number of classes that they are compared with.
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def check_moments(
    name: str, mean: ArrayLike, variance: ArrayLike, *, members: bool = True, weights: ArrayLike | None = None
) -> tuple[Array, ...]:
    """Means and variances of one shape, with a leading `members` axis if `members`, in one dtype."""
    check = check_values if members else check_floating
    means, variances = check(name, "mean", mean), check(name, "variance", variance)
    check_same_shape(name, mean=means, variance=variances)
    check_variance(name, variance, positive=False, weights=weights)
    return promote(means, variances)


def check_mask(name: str, mask: ArrayLike | None, rows: Shape) -> Array | None:
    """Booleans, one per row, that leave at least one row (where concrete)."""
    if mask is None:
        return None
    array = check_array(name, "mask", mask)
    if array.dtype != bool:
        fix = "True keeps a row: pass `mask.astype(bool)`."
        raise TypeError(needs_message(name, "a boolean `mask`", f"got dtype {array.dtype}, shape {array.shape}", fix))
    if array.shape != rows:
        raise ValueError(
            needs_message(
                name, "one `mask` entry per row", f"expected {rows}, got {array.shape}", "Masks have no `members` axis."
            )
        )
    host = concrete(mask)
    if host is not None and host.size and not host.any():
        raise ValueError(
            needs_message(
                name, "a `mask` that leaves a row", f"got {host.size} times False", "True keeps a row. Inverted?"
            )
        )
    return array


def kept_rows(mask: ArrayLike | None) -> np.ndarray | None:
    """Which rows count; `None` where that cannot be read."""
    return np.ones((), bool) if mask is None else concrete(mask)


def check_variance(
    name: str,
    variance: ArrayLike,
    *,
    positive: bool,
    mask: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> None:
    """No negative variance, and no zero where `positive`, of members and rows that count; where these are concrete."""
    host, kept = concrete(variance), kept_rows(mask)
    if host is None or kept is None:
        return
    if weights is not None:
        share = concrete(weights)
        if share is None:
            return
        if share.shape == host.shape[:1]:  # others are refused by `check_weights`
            kept = kept & (share != 0).reshape((-1,) + (1,) * (host.ndim - 1))
    wrong = (host <= 0 if positive else host < 0) & kept
    if wrong.any():
        needs = "variances above zero" if positive else "variances of zero or more"
        fix = "A log-variance? Pass `jnp.exp(log_variance)`. A variance that shrinks to zero? Add a floor such as 1e-6."
        raise ValueError(needs_message(name, needs, first_text(host, wrong), fix))


def check_regression(name: str, targets: ArrayLike, *, members: bool, **predictions: ArrayLike) -> tuple[Array, ...]:
    """Predictions of one shape, then targets of the shape of their rows, all in one dtype: nothing broadcasts."""
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


def check_weights(name: str, weights: ArrayLike | None, num_members: Size, dtype: jnp.dtype) -> Array | None:
    """Convex weights: one per member, finite, not negative, not all zero; divided by their sum."""
    if weights is None:
        return None
    check_plain_weights(name, weights)
    array = check_array(name, "weights", weights)
    if array.shape != (num_members,):
        fix = "Weights are in the order of the members."
        raise ValueError(
            needs_message(name, "one weight per member", f"expected shape {(num_members,)}, got {array.shape}", fix)
        )
    host = concrete(weights)
    if host is not None:
        fix = "A member of weight zero is left out; raw scores become weights by `jax.nn.softmax`."
        wrong = ~np.isfinite(host) | (host < 0)
        if wrong.any():
            raise ValueError(needs_message(name, "finite `weights` of zero or more", first_text(host, wrong), fix))
        if not (host > 0).any():
            raise ValueError(needs_message(name, "`weights` that are not all zero", f"got {num_members} zeros", fix))
        exact = host.astype(np.float64)
        return jnp.asarray(exact / exact.sum(), dtype)
    converted = array.astype(dtype)
    # What a weight of zero multiplies is blank, so that its own gradient would be wrong: it has none.
    converted = jnp.where(converted == 0, 0, converted)
    return converted / jnp.sum(converted)


def check_plain_weights(name: str, weights: object) -> None:
    """Weights themselves, not what a search returned with them."""
    if hasattr(weights, "weights"):
        got = f"got {kind_text(weights)}"
        raise TypeError(
            needs_message(name, "`weights` as an array `(members,)`", got, "Pass its weights alone: `found.weights`.")
        )


def check_level(name: str, level: float) -> None:
    """A probability strictly between zero and one."""
    host = concrete(level)
    if host is None or host.ndim or not np.issubdtype(host.dtype, np.number):
        got = "a traced array" if host is None else f"{level!r}"
        raise TypeError(
            needs_message(name, "a Python number as `level`", f"got {got}", "Several levels? Call it once for each.")
        )
    if not 0 < level < 1:
        raise ValueError(needs_message(name, "a `level` between 0 and 1", f"got {level}", "Write 90 % as `level=0.9`."))


def check_floating(name: str, argument: str, values: ArrayLike) -> Array:
    array = check_array(name, argument, values)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        fix = "Predictions come first, targets last; whole-numbered predictions need `.astype(float)`."
        raise TypeError(
            needs_message(name, f"floating-point `{argument}`", f"got dtype {array.dtype}, shape {array.shape}", fix)
        )
    return array


def check_same_shape(name: str, **arrays: Array) -> None:
    shapes = {argument: array.shape for argument, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"`{argument}` {shape}" for argument, shape in shapes.items())
        names = " and ".join(f"`{argument}`" for argument in shapes)
        raise ValueError(
            needs_message(
                name, f"{names} of one shape", f"got {listed}", "Nothing is broadcast: use `jnp.broadcast_to` if meant."
            )
        )


def _row_fix_text(name: str, got: Shape, prediction: str, shape: Shape, *, members: bool) -> str:
    """The likely fix, for a prediction of this shape: its `members` axis included, its classes left out."""
    rows = shape[1:] if members else shape
    if got == (*rows, 1):
        return f"A trailing axis of length one would broadcast to every pair of rows: pass `{name}[..., 0]`."
    if rows == (*got, 1):
        return f"The prediction has a last axis of length one: pass `{prediction}[..., 0]`."
    if members and got == shape:
        return f"{_one_member_text(prediction)} Targets repeated for every member? Pass them once: `{name}[0]`."
    if not members and got == shape[1:]:
        return (
            "This function takes no `members` axis: combine the members first, or take the score of the mixture. "
            "For one value per member map it with `jax.vmap`, its predictions over axis 0."
        )
    return "Prediction and target must hold the same rows in the same order."


def _one_member_text(name: str) -> str:
    return f"One member? Add a leading axis: `{name}[None]`."


def first_text(host: np.ndarray, wrong: np.ndarray) -> str:
    """The first wrong value, its index, and how many there are."""
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = f" at index {index}" if index else ""
    return f"got {host[index]}{where}, the first of {int(wrong.sum())} such"


def needs_message(name: str, needs: str, got: str, fix: str) -> str:
    """What the function needs, what it got, and the likely fix."""
    return f"`{name}` needs {needs}.\n  {got}\n{fix}"


def check_weight_count(weights: Any, num_members: int, *, name: str) -> None:
    """Weights of the members `(members,)`, or none."""
    check_plain_weights(name, weights)
    if weights is not None and np.shape(weights) != (num_members,):
        raise ValueError(
            f"`{name}` needs one weight per member: expected shape ({num_members},), got {np.shape(weights)}."
        )


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


def check_positive_scalar(name: str, argument: str, value: ArrayLike, dtype: jnp.dtype, *, fix: str) -> Array:
    """One finite number above zero (where concrete), in the dtype that is computed in."""
    array = check_scalar(name, argument, value, dtype)
    host = concrete(value)
    if host is not None and not 0 < host < np.inf:
        raise ValueError(needs_message(name, f"a finite `{argument}` above zero", f"got {host}", fix))
    return array


def check_floating_arrays(name: str, **arrays: ArrayLike) -> tuple[Array, ...]:
    """Floating arrays of one shape, in one dtype."""
    checked = {argument: check_floating(name, argument, values) for argument, values in arrays.items()}
    check_same_shape(name, **checked)
    return promote(*checked.values())


def check_no_nan(name: str, argument: str, values: ArrayLike, mask: ArrayLike | None) -> None:
    """No NaN in rows that count; only where the values are concrete."""
    host, kept = concrete(values), None if mask is None else concrete(mask)
    if host is None or (mask is not None and kept is None):
        return
    wrong = np.isnan(host.astype(np.float64)) & (True if kept is None else kept)
    if wrong.any():
        fix = "Leave these rows out: `mask=~jnp.isnan(...)`."
        raise ValueError(needs_message(name, f"`{argument}` without NaN", f"got {int(wrong.sum())} of them", fix))


def check_fitted_members(name: str, expected: int, got: int) -> None:
    """The members that were calibrated."""
    if got != expected:
        fix = "A calibration belongs to the ensemble that it was fitted on: fit it anew."
        raise ValueError(
            needs_message(
                name, "predictions of the members that it was fitted on", f"expected {expected} members, got {got}", fix
            )
        )
