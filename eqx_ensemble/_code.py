"""The version of the user's code that a program is compiled from.

Compiled programs are cached by functions and by the classes in trees. A notebook changes both in place: `%autoreload 2`
gives an existing function another `__code__`, and a cell gives a variable that a function reads another value. JAX then
runs the old program, also in a new call that is meant to use the new code.
"""

import dis
import functools as ft
import threading
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ._libraries import is_library

_MOST_KNOWN = 1024
_MOST_ITEMS = 64  # of a container that is searched for functions
_MISSING: Any = object()
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_DATA = (*_PLAIN, np.ndarray, np.generic, jax.Array, types.ModuleType, types.CodeType)
_SLOT = types.MemberDescriptorType | types.GetSetDescriptorType
_WRAPPERS = (classmethod, staticmethod)


class _Found:
    """All places that determine what functions and classes do, with the values that stand there."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.functions: list[tuple[types.FunctionType, Any, Any, Any]] = []
        self.names: list[tuple[Mapping[str, Any], str, Any]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.classes: list[tuple[Mapping[str, Any], int]] = []
        self._assigned: set[Any] = set()
        seen: dict[int, Any] = {}
        left = list(roots)
        while left:
            x = left.pop()
            if not isinstance(x, _DATA) and id(x) not in seen:
                seen[id(x)] = x
                left += self._parts(x)
        # What the code assigns itself, such as a counter of its calls, is its result, and differs between two calls.
        self.names = [x for x in self.names if not {(id(x[0]), x[1]), x[1]} & self._assigned]
        self.cells = [x for x in self.cells if id(x[0]) not in self._assigned]

    def is_current(self) -> bool:
        """Whether the same objects stand there."""
        for fn, code, defaults, named in self.functions:
            if fn.__code__ is not code or fn.__defaults__ is not defaults or fn.__kwdefaults__ is not named:
                return False
        for namespace, name, value in self.names:
            if namespace.get(name, _MISSING) is not value:
                return False
        return all(len(attributes) == count for attributes, count in self.classes) and all(
            _content(cell) is value for cell, value in self.cells
        )

    def is_equal(self, other: "_Found") -> bool:
        """Whether equal code and constants stand there: a module that is loaded again makes new objects."""
        mine, theirs = ([x.functions, x.names, x.cells] for x in (self, other))
        return all(
            len(a) == len(b) and all(_are_equal(x[1:], y[1:]) for x, y in zip(a, b, strict=True))
            for a, b in zip(mine, theirs, strict=True)
        )

    def _parts(self, x: Any) -> Iterable[Any]:
        if isinstance(x, types.FunctionType):
            return self._parts_of_function(x)
        return self._parts_of_class(x) if isinstance(x, type) else _parts_of_object(x)

    def _parts_of_function(self, fn: types.FunctionType) -> Iterator[Any]:
        self.functions.append((fn, fn.__code__, fn.__defaults__, fn.__kwdefaults__))
        yield from (fn.__defaults__, fn.__kwdefaults__, vars(fn).get("__wrapped__"))
        operations = _operations(fn.__code__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self.cells.append((cell, _content(cell)))
            self._assigned |= {id(cell)} if ("STORE_DEREF", name) in operations else set()
            yield _content(cell)
        if not is_library(fn.__globals__.get("__name__", "")):
            self._assigned |= {(id(fn.__globals__), name) for kind, name in operations if kind == "STORE_GLOBAL"}
            self._assigned |= {name for kind, name in operations if kind == "STORE_ATTR"}
            names = {name for kind, name in operations if kind in ("LOAD_GLOBAL", "LOAD_NAME")}
            attributes = {name for kind, name in operations if kind in ("LOAD_ATTR", "LOAD_METHOD")}
            yield from self._parts_of_module(fn.__globals__, names, attributes, ())

    def _parts_of_module(
        self, namespace: dict[str, Any], names: set[str], attributes: set[str], within: tuple[Any, ...]
    ) -> Iterator[Any]:
        """The variables of a module, and those of the user's modules among them: `module.name`."""
        for name in sorted(names & namespace.keys() if within else names):
            value = namespace.get(name, _MISSING)  # a built-in one, for example, which may be replaced
            self.names.append((namespace, name, value))
            if isinstance(value, types.ModuleType) and value not in within and not is_library(value.__name__):
                yield from self._parts_of_module(vars(value), attributes, attributes, (*within, value))
            yield value

    def _parts_of_class(self, cls: type) -> Iterator[Any]:
        """The attributes of a class and of its bases, without those of installed libraries."""
        for base in cls.__mro__:
            if is_library(base.__module__):
                continue
            self.classes.append((vars(base), len(vars(base))))  # another attribute may override one of a base
            for name, value in vars(base).items():
                is_code = callable(value) or isinstance(value, (property, *_WRAPPERS))
                if is_code or not (name.startswith("_") or isinstance(value, _SLOT)):
                    self.names.append((vars(base), name, value))
                    yield value


class Code:
    """What functions and classes do at one time, by their code and by the variables that it reads.

    Compared by identity: `code_of` returns the same object while nothing has changed. Installed libraries are left out.
    """

    def __init__(self, roots: list[Any]) -> None:
        self._roots = roots  # kept alive, so that their ids are not reused
        self._found = _Found(roots)

    @property
    def is_users(self) -> bool:
        """Whether any of it is outside of installed libraries, which wrap functions in closures."""
        return bool(self._found.names) or any(not is_library(fn.__module__ or "") for fn, *_ in self._found.functions)

    def is_current(self) -> bool:
        """Whether nothing has changed since."""
        if self._found.is_current():
            return True
        now = _Found(self._roots)
        if not self._found.is_equal(now):
            return False
        self._found = now
        return True


_known: OrderedDict[tuple[int, ...], Code] = OrderedDict()
_lock = threading.Lock()


def code_of(roots: Iterable[Any]) -> Code | None:
    """The code of functions, classes and objects that may be called; `None` if all of it is in installed libraries."""
    own = list({id(x): x for x in roots if not _is_of_library(x)}.values())
    if not own:
        return None
    key = tuple(map(id, own))
    with _lock:
        found = _known.get(key)
        if found is None or not found.is_current():
            found = _known[key] = Code(own)
            while len(_known) > _MOST_KNOWN:
                _known.popitem(last=False)
        _known.move_to_end(key)
    return found if found.is_users else None


def _is_of_library(x: Any) -> bool:
    if isinstance(x, type):
        return _is_class_of_library(x)
    if isinstance(x, types.FunctionType):
        return x.__closure__ is None and not vars(x) and is_library(x.__module__ or "")
    if isinstance(x, _DATA):
        return True
    return not callable(x) and is_library(type(x).__module__)


@ft.lru_cache(maxsize=1024)
def _is_class_of_library(cls: type) -> bool:
    return all(is_library(base.__module__) for base in cls.__mro__)


def _parts_of_object(x: Any) -> Iterator[Any]:
    """The functions and classes that an object may call."""
    if isinstance(x, dict | list | tuple | set | frozenset):
        items = x.values() if isinstance(x, dict) else x
        yield from items if len(x) <= _MOST_ITEMS else ()
    elif isinstance(x, types.MethodType):
        yield from (x.__func__, x.__self__)
    elif isinstance(x, ft.partial):
        yield from (x.func, x.args, x.keywords)
    elif isinstance(x, property):
        yield from (x.fget, x.fset)
    elif isinstance(x, _WRAPPERS):
        yield x.__func__
    elif not is_library(type(x).__module__) or callable(x) or hasattr(type(x), "__get__"):
        slots = (name for cls in type(x).__mro__ for name, value in vars(cls).items() if isinstance(value, _SLOT))
        attributes = (getattr(x, name, None) for name in slots if not name.startswith("__"))
        wrapped = getattr(x, "__wrapped__", None)
        yield from (type(x), wrapped, getattr(x, "__dict__", None), *attributes)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return _MISSING


def _are_equal(a: Any, b: Any) -> bool:
    if a is b or isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType):  # which `functions` compares
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    if isinstance(a, types.CodeType):
        return a == b
    return isinstance(a, _PLAIN) and repr(a) == repr(b)  # which distinguishes 0.0 from -0.0


@ft.lru_cache(maxsize=1024)
def _operations(code: types.CodeType) -> frozenset[tuple[str, Any]]:
    """The kinds of instructions of a function, and of those inside it, and the names in them."""
    inner = [_operations(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    own = {(x.opname, x.argval) for x in dis.get_instructions(code) if isinstance(x.argval, str)}
    return frozenset(own).union(*inner)
