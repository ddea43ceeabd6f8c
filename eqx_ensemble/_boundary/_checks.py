"""Checks of the arguments of array functions, before anything is traced."""

from typing import Any, Literal, get_args, get_origin

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike

from .._caller import caller
from .._check import (
    check_array,
    check_flag,
    check_level,
    check_number,
    check_positive_int,
    check_word,
    concrete,
    first_text,
    type_error,
    value_error,
)
from .._foreign import from_foreign
from .._leaves import as_column
from .._warnings import warn
from ._arguments import Argument, Arguments, in_float64
from ._weights import check_row_weights, check_weights
from .kinds import InnerLevels, Levels

Sizes = dict[str, Any]  # of axes, by name; of `*batch`, a tuple


def check_option(value: Any, name: str, annotation: Any) -> Any:
    """Raises unless an option is what its annotation says. Returns it."""
    kinds = (annotation, *get_args(annotation))
    if get_origin(annotation) is Literal:
        check_word(value, name, get_args(annotation))
    elif name == "level":
        check_level(value)
        return float(value)
    elif annotation in (Levels, InnerLevels):
        return check_levels(value, ends=annotation == Levels)
    elif value is None and type(None) in kinds:
        return None
    elif bool in kinds:
        return check_flag(value, name)
    elif float in kinds:
        return check_number(value, name)
    elif int in kinds:
        return check_positive_int(value, name)
    return value


def check_levels(levels: Any, *, ends: bool) -> tuple[Any, Any]:
    """Raises unless levels are a number or `(levels,)` from 0 to 1. Returns them, and their exact distances to one."""
    host = concrete(levels)
    dtype, shape = (levels if host is None else host).dtype, np.shape(levels)
    if dtype.kind not in "uif":
        raise type_error("numbers as `levels`", f"got dtype {dtype}", "Write 90 % as 0.9.")
    if len(shape) > 1:
        raise value_error("`levels` as a number or `(levels,)`", f"got shape {shape}", "Write 90 % as 0.9.")
    if host is None:
        return levels, 1 - levels
    exact = host.astype(np.float64)
    if not (inside := (exact >= 0) & (exact <= 1)).all():
        raise value_error("`levels` from 0 to 1", first_text(exact, ~inside), "Write 90 % as 0.9.")
    if not ends and not (inside := (exact > 0) & (exact < 1)).all():
        raise value_error("`levels` between 0 and 1", first_text(exact, ~inside), "The ends are infinite.")
    return exact, 1 - exact


def check_arguments(given: dict[str, Any], of: Arguments) -> Array | None:
    """Raises unless the arrays fit together and hold what they must. Replaces them in `given`, in one dtype.

    Returns which rows count, if not all do.
    """
    left_out = [name for name, x in of.signature.parameters.items() if x.default is None and given[name] is None]
    raw = in_float64({name: given[name] for name in of.arrays if name not in left_out}, of)
    sizes: Sizes = {axis: int(axis) for name in raw for axis in of.arrays[name].axes if axis.isdigit()}
    for name, x in raw.items():
        raw[name] = _array(name, x, of.arrays[name], sizes)
        _bind(name, raw[name].shape, of, sizes, first=next(iter(raw)))
    floats = [x for name, x in raw.items() if of.arrays[name].is_number]
    # A Python number takes the dtype of the others.
    known = [x.dtype for x in floats if not x.weak_type] or [x.dtype for x in floats] or [jnp.zeros(()).dtype]
    dtype = jnp.dtype("float64" if jnp.float64 in known else "float32")
    shape = _shape(of.row_axes, sizes)
    if "row_weights" in given and "reduction" not in given and 0 in shape:
        raise value_error("at least one row", f"got rows of shape {shape}", "Was every row filtered out?")
    if given.get("reduction") == "mean" and 0 in shape:
        fix = "Was every row filtered out?"
        raise value_error("at least one row to average over", f"got rows of shape {shape}", fix)
    rows = check_row_weights(given.get("row_weights"), shape, dtype, only_count=of.only_counts)
    if given.get("weights") is not None:
        of_rows = {"shape": shape, "rows": rows} if of.weighs_rows else {}
        given["weights"] = check_weights(given["weights"], sizes["members"], dtype, **of_rows)
    for name, x in raw.items():
        _check_values(name, given, of, sizes, rows.known)
        given[name] = x.astype(dtype) if of.arrays[name].is_number else x
    if "lower" in raw and "upper" in raw:
        _check_interval(given, rows.known)
    if "row_weights" in given:
        given["row_weights"] = rows.weights
    return rows.counted


def _shape(axes: tuple[str, ...], sizes: Sizes) -> tuple[Any, ...]:
    """The sizes of axes; of `*batch`, if nothing has it, none."""
    each = [sizes.get(axis, ()) if axis.startswith("*") else (sizes[axis],) for axis in axes]
    return tuple(size for some in each for size in some)


def _array(name: str, x: Any, argument: Argument, sizes: Sizes) -> Array:
    """An argument as an array of a dtype that it may have."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "OUST" and not argument.is_number:
        fix = f"Number them: `names, {name} = np.unique({name}, return_inverse=True)`."
        raise type_error(f"integer `{name}`", f"got dtype {x.dtype}", fix)
    array, are_labels = check_array(name, x), argument.values.kind == "labels"
    if array.dtype == bool and are_labels and sizes.get("classes") == 2:
        return array.astype(jnp.int32)  # labels of two classes
    if array.dtype.name in argument.dtypes:
        # Smaller integers may not hold the number of classes, with which they are compared.
        small = jnp.issubdtype(array.dtype, jnp.integer) and array.dtype.itemsize < 4
        return array.astype(jnp.int32) if small and not argument.is_number else array
    kind, fix = _KIND[tuple(kind for kind in ("float32", "int32") if kind in argument.dtypes)]
    fix = argument.values.of_dtype or fix.format(name=name)
    if array.dtype == bool and not are_labels and "int32" in argument.dtypes:
        fix = f"A mask? Pass `jnp.flatnonzero({name})`."
    if are_labels and array.shape == (*sizes.get("*batch", ()), sizes.get("classes")):
        fix = f"One-hot labels? Pass `jnp.argmax({name}, axis=-1)`."
    raise type_error(f"{kind} `{name}`", f"got dtype {array.dtype}, shape {array.shape}", fix)


_KIND = {
    ("float32", "int32"): ("real-valued", "Predictions come first, targets last."),
    ("float32",): ("floating-point", "Predictions come first, targets last; whole numbers need `.astype(float)`."),
    ("int32",): ("integer", "Pass `{name}.astype(int)`."),
    (): ("boolean", "For example `labels == 1`."),
}


_SIGMOID = (
    "One logit per row (sigmoid)? The classes are the last axis: pass `jnp.stack([jnp.zeros_like({name}), {name}], "
    "axis=-1)`, without an axis of length one."
)


def _are_logits(argument: Argument) -> bool:
    return argument.values.kind in ("logits", "votes")


def _bind(name: str, shape: tuple[Any, ...], of: Arguments, sizes: Sizes, *, first: str) -> None:
    """Raises unless the shape agrees with the sizes of axes so far. Adds its own."""
    axes = of.arrays[name].axes
    if axes == ("...",):
        return
    place = next((i for i, axis in enumerate(axes) if axis.startswith("*")), None)
    fewest = len(axes) - (place is not None)
    text = f"({', '.join(axes)})"
    if len(shape) < fewest or (place is None and len(shape) != fewest):
        fix = f"One member? Add a leading axis: `{name}[None]`." if "members" in axes else "Pass one number per row."
        if len(shape) == fewest + 1 and "members" not in axes:
            fix = "Predictions of members? Combine them first, for example with `combine.mean` or `combine.mixture`."
            fix = f"A trailing axis of length one? Pass `{name}[..., 0]`." if shape[-1] == 1 else fix
        raise value_error(f"`{name}` of shape {text}", f"got shape {shape}", fix)
    own: Sizes = dict(zip(axes, shape, strict=False))
    if place is not None:
        behind = len(axes) - place - 1
        own = dict(zip(axes[:place], shape, strict=False))
        own[axes[place]] = shape[place : len(shape) - behind]
        own |= dict(zip(axes[place + 1 :], shape[len(shape) - behind :], strict=True))
    if any(sizes.get(axis, size) != size for axis, size in own.items()):
        want = _shape(axes, own | sizes)
        if name == first:
            raise value_error(f"`{name}` of shape {text}", f"got shape {shape}", "Its axes do not fit one another.")
        got = f"expected {text} = {want}, as of `{first}`; got {shape}"
        raise value_error(f"`{name}` for the rows of `{first}`", got, _fix(name, shape, want, first, of, sizes))
    sizes |= own
    if own.get("members") == 0:
        raise value_error(f"at least one member in `{name}`, {text}", f"got shape {shape}", "Were all left out?")
    if own.get("classes", 2) < 2 and _are_logits(of.arrays[name]):
        needs = f"at least two classes on the last axis of `{name}`, {text}"
        raise value_error(needs, f"got shape {shape}", _SIGMOID.format(name=name))


def _fix(name: str, got: tuple[Any, ...], want: tuple[Any, ...], first: str, of: Arguments, sizes: Sizes) -> str:
    """The likely fix for a wrong shape."""
    if _are_logits(of.arrays[first]) and want == () and len(got) == 1:
        return f"One model? Pass `{first}[None]`. " + _SIGMOID.format(name=first)
    if got == (*want, 1):
        return f"A trailing axis of length one would broadcast to every pair of rows: pass `{name}[..., 0]`."
    if want == (*got, 1):
        return f"The prediction has a last axis of length one: pass `{first}[..., 0]`."
    if got == (*want, sizes.get("classes")):
        return f"One-hot labels? Pass `jnp.argmax({name}, axis=-1)`."
    if "members" in sizes and got == (sizes["members"], *want):
        return f"Repeated for every member? Pass them once: `{name}[0]`. One member? Pass `{first}[None]`."
    if "members" not in sizes and got == want[1:]:
        return (
            "This function takes no `members` axis: combine the members first, or take the score of the mixture. "
            "For one value per member map it with `jax.vmap`, its predictions over axis 0."
        )
    return "Nothing is broadcast: all must hold the same rows in the same order."


def _check_values(name: str, given: dict[str, Any], of: Arguments, sizes: Sizes, known: np.ndarray | None) -> None:
    """Raises for the first wrong value of an argument in rows and members that count, where they can be read."""
    argument, weights = of.arrays[name], given.get("weights")
    values = argument.values
    if values.kind == "logits":
        warn_of_probabilities(given[name])
    host = concrete(given[name]) if values.needs else None
    if host is None or known is None:
        return
    counts = known if known.ndim and of.is_of_rows(name) else np.ones((), bool)
    counts = counts.reshape((1,) * (argument.has_members and counts.ndim > 0) + counts.shape)
    if argument.has_members and weights is not None:
        if (share := concrete(weights)) is None:
            return
        counts = as_column(counts, host.ndim) & (as_column(share, host.ndim) != 0)
    bound = sizes[values.below] if values.below in sizes else given.get(values.below, 0)
    with np.errstate(invalid="ignore"):
        if counts.all():
            wrong = np.asarray(values.is_wrong(host, bound))
        else:
            counts = np.broadcast_to(as_column(counts, host.ndim), host.shape)
            wrong = np.zeros(host.shape, bool)
            wrong[counts] = values.is_wrong(host[counts], bound)
    if wrong.any():
        raise value_error(
            values.needs.format(name=name, last=bound - 1, bound=bound), first_text(host, wrong), values.fix
        )


def _check_interval(given: dict[str, Any], known: np.ndarray | None) -> None:
    """Raises if a lower end is above its upper end in a row that counts, where they can be read."""
    low, high = concrete(given["lower"]), concrete(given["upper"])
    if low is not None and high is not None and known is not None and (wrong := (low > high) & known).any():
        first = first_text(np.broadcast_to(low, wrong.shape), wrong)
        raise value_error("`lower` ends at or below `upper` ends", first, "Swapped? `lower` first.")


_ROWS_LOOKED_AT = 32


def warn_of_probabilities(logits: ArrayLike) -> None:
    """Warns if the first rows look like probabilities: positive numbers that sum to one."""
    host = _first_rows(logits, _ROWS_LOOKED_AT)
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


def _first_rows(values: ArrayLike, count: int) -> np.ndarray | None:
    """At most `count` rows `(rows, last axis)` on the host, without a copy of the rest.

    `None` if there are none, or if they cannot be read.
    """
    if isinstance(values, Tracer) or (isinstance(values, Array) and not values.is_fully_addressable):
        return None
    is_remote = isinstance(values, Array) and any(device.platform != "cpu" for device in values.devices())
    array: Any = values if is_remote else np.asarray(from_foreign(values))
    if array.size == 0:
        return None
    first = (0,) * (array.ndim - 2)
    return np.atleast_2d(np.asarray(array[first][:count] if array.ndim > 1 else array))
