"""Functions of one member, compiled for all and kept: `jax.lax.map` outside `jax.jit` compiles at every call."""

import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx

from .. import _check
from ._plans import AbstractPlan

_MOST_PROGRAMS = 32  # each holds its function, and the variables that this reads


class _Program(NamedTuple):
    outside: tuple[Any, ...]
    call: Callable[..., Any]


_PROGRAMS: OrderedDict[Any, _Program] = OrderedDict()
_LOCK = threading.Lock()


def keeps_program(plan: AbstractPlan) -> bool:
    """Whether a call is compiled and its program kept: inside a transformation nothing is."""
    return plan.compiles and not _check.is_inside_transformation()


def program_of(fn: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`eqx.filter_jit(run)` for a function: the same one while the variables that it reads are the same objects.

    A compiled program keeps the values that it read first, even if a notebook has redefined an array since.
    """
    plain = isinstance(fn, types.FunctionType)
    outside = tuple(_read_by(fn)) if plain else ()
    key = fn if plain else type(fn)  # of other callables, `filter_jit` itself tells one from another
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
    """The values of the enclosing and global variables that the text of a function names."""
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
