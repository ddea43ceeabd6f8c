from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike

from .._caller import caller
from .._foreign import from_foreign
from ._leaves import kind_text

_ARRAYS = (np.ndarray, Array)


def check_no_pair(argument: str, values: object) -> None:
    """Raises for tuples of arrays, such as means and variances, which would become members."""
    fields: tuple[str, ...] = getattr(values, "_fields", ())
    if not isinstance(values, tuple) or not (fields or any(np.ndim(x) for x in values if isinstance(x, _ARRAYS))):
        return
    held = f": {', '.join(fields)}" if fields else " arrays"
    one = f"{argument}.{fields[0]}" if fields else f"{argument}[0]"
    raise TypeError(
        f"`{caller()}` needs `{argument}` as one array.\n  got {kind_text(values)} of {len(values)}{held}\n"
        f"Take the one that is meant, such as `{one}`. One array for each member? `jnp.stack({argument})`."
    )


Shape = tuple[Any, ...]  # sizes may be symbols of `jax.export`


def concrete(values: object) -> np.ndarray | None:
    """The values on the host, or `None` if they cannot be read: while tracing, or if other hosts hold a part."""
    if isinstance(values, Tracer) or (isinstance(values, Array) and not values.is_fully_addressable):
        return None
    return np.asarray(from_foreign(values))


def first_rows(values: ArrayLike, count: int) -> np.ndarray | None:
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


def needs_message(needs: str, got: str, fix: str) -> str:
    """The requirement of a function, the value that it got, and the likely fix."""
    return f"`{caller()}` needs {needs}.\n  {got}\n{fix}"


def value_error(needs: str, got: str, fix: str) -> ValueError:
    """The error for a value that a function cannot take."""
    return ValueError(needs_message(needs, got, fix))


def type_error(needs: str, got: str, fix: str) -> TypeError:
    """The error for a value of another kind."""
    return TypeError(needs_message(needs, got, fix))


def first_text(host: np.ndarray, wrong: np.ndarray) -> str:
    """The first wrong value, its index, and the number of wrong values."""
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = f" at index {index}" if index else ""
    return f"got {host[index]}{where}, the first of {int(wrong.sum())} such"


def one_member_text(argument: str) -> str:
    return f"One member? Add a leading axis: `{argument}[None]`."


def as_column(per_member: Any, ndim: int) -> Any:
    """An array `(members, ...)`, of NumPy or JAX, as `(members, ..., 1, ...)` with `ndim` axes."""
    return per_member.reshape(per_member.shape + (1,) * (ndim - per_member.ndim))


def check_array(argument: str, values: ArrayLike) -> Array:
    """Raises unless `values` are numbers. Returns them as an array; data frames and tensors are converted."""
    values = from_foreign(values, argument)
    check_no_pair(argument, values)
    try:
        return jnp.asarray(values)
    except (TypeError, ValueError) as error:
        got = f"got {values!r}" if isinstance(values, str | None) else f"got {kind_text(values)}"
        fix = "Pass what `jnp.asarray` takes; for a run or an ensemble, pass its predictions: `run.predict(x)`."
        raise type_error(f"`{argument}` as an array of numbers", got, fix) from error


def promote(*arrays: Array) -> tuple[Array, ...]:
    """Casts all arrays to the dtype of the computation: float64 if any of them is float64, else float32."""
    dtype = jnp.float64 if any(array.dtype == jnp.float64 for array in arrays) else jnp.float32
    return tuple(array.astype(dtype) for array in arrays)


def check_floating(argument: str, values: ArrayLike) -> Array:
    """Raises for integers, which are likely targets or labels in the wrong position. Returns the array."""
    array = check_array(argument, values)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        fix = "Predictions come first, targets last; whole-numbered predictions need `.astype(float)`."
        raise type_error(f"floating-point `{argument}`", f"got dtype {array.dtype}, shape {array.shape}", fix)
    return array


def check_values(argument: str, values: ArrayLike) -> Array:
    """Raises unless `values` is floating-point, with at least one member. Returns it in the computation's dtype."""
    array = check_floating(argument, values)
    if array.ndim < 1 or array.shape[0] < 1:
        raise value_error(
            f"`{argument}` with a leading `members` axis of at least one member",
            f"got shape {array.shape}",
            one_member_text(argument),
        )
    return promote(array)[0]


def check_floating_arrays(**arrays: ArrayLike) -> tuple[Array, ...]:
    """Raises unless all arrays are floating-point, of one shape. Returns them in one dtype."""
    checked = {argument: check_floating(argument, values) for argument, values in arrays.items()}
    check_same_shape(**checked)
    return promote(*checked.values())


def check_same_shape(**arrays: Array) -> None:
    """Raises unless all arrays have one shape: nothing is broadcast."""
    shapes = {argument: array.shape for argument, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"`{argument}` {shape}" for argument, shape in shapes.items())
        names = " and ".join(f"`{argument}`" for argument in shapes)
        raise value_error(
            f"{names} of one shape", f"got {listed}", "Nothing is broadcast: use `jnp.broadcast_to` if meant."
        )


def check_level(level: float) -> None:
    """Raises unless `level` is a number strictly between zero and one."""
    host = concrete(level)
    if host is None or host.ndim or not np.issubdtype(host.dtype, np.number):
        got = "a traced array" if host is None else f"{level!r}"
        raise type_error("a Python number as `level`", f"got {got}", "Several levels? Call it once for each.")
    if not 0 < level < 1:
        raise value_error("a `level` between 0 and 1", f"got {level}", "Write 90 % as `level=0.9`.")


def check_scalar(argument: str, value: ArrayLike, dtype: jnp.dtype) -> Array:
    """Raises unless `value` is one number. Returns it in `dtype`."""
    array = check_array(argument, value)
    if array.shape != ():
        raise value_error(f"one number as `{argument}`", f"got shape {array.shape}", "It is the same for all entries.")
    return array.astype(dtype)


def check_positive_scalar(argument: str, value: ArrayLike, dtype: jnp.dtype, *, fix: str) -> Array:
    """Raises unless `value` is one number and, if concrete, finite and above zero. Returns it in `dtype`."""
    array = check_scalar(argument, value, dtype)
    host = concrete(value)
    if host is not None and not 0 < host < np.inf:
        raise value_error(f"a finite `{argument}` above zero", f"got {host}", fix)
    return array
