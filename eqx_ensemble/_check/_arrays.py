import math
from typing import Any, NoReturn

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


def as_array(fn: str, name: str, values: ArrayLike) -> Array:
    """The values as an array, if they are numbers."""
    try:
        return jnp.asarray(values)
    except (TypeError, ValueError) as error:
        got = f"got {values!r}" if isinstance(values, str | None) else f"got {kind_text(values)}: {error}"
        needs = f"`eqx_ensemble.{fn}` needs `{name}` as an array of numbers.\n  {got}"
        raise TypeError(f"{needs}\nPass what `jnp.asarray` takes.") from error


def promoted(*arrays: Array) -> tuple[Array, ...]:
    """All arrays in the one dtype that is computed in: float64 where any of them is, else float32."""
    dtype = jnp.float64 if any(array.dtype == jnp.float64 for array in arrays) else jnp.float32
    return tuple(array.astype(dtype) for array in arrays)


def check_values(fn: str, name: str, values: ArrayLike) -> Array:
    """A floating array with a `members` axis in front, of at least one member, in the dtype that is computed in."""
    array = _floating(fn, name, values)
    if array.ndim < 1 or array.shape[0] < 1:
        _fail(
            fn, f"`{name}` with a leading `members` axis of at least one member", f"got shape {array.shape}", _one(name)
        )
    return promoted(array)[0]


def check_logits(fn: str, logits: ArrayLike, *, members: bool = True) -> Array:
    """Logits `(members, *batch, classes)`, or `(*batch, classes)`, in the dtype that is computed in."""
    array = _floating(fn, "logits", logits)
    axes = "(members, *batch, classes)" if members else "(*batch, classes)"
    if array.ndim < 1 + members:
        fix = _one("logits") if members else "The classes stand on the last axis."
        _fail(fn, f"`logits` of shape {axes}", f"got shape {array.shape}", fix)
    if array.shape[-1] < 2:
        fix = (
            "One logit per row (sigmoid)? Pass `jnp.concatenate([jnp.zeros_like(logits), logits], axis=-1)`, with the "
            "classes on a last axis of their own."
        )
        _fail(fn, f"at least two classes on the last axis of `logits`, {axes}", f"got shape {array.shape}", fix)
    if members and array.shape[0] < 1:
        _fail(fn, f"at least one member in `logits`, {axes}", f"got shape {array.shape}", _one("logits"))
    return promoted(array)[0]


def check_labels(
    fn: str,
    labels: ArrayLike,
    logits: Array,
    mask: ArrayLike | None = None,
    *,
    name: str = "logits",
    members: bool = True,
) -> Array:
    """Integer labels, one per row of checked logits `(members, *batch, classes)`; a range check where concrete."""
    array = as_array(fn, "labels", labels)
    rows, classes = logits.shape[int(members) : -1], logits.shape[-1]
    if not jnp.issubdtype(array.dtype, jnp.integer):
        one_hot = array.shape == (*rows, classes)
        fix = "One-hot labels? Pass `jnp.argmax(labels, axis=-1)`." if one_hot else "Pass `labels.astype(int)`."
        _fail(fn, "integer class labels", f"got dtype {array.dtype}, shape {array.shape}", fix, error=TypeError)
    if array.shape != rows:
        fix = _row_fix("labels", array.shape, name, logits.shape[:-1], members=members)
        if array.shape == (*rows, classes):
            fix = "One-hot labels? Pass `jnp.argmax(labels, axis=-1)`."
        axes = "(members, *batch, classes)" if members else "(*batch, classes)"
        got = f"expected {rows}, as `{name}` are {axes} = {logits.shape}; got {array.shape}"
        _fail(fn, f"one label per row of the {name}", got, fix)
    host, kept = concrete(labels), _kept(mask)
    if host is not None and kept is not None and (wrong := ((host < 0) | (host >= classes)) & kept).any():
        fix = "Leave rows that carry a mark such as -1 out (`mask`), and count classes from 0."
        _fail(fn, f"labels from 0 to {classes - 1}, as there are {classes} classes", _first(host, wrong), fix)
    # Smaller integers could not hold the number of classes that they are compared with.
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def check_moments(
    fn: str, mean: ArrayLike, variance: ArrayLike, *, members: bool = True, weights: ArrayLike | None = None
) -> tuple[Array, ...]:
    """Means and variances of one shape, with a `members` axis in front where told, in one dtype."""
    check = check_values if members else _floating
    means, variances = check(fn, "mean", mean), check(fn, "variance", variance)
    _check_alike(fn, mean=means, variance=variances)
    check_variance(fn, variance, positive=False, weights=weights)
    return promoted(means, variances)


def check_mask(fn: str, mask: ArrayLike | None, rows: Shape) -> Array | None:
    """Booleans, one per row, that leave at least one row (where concrete)."""
    if mask is None:
        return None
    array = as_array(fn, "mask", mask)
    if array.dtype != bool:
        fix = "True keeps a row: pass `mask.astype(bool)`."
        _fail(fn, "a boolean `mask`", f"got dtype {array.dtype}, shape {array.shape}", fix, error=TypeError)
    if array.shape != rows:
        _fail(fn, "one `mask` entry per row", f"expected {rows}, got {array.shape}", "Masks have no `members` axis.")
    host = concrete(mask)
    if host is not None and host.size and not host.any():
        _fail(fn, "a `mask` that leaves a row", f"got {host.size} times False", "True keeps a row. Inverted?")
    return array


def _kept(mask: ArrayLike | None) -> np.ndarray | None:
    """Which rows count; `None` where that cannot be read."""
    return np.ones((), bool) if mask is None else concrete(mask)


def check_variance(
    fn: str,
    variance: ArrayLike,
    *,
    positive: bool,
    mask: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> None:
    """No negative variance, and no zero where `positive`, of members and rows that count; where these are concrete."""
    host, kept = concrete(variance), _kept(mask)
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
        _fail(fn, needs, _first(host, wrong), fix)


def check_regression(fn: str, targets: ArrayLike, *, members: bool, **predictions: ArrayLike) -> tuple[Array, ...]:
    """Predictions of one shape, then targets of the shape of their rows, all in one dtype: nothing broadcasts."""
    check = check_values if members else _floating
    arrays = {name: check(fn, name, values) for name, values in predictions.items()}
    _check_alike(fn, **arrays)
    name, first = next(iter(arrays.items()))
    rows = first.shape[1:] if members else first.shape
    array = as_array(fn, "targets", targets)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        _fail(
            fn, "real-valued `targets`", f"got dtype {array.dtype}", "Predictions come first, targets last.", TypeError
        )
    if array.shape != rows:
        axes = "(members, *batch)" if members else "(*batch)"
        got = f"expected {rows}, as `{name}` is {axes} = {first.shape}; got {array.shape}"
        fix = _row_fix("targets", array.shape, name, first.shape, members=members)
        _fail(fn, "one target per row of the prediction", got, fix)
    return promoted(*arrays.values(), array)


def check_weights(fn: str, weights: ArrayLike | None, num_members: Size, dtype: jnp.dtype) -> Array | None:
    """Convex weights: one per member, finite, not negative, not all zero; divided by their sum."""
    if weights is None:
        return None
    check_plain_weights(fn, weights)
    array = as_array(fn, "weights", weights)
    if array.shape != (num_members,):
        fix = "Weights stand in the order of the members."
        _fail(fn, "one weight per member", f"expected shape {(num_members,)}, got {array.shape}", fix)
    host = concrete(weights)
    if host is not None:
        fix = "A member of weight zero is left out; raw scores become weights by `jax.nn.softmax`."
        wrong = ~np.isfinite(host) | (host < 0)
        if wrong.any():
            _fail(fn, "finite `weights` of zero or more", _first(host, wrong), fix)
        if not (host > 0).any():
            _fail(fn, "`weights` that are not all zero", f"got {num_members} zeros", fix)
        exact = host.astype(np.float64)
        return jnp.asarray(exact / exact.sum(), dtype)
    converted = array.astype(dtype)
    # What a weight of zero multiplies is blank, so that its own gradient would be wrong: it has none.
    converted = jnp.where(converted == 0, 0, converted)
    return converted / jnp.sum(converted)


def check_plain_weights(fn: str, weights: object) -> None:
    """Weights themselves, not what a search returned with them."""
    if hasattr(weights, "weights"):
        got = f"got {kind_text(weights)}"
        _fail(fn, "`weights` as an array `(members,)`", got, "Pass its weights alone: `found.weights`.", TypeError)


def check_reduction(fn: str, reduction: str, rows: Shape) -> None:
    """A known reduction, and at least one row where their mean is asked for."""
    check_choice(fn, "reduction", reduction, ("mean", "none"))
    if reduction == "mean" and math.prod(rows) == 0:
        _fail(fn, "at least one row to average over", f"got rows of shape {rows}", "Was every row filtered out?")


def check_choice(fn: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    """One of the names that there are."""
    if not isinstance(value, str) or value not in choices:
        listed = " or ".join(repr(choice) for choice in choices)
        _fail(fn, f"`{name}` to be {listed}", f"got {value!r}", "Options are passed by name.")


def check_level(fn: str, level: float) -> None:
    """A probability strictly between zero and one."""
    host = concrete(level)
    if host is None or host.ndim or not np.issubdtype(host.dtype, np.number):
        got = "a traced array" if host is None else f"{level!r}"
        _fail(fn, "a Python number as `level`", f"got {got}", "Several levels? Call it once for each.", TypeError)
    if not 0 < level < 1:
        _fail(fn, "a `level` between 0 and 1", f"got {level}", "Write 90 % as `level=0.9`.")


def check_interval(fn: str, lower: ArrayLike, upper: ArrayLike, mask: ArrayLike | None = None) -> None:
    """No lower end above its upper end; only where the values are concrete."""
    low, high, kept = concrete(lower), concrete(upper), _kept(mask)
    if low is None or high is None or kept is None:
        return
    wrong = (low > high) & kept
    if wrong.any():
        _fail(fn, "`lower` ends at or below `upper` ends", _first(low, wrong), "Swapped? `lower` comes first.")


def _floating(fn: str, name: str, values: ArrayLike) -> Array:
    array = as_array(fn, name, values)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        fix = "Predictions come first, targets last; whole-numbered predictions need `.astype(float)`."
        _fail(fn, f"floating-point `{name}`", f"got dtype {array.dtype}, shape {array.shape}", fix, error=TypeError)
    return array


def _check_alike(fn: str, **arrays: Array) -> None:
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
        names = " and ".join(f"`{name}`" for name in shapes)
        _fail(fn, f"{names} of one shape", f"got {listed}", "Nothing is broadcast: use `jnp.broadcast_to` if meant.")


def _row_fix(name: str, got: Shape, prediction: str, shape: Shape, *, members: bool) -> str:
    """The likely fix, for a prediction of this shape: its `members` axis included, its classes left out."""
    rows = shape[1:] if members else shape
    if got == (*rows, 1):
        return f"A trailing axis of length one would broadcast to every pair of rows: pass `{name}[..., 0]`."
    if rows == (*got, 1):
        return f"The prediction has a last axis of length one: pass `{prediction}[..., 0]`."
    if members and got == shape:
        return f"{_one(prediction)} Targets repeated for every member? Pass them once: `{name}[0]`."
    if not members and got == shape[1:]:
        return (
            "This function takes no `members` axis: combine the members first, or take the score of the mixture. "
            "For one value per member map it with `jax.vmap`, its predictions over axis 0."
        )
    return "Prediction and target must hold the same rows in the same order."


def _one(name: str) -> str:
    return f"One member? Add a leading axis: `{name}[None]`."


def _first(host: np.ndarray, wrong: np.ndarray) -> str:
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    place = f" at index {index}" if index else ""
    return f"got {host[index]}{place}, the first of {int(wrong.sum())} such"


def _fail(fn: str, needs: str, got: str, fix: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"`eqx_ensemble.{fn}` needs {needs}.\n  {got}\n{fix}")


def check_weight_count(weights: Any, num_members: int, *, name: str) -> None:
    """Weights of the members `(members,)`, or none."""
    check_plain_weights(name, weights)
    if weights is not None and np.shape(weights) != (num_members,):
        raise ValueError(
            f"`{name}` needs one weight per member: expected shape ({num_members},), got {np.shape(weights)}."
        )
