"""Short texts of traced programs, with the code of the Python functions that they call."""

import functools as ft
import hashlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx

from ..._jaxpr import callbacks, inner_jaxprs
from ..._libraries import is_library
from ..._pytree import PyTree
from ...tree._statics import static_parts
from ._code_texts import code_text
from ._texts import SET, add_array, digest_of, without_addresses

_CALLABLES = types.FunctionType | types.MethodType | types.BuiltinFunctionType | ft.partial


def function_text(fn: Callable[..., Any], *args: PyTree) -> str:
    """A function's name and a digest of its program for such arguments, or of its code if it cannot be traced."""
    try:
        return f"{getattr(fn, '__qualname__', type(fn).__qualname__)} {program_text(fn, *args)[0]}"
    except Exception:  # it may use concrete values; another error is raised again where it is called
        return code_text(fn)


def program_text(fn: Callable[..., Any], *args: PyTree) -> tuple[str, PyTree]:
    """A digest of the traced program of `fn` with its constants and host functions, and the shapes of its results."""
    jaxpr, out, constant_out = eqx.filter_make_jaxpr(fn)(*args)
    text = without_addresses(str(jaxpr))
    text = SET.sub(lambda found: f"frozenset({{{', '.join(sorted(found[1].split(', ')))}}})", text)
    digest = hashlib.sha256(text.encode())
    for constant in _constants(jaxpr):
        add_array(digest, "", constant)
    digest.update(digest_of(constant_out).encode())  # constants among its outputs
    for callback in callbacks(jaxpr):
        for function in _user_functions(callback):
            digest.update(code_text(function).encode())
    return digest.hexdigest(), out


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The constants of a program and of those inside it."""
    yield from getattr(jaxpr, "consts", ())
    for eqn in jaxpr.eqns:
        for part in inner_jaxprs(eqn):
            yield from _constants(part)


def _user_functions(fn: Any) -> Iterator[Any]:
    """A host function; if it is one of a library, the user's functions that it was given.

    Other variables of a library's function, such as the stack in an error of Equinox, are not part of the call.
    """
    seen: dict[int, Any] = {}
    left = [fn]
    while left:
        x = left.pop()
        if id(x) in seen or not callable(x) or isinstance(x, type):
            continue
        seen[id(x)] = x
        if isinstance(x, types.FunctionType) and is_library(str(x.__module__)):
            left += (static_parts(x) or {}).values()
        elif not is_library(type(x).__module__) or isinstance(x, _CALLABLES):
            yield x
