"""Representations in a few lines: small arrays with their values, and larger trees as the names of their types."""

import dataclasses
from typing import Any

import jax
import numpy as np

from ._leaves import is_key, is_traced

_MOST_VALUES = 8
_LONGEST, _WIDTH = 60, 80


def brief_doc(self: Any, **options: Any) -> Any:
    """The `__pdoc__` of a Module, by which Equinox and jaxtyping show it."""
    held = vars(self)
    fields = [x.name for x in dataclasses.fields(self) if x.repr and held.get(x.name, x.default) is not x.default]
    return _doc(type(self), [(name, held[name]) for name in fields], **options)


def brief_repr(self: Any) -> str:
    """The `__repr__` of a named tuple of arrays."""
    from wadler_lindig import array_summary, pformat

    summary = lambda x: array_summary(x.shape, x.dtype.name, kind=None) if isinstance(x, jax.Array) else None
    return pformat(_doc(type(self), list(self._asdict().items()), custom=summary), width=_WIDTH)


def _doc(kind: type, pairs: list[tuple[str, Any]], **options: Any) -> Any:
    from wadler_lindig import TextDoc, bracketed, comma, named_objs

    docs = named_objs([(name, _brief(value)) for name, value in pairs], **options)
    return bracketed(begin=TextDoc(f"{kind.__name__}("), docs=docs, sep=comma, end=TextDoc(")"), indent=2)


def _brief(value: Any) -> Any:
    from wadler_lindig import TextDoc, pformat

    if isinstance(value, jax.Array | np.ndarray):
        numbers = _numbers(value)
        return value if numbers is None else TextDoc(numbers)
    is_short = len(pformat(value, width=10**6)) <= _LONGEST
    return value if is_short else TextDoc(f"{type(value).__name__}(...)")


def known_values(x: Any) -> np.ndarray | None:
    """The values of an array, or `None` if it is traced, deleted, or held by other processes."""
    if is_traced(x) or not isinstance(x, jax.Array | np.ndarray):
        return None
    if isinstance(x, jax.Array) and (x.is_deleted() or not x.is_fully_addressable):
        return None
    return np.asarray(jax.device_get(x))


def _numbers(x: jax.Array | np.ndarray) -> str | None:
    """The values of a small array as text, or `None` if it is not small, or they are not known."""
    if x.size > _MOST_VALUES or is_key(x):
        return None
    values = known_values(x)
    if values is None:
        return None
    if values.dtype.kind == "V":  # such as bfloat16
        values = values.astype(np.float32)
    formatter: Any = {"float_kind": lambda value: f"{value:.4g}", "int": str}
    text = np.array2string(values, separator=", ", formatter=formatter)
    return " ".join(text.split())
