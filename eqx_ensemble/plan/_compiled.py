"""A cache of functions that are compiled for all members: `jax.lax.map` outside `jax.jit` compiles in every call."""

import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx

from .. import _check
from .._code import Code, code_of
from ._plans import AbstractPlan

_MOST_PROGRAMS = 32  # each holds its function and the variables that it reads


class _Program(NamedTuple):
    code: Code | None
    call: Callable[..., Any]


_PROGRAMS: OrderedDict[Any, _Program] = OrderedDict()
_LOCK = threading.Lock()


def keeps_program(plan: AbstractPlan) -> bool:
    """Whether a call is compiled and its program cached; never inside a transformation."""
    return plan.compiles and not _check.is_inside_transformation()


def program_of(fn: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`eqx.filter_jit(run)` for a function, cached until its code or a variable that it reads is replaced."""
    plain = isinstance(fn, types.FunctionType)
    key, code = (fn, code_of([fn])) if plain else (type(fn), None)  # `filter_jit` distinguishes other callables
    with _LOCK:
        found = _PROGRAMS.get(key)
        if found is None or found.code is not code:
            found = _Program(code, eqx.filter_jit(lambda *args: run(*args)))  # its programs are freed with it
            _PROGRAMS[key] = found
            while len(_PROGRAMS) > _MOST_PROGRAMS:
                _PROGRAMS.popitem(last=False)
        _PROGRAMS.move_to_end(key)
    return found.call
