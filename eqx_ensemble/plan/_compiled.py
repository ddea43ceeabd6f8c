"""A cache of functions that are compiled for all members: `jax.lax.map` outside `jax.jit` compiles in every call."""

import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx

from .. import _check
from ._plans import AbstractPlan

_MOST_PROGRAMS = 32  # each holds its function and the variables that it reads


class _Program(NamedTuple):
    outside: tuple[Any, ...]
    call: Callable[..., Any]


_PROGRAMS: OrderedDict[Any, _Program] = OrderedDict()
_LOCK = threading.Lock()


def keeps_program(plan: AbstractPlan) -> bool:
    """Whether a call is compiled and its program cached; never inside a transformation."""
    return plan.compiles and not _check.is_inside_transformation()


def program_of(fn: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`eqx.filter_jit(run)` for a function, cached while the variables that it reads are the same objects.

    Otherwise a compiled program would keep the first value of an array that a notebook has redefined since.
    """
    plain = isinstance(fn, types.FunctionType)
    outside = tuple(_read_by(fn)) if plain else ()
    key = fn if plain else type(fn)  # `filter_jit` itself distinguishes other callables
    with _LOCK:
        found = _PROGRAMS.get(key)
        if found is None or not _same(found.outside, outside):
            found = _Program(outside, eqx.filter_jit(lambda *args: run(*args)))  # its programs are freed with it
            _PROGRAMS[key] = found
            while len(_PROGRAMS) > _MOST_PROGRAMS:
                _PROGRAMS.popitem(last=False)
        _PROGRAMS.move_to_end(key)
    return found.call


def _same(first: tuple, second: tuple) -> bool:
    return len(first) == len(second) and all(x is y for x, y in zip(first, second, strict=True))


def _read_by(fn: types.FunctionType) -> Iterator[Any]:
    """The values of the enclosing and global variables that a function's code names."""
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            yield None
    for name in _names(fn.__code__):
        yield fn.__globals__.get(name)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names(part)
