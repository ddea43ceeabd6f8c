import functools as ft
import types
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._leaves import is_key, is_member_array, is_traced

_HEAPTYPE = 1 << 9  # `Py_TPFLAGS_HEAPTYPE`, by which `copyreg` also distinguishes Python classes from built-in ones
# What determines what a function does; not its line numbers.
_CODE = ("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount")
_CODE += ("co_posonlyargcount", "co_kwonlyargcount", "co_exceptiontable")
_EMPTY_CELL = "<empty cell>"
_Jitted: Any = type(jax.jit(lambda: None))


class StaticGap(NamedTuple):
    """A difference between two static values: its path from outside in, and the two values."""

    trail: tuple[str, ...]
    expected: Any
    got: Any

    @property
    def hides_array(self) -> bool:
        """Whether the difference is in an array that JAX cannot see."""
        return is_member_array(self.expected) and is_member_array(self.got)

    def location(self) -> str:
        """The trail as text, innermost first: "closure variable `scale` of argument 0"."""
        return " of ".join(part for part in reversed(self.trail) if part != "the code")


def static_gap(a: Any, b: Any, seen: dict, trail: tuple[str, ...] = ()) -> StaticGap | None:
    """The first difference between two static values, or `None` if they are equivalent.

    Two builds of one model hold distinct but equivalent closures, partials and marker objects: `==` is too strict for
    them, and does not compare the arrays inside. Functions are compared by code, defaults and closed-over values,
    partials and bound methods by their parts, traced programs by their text, other objects by `__dict__` or `==`,
    arrays by their bits. `seen` holds the pairs assumed equal so far (cycles) and the pairing of bare `object()`
    markers: one dictionary per member.
    """
    key = (id(a), id(b))
    if a is b or key in seen:
        return None
    if is_member_array(a) and is_member_array(b):
        return None if _same_bits(a, b) else StaticGap(trail, a, b)
    if type(a) is not type(b):
        return StaticGap(trail, a, b)
    if type(a) is object:
        # Markers carry only their identity: they must pair up one to one.
        paired = seen.setdefault(("to", id(a)), b) is b and seen.setdefault(("from", id(b)), a) is a
        return None if paired else StaticGap(trail, a, b)
    parts = static_parts(a), static_parts(b)
    if parts[0] is None or parts[1] is None:
        return None if _same_value(a, b) else StaticGap(trail, a, b)
    if isinstance(a, types.FunctionType) and a.__globals__ is not b.__globals__:
        # The same source run twice (`exec`, a notebook cell in two namespaces) gives equal code over different globals.
        parts = parts[0] | _global_parts(a), parts[1] | _global_parts(b)
    seen[key] = (a, b)  # keeps both alive, so that no other object can reuse an id
    gap = _parts_gap(a, b, parts, seen, trail)
    if gap is not None:
        del seen[key]
        if type(a).__eq__ is not object.__eq__ and not isinstance(a, (list, tuple, dict)) and _same_value(a, b):
            return None
    return gap


def _parts_gap(a, b, parts, seen, trail) -> StaticGap | None:
    expected, got = parts
    if expected.keys() != got.keys():
        return StaticGap(trail, a, b)
    for part in expected:
        hop = part if isinstance(part, str) else f"key {part[0]!r}"
        gap = static_gap(expected[part], got[part], seen, (*trail, hop))
        if gap is not None:
            return StaticGap(trail, a, b) if isinstance(a, types.CodeType) else gap
    return None


def static_parts(x: Any) -> dict | None:
    """The parts of `x` by name; `None` if it can only be compared with `==`."""
    if isinstance(x, types.FunctionType):
        return _function_parts(x)
    if isinstance(x, ft.partial):
        keywords = {f"keyword `{k}`": v for k, v in x.keywords.items()}
        return {"the function": x.func} | {f"argument {i}": v for i, v in enumerate(x.args)} | keywords
    if isinstance(x, types.MethodType):
        return {"the method": x.__func__, "the bound object": x.__self__}
    if isinstance(x, types.CodeType):
        return {name: getattr(x, name) for name in _CODE}
    if isinstance(x, _Jitted):  # whose copies lack `__wrapped__`
        state = x.__getstate__()
        return {"the function": state["fun"]} | {k: state[k] for k in ("static_argnums", "static_argnames")}
    if isinstance(x, types.ModuleType | type):
        return None
    if isinstance(x, Jaxpr | ClosedJaxpr):  # such as `equinox.filter_closure_convert` stores
        return {"the program": str(x), "the constants": list(getattr(x, "consts", ()))}
    if isinstance(x, dict):
        return {(k,): v for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return {f"item {i}": v for i, v in enumerate(x)}
    return _state(x)


def _function_parts(f: types.FunctionType) -> dict:
    parts: dict[str, Any] = {"the code": f.__code__}
    for i, value in enumerate(f.__defaults__ or ()):
        parts[f"default {i}"] = value
    for k, value in (f.__kwdefaults__ or {}).items():
        parts[f"default `{k}`"] = value
    for k, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        parts[f"closure variable `{k}`"] = _cell_value(cell)
    for k, value in vars(f).items():
        parts[f"attribute `{k}`"] = value
    return parts


def _global_parts(f: types.FunctionType) -> dict:
    return {f"global `{k}`": f.__globals__[k] for k in f.__code__.co_names if k in f.__globals__}


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a closure variable that was never assigned
        return _EMPTY_CELL


def _state(x: Any) -> dict | None:
    """Attributes of an object whose whole state is in Python: `__dict__` and `__slots__`."""
    base = next(c for c in type(x).__mro__ if not c.__flags__ & _HEAPTYPE)
    if base is not object:
        return None  # a subclass of `int`, for example, whose value is not among its attributes
    state: Any = object.__getstate__(x)
    if state is None:
        return {} if type(x).__dictoffset__ else None
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    return {f"attribute `{k}`": v for k, v in ((attributes or {}) | slots).items()}


def _same_bits(a: Any, b: Any) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or is_traced(a) or is_traced(b):
        return False
    if is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, float | complex):
        return repr(a) == repr(b)  # distinguishes 0.0 from -0.0, and treats NaN as equal to NaN
    if isinstance(a, np.ndarray):  # of strings or objects; others are compared by their bits
        return a.dtype == b.dtype and np.array_equal(a, b)
    try:
        return bool(a == b)
    except (TypeError, ValueError):  # an `==` without one truth value, such as that of a dataclass of arrays
        return False
