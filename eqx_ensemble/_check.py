"""Checks before anything is traced, and the words of their errors."""

import importlib.util
import math
import operator
import os
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike

from ._caller import caller
from ._foreign import from_foreign
from ._leaves import is_key, kind_text, member_dtype


class MemberMismatchError(ValueError):
    """Members that cannot share one stacked tree: they differ in structure, shape, dtype or a static value."""


class CheckpointCorruptError(ValueError):
    """A damaged checkpoint: bits have changed, or a file is truncated or missing.

    **Attributes:** `file`, the damaged file; `leaf` and `member`, the path of the damaged leaf in the tree and the
    position of the damaged member, or `None` if the damage is not in one.
    """

    def __init__(self, message: str, file: str = "", leaf: str | None = None, member: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.leaf = leaf
        self.member = member


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


def attribute_error(of: Any, name: str, elsewhere: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that is not there. `elsewhere` has what to write, for each of several other names."""
    fix = next((f"; see `{right}`" for right, names in elsewhere.items() if name in names.split()), "")
    return AttributeError(f"`{type(of).__name__}` has no attribute `{name}`{fix}.", name=name, obj=of)


def missing_extra_message(what: str, package: str, extra: str) -> str:
    """Names the extra to install."""
    return f"`{what}` needs {package}.\nInstall it: `pip install -e '.[{extra}]'` in a clone of eqx_ensemble."


def check_package(package: str, *, what: str, extra: str) -> None:
    """Raises `ImportError` unless an optional package, needed for `what`, is installed."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(missing_extra_message(what, package, extra))


# Options.


def _value_text(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | bool | None) else kind_text(value)


def check_flag(value: Any, argument: str) -> bool:
    """Raises unless `value` is `True` or `False`; other values are likely meant for another argument. Returns it."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{caller()}` needs `{argument}` to be `True` or `False`, got {_value_text(value)}.")
    return bool(value)


def check_word(value: Any, argument: str, choices: Collection[str | None]) -> None:
    """Raises unless `value` is one of `choices`; arrays, whose comparison has no truth value, are not compared."""
    if not isinstance(value, str | None) or value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"`{caller()}` needs `{argument}` to be one of {listed}, got {_value_text(value)}.")


def check_number(value: Any, argument: str, *, least: float | int = -math.inf, most: float | int = math.inf) -> float:
    """Raises unless `value` is a finite real number from `least` to `most`. Returns it as a float."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number) or np.iscomplexobj(value):
        raise TypeError(f"`{caller()}` needs `{argument}` to be a number, got {_value_text(value)}.")
    if not math.isfinite(value) or not least <= value <= most:
        if least == -math.inf and most == math.inf:
            wanted = "finite"
        elif most == math.inf:
            wanted = f"at least {least:g} and finite"
        else:
            wanted = f"between {least:g} and {most:g}"
        raise ValueError(f"`{caller()}` needs `{argument}` to be {wanted}, got {value!r}.")
    return float(value)


def check_level(level: float) -> None:
    """Raises unless `level` is a number strictly between zero and one."""
    host = concrete(level)
    if host is None or host.ndim or not np.issubdtype(host.dtype, np.number):
        got = "a traced array" if host is None else f"{level!r}"
        raise type_error("a Python number as `level`", f"got {got}", "Several levels? Call it once for each.")
    if not 0 < level < 1:
        raise value_error("a `level` between 0 and 1", f"got {level}", "Write 90 % as `level=0.9`.")


def check_path(value: Any, argument: str) -> None:
    """Raises unless `value` is a path: a string that is not empty, or an `os.PathLike`."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"`{caller()}` needs `{argument}` to be a path, got {_value_text(value)}.")
    if not os.fspath(value):
        raise ValueError(f"`{caller()}` needs `{argument}` to be a path, got an empty string.")


def check_integer(value: Any, argument: str, *, least: int) -> int:
    """Raises unless `value` is an integer, or an integer scalar array, of at least `least`. Returns it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"`{caller()}` needs an integer `{argument}`, got {value!r}.")
    if number < least:
        raise ValueError(f"`{caller()}` needs `{argument}` of at least {least}, got {number}.")
    return number


def check_positive_int(value: Any, argument: str) -> int:
    """Raises unless `value` is an integer of at least 1. Returns it."""
    return check_integer(value, argument, least=1)


# Keys and arrays.


def _is_legacy(key: Any) -> bool:
    return isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32 and key.ndim >= 1 and key.shape[-1] == 2


def check_key(key: Any) -> None:
    """Raises unless `key` is one threefry key, typed or legacy."""
    shape = check_key_shape(key, wanted="one key")
    if shape != ():
        raise TypeError(
            f"`{caller()}` needs one key as `key`, got {'x'.join(map(str, shape))} keys.\n"
            "It makes the members' keys itself."
        )


def check_key_shape(key: Any, *, wanted: str) -> tuple[int, ...]:
    """Raises for anything but threefry keys, typed or legacy. Returns their shape: `()` for one key."""
    if key is None:
        raise TypeError(f"`{caller()}` needs {wanted}: for example `key=jax.random.key(0)`.")
    if is_key(key):
        implementation = str(jax.random.key_impl(key))
        if implementation != "threefry2x32":
            raise TypeError(
                f"`{caller()}` needs a threefry key, got one of {implementation!r}: other generators draw differently "
                "under `jax.vmap`, so a member would depend on its neighbours.\n"
                "Use `jax.random.key(seed, impl='threefry2x32')`."
            )
        return key.shape
    if _is_legacy(key):
        return key.shape[:-1]
    if isinstance(key, int):
        raise TypeError(f"`{caller()}` needs {wanted}, got the integer {key}.\nMake it a key: `jax.random.key({key})`.")
    raise TypeError(f"`{caller()}` needs {wanted} from `jax.random.key(seed)`, got {_array_text(key)}.")


def _array_text(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array | np.ndarray) else repr(value)


def concrete(values: object) -> np.ndarray | None:
    """The values on the host, or `None` if they cannot be read: while tracing, or if other hosts hold a part."""
    if isinstance(values, Tracer) or (isinstance(values, Array) and not values.is_fully_addressable):
        return None
    return np.asarray(from_foreign(values))


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
        f"Pass the one you mean, such as `{one}`. One array for each member? `jnp.stack({argument})`."
    )


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


def check_in_range(leaf: Any, *, path: str) -> None:
    """Raises for NumPy integers that would overflow in a JAX array.

    `jnp.asarray` silently converts 64-bit integers to 32 bits if `jax_enable_x64` is off. JAX users expect float64 to
    be rounded, but not integers to change.
    """
    if not _is_wide(leaf):
        return
    dtype = member_dtype(leaf)
    if dtype == leaf.dtype or leaf.size == 0:
        return
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if leaf.min() < low or leaf.max() > high:
        raise ValueError(
            f"`{caller()}` makes jax arrays of NumPy leaves, and `{path}` holds integers outside {dtype}: from "
            f"{leaf.min()} to {leaf.max()}.\nEnable 64 bits (`jax.config.update('jax_enable_x64', True)`) or rescale."
        )


def check_integers_fit(tree: Any, *, argument: str) -> None:
    """Raises if a NumPy integer of a tree would overflow in a JAX array."""
    if any(map(_is_wide, jax.tree.leaves(tree))):  # paths are made only if needed
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            check_in_range(leaf, path=argument + jax.tree_util.keystr(path))


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "iu" and leaf.dtype.itemsize == 8
