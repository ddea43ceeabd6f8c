"""The message for what cannot be serialised: the function that holds it, and the way to it."""

import functools as ft
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._check import kind_text
from ..tree._statics import global_names, static_parts

_MOST_PARTS = 16


class _Part(NamedTuple):
    """A part of a value, and its name there."""

    word: str
    value: Any


def unserialisable_message(value: Any, error: Exception, fails: Callable[[Any], bool], *, name: str) -> str:
    """The message that `value` cannot be sent to workers; `fails` tells which of its parts cannot."""
    trail = _find(value, fails)
    of_jax = [position for position, part in enumerate(trail) if _is_of_jax(part)]
    trail = trail[: of_jax[0] + 1] if of_jax else trail  # the parts of JAX's function are of no interest
    functions = [position for position, part in enumerate(trail) if isinstance(part.value, _FUNCTIONS)]
    first = functions[0] if functions else -1
    subject = f"the function {_function_text(trail[first].value)}" if functions else _value_text(trail)
    where = " of ".join(part.word for part in reversed(trail[first + 1 :])) if functions else ""
    hint = "Make locks, open files and connections inside the function, which runs on the worker; or define"
    if of_jax:
        hint = "In place of `jax.checkpoint`, use `equinox.filter_checkpoint`; or define"
    return (
        f"`{name}` cannot serialise {subject} for workers: {error}{where and f', in {where}'}.\n"
        f"{hint} the function that needs it in a module that workers can import."
    )


_FUNCTIONS = (types.FunctionType, types.MethodType, ft.partial)


def _find(value: Any, fails: Callable[[Any], bool]) -> list[_Part]:
    """The parts from outside in that fail, down to one without a failing part."""
    trail, seen = [_Part("", value)], {id(value)}
    while len(trail) < _MOST_PARTS:
        parts = [part for part in _parts(value) if id(part.value) not in seen]
        found = next((part for part in parts if fails(part.value)), None)
        if found is None:
            break
        trail.append(found)
        value = found.value
        seen.add(id(value))
    return trail


def _parts(value: Any) -> list[_Part]:
    value = getattr(value, "__wrapped__", value) if isinstance(value, jax.stages.Wrapped) else value
    parts = dict(static_parts(value) or {})
    if isinstance(value, types.FunctionType):
        names = global_names(value.__code__)
        parts |= {f"global `{word}`": value.__globals__[word] for word in names if word in value.__globals__}
    return [_Part(word if isinstance(word, str) else f"`{word[0]}`", part) for word, part in parts.items()]


def _is_of_jax(part: _Part) -> bool:
    module = getattr(part.value, "__globals__", {}).get("__name__", "")
    return module.partition(".")[0] == "jax"


def _function_text(fn: Any) -> str:
    while not isinstance(fn, types.FunctionType):
        fn = getattr(fn, "func", None) or getattr(fn, "__func__", None)
        if fn is None:
            return "of a class"
    return f"`{fn.__name__}` ({fn.__code__.co_filename}:{fn.__code__.co_firstlineno})"


def _value_text(trail: list[_Part]) -> str:
    words = [part.word for part in trail[1:]]
    words = words[1:] if words and words[0].startswith("item ") else words  # of a task
    location = " of ".join(reversed(words))
    return f"{kind_text(trail[-1].value)}, {location}," if location else kind_text(trail[-1].value)
