"""The version of the user's code that a program is compiled from.

Compiled programs are cached by functions and by the classes in trees. A notebook changes both in place: `%autoreload 2`
gives an existing function another `__code__`, and a cell gives a variable that a function reads another value. JAX then
runs the old program, also in a new call that is meant to use the new code.
"""

import dis
import functools as ft
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import jax
import numpy as np

# Which modules belong to Python and to installed libraries; others may be edited while Python runs.

_FOLDERS = {"site-packages", "dist-packages"}
_OWN = __name__.partition(".")[0]
_known_names: dict[str, bool] = {}  # of imported packages


def is_standard(module: str) -> bool:
    """Whether a module is part of Python."""
    return top_of(module) in sys.stdlib_module_names


def is_library(module: str) -> bool:
    """Whether a module is part of Python, of this library or of an installed one; other modules may be edited."""
    found = _known_names.get(module)
    if found is None:
        top = top_of(module)
        found = is_standard(module) or top == _OWN or _is_third_party(top)
        if top in sys.modules:
            _known_names[module] = found
    return found


def top_of(module: str) -> str:
    """The name of the package that a module belongs to."""
    return str(module).partition(".")[0]


def _is_third_party(top: str) -> bool:
    module = sys.modules.get(top)
    if module is None or top == "__main__":
        return False
    paths = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or ())]
    return any(_is_library_folder(path) for path in paths if path)


@ft.lru_cache(maxsize=1024)
def _is_library_folder(path: str) -> bool:
    return not _FOLDERS.isdisjoint(PurePath(path).parts)


# All that determines what functions and classes do: their code, and the variables that it reads.
#
# Users' objects are looked at as they are stored, without calling their methods, and are referenced weakly.

_MOST_ITEMS = 256  # of a container that is searched for functions
_MOST_OBJECTS = 10_000
_MISSING: Any = object()
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_DATA = (*_PLAIN, np.ndarray, np.generic, jax.Array, types.CodeType, weakref.ReferenceType)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_SLOT = types.MemberDescriptorType | types.GetSetDescriptorType
_WRAPPERS = (classmethod, staticmethod)
_INITIAL = {"__init__", "__post_init__", "__new__"}  # they assign to a new object


class _Variables:
    """Variables of a function, a class or a module, with the values that they have."""

    def __init__(self, values: Iterable[tuple[str, Any]]) -> None:
        self.held = {name: _hold(value) for name, value in values}

    def are_current(self, values: Mapping[str, Any]) -> bool:
        """Whether they have the same values, or equal constants."""
        return all(_is_held(value, values.get(name, _MISSING)) for name, value in self.held.items())


class _Function:
    """What determines the calls of a function: its code, and the values that it reads."""

    def __init__(self, fn: types.FunctionType, names: Iterable[str]) -> None:
        self._ref, self._code = weakref.ref(fn), fn.__code__
        self._defaults = _hold(fn.__defaults__), _hold(fn.__kwdefaults__)
        self.cells = _Variables(_closure(fn).items())
        self.cell_ids = dict(zip(fn.__code__.co_freevars, map(id, fn.__closure__ or ()), strict=True))
        self.variables = _Variables((name, fn.__globals__.get(name, _MISSING)) for name in names)
        self.owner = id(fn.__globals__)
        self.is_users = not is_library(fn.__globals__.get("__name__", ""))

    def is_current(self) -> bool:
        """Whether none of it has changed."""
        fn = self._ref()
        if fn is None or not (fn.__code__ is self._code or fn.__code__ == self._code):
            return False
        if not all(map(_is_held, self._defaults, (fn.__defaults__, fn.__kwdefaults__))):
            return False
        return self.variables.are_current(fn.__globals__) and (
            not self.cells.held or self.cells.are_current(_closure(fn))
        )


class _Namespace:
    """The attributes of a class or a module; of a class, another one may override one of a base."""

    is_users = True

    def __init__(self, of: Any, names: Iterable[str], *, count: bool) -> None:
        self._ref, self._count = weakref.ref(of), len(vars(of)) if count else None
        self.variables = _Variables((name, vars(of)[name]) for name in names)
        self.owner = _owner_id(of)

    def is_current(self) -> bool:
        """Whether none of them has changed."""
        of = self._ref()
        if of is None or self._count not in (None, len(vars(of))):
            return False
        return self.variables.are_current(vars(of))


class Walk:
    """Finds all functions and classes that some of them use, outside of installed libraries."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.found: list[_Function | _Namespace] = []
        self._mutated: set[Any] = set()  # names, with the module or class; or cells
        seen: dict[int, Any] = {}
        left = list(roots)
        while left and len(seen) < _MOST_OBJECTS:
            x = left.pop()
            if not issubclass(type(x), _DATA) and id(x) not in seen:
                seen[id(x)] = x
                left += _try(self._parts, x) or ()
        for place in self.found:
            # What the code assigns itself, such as a counter of its calls, differs between two calls.
            for name in [name for name in place.variables.held if self._is_mutated(place, name)]:
                del place.variables.held[name]
            if isinstance(place, _Function):
                for name in [name for name in place.cells.held if place.cell_ids[name] in self._mutated]:
                    del place.cells.held[name]

    def _is_mutated(self, place: _Function | _Namespace, name: str) -> bool:
        held = place.variables.held[name]
        constant = type(held) is tuple and issubclass(type(held[0]), _PLAIN)
        return (place.owner, name) in self._mutated or constant and (None, name) in self._mutated

    def _parts(self, x: Any) -> list[Any]:
        if issubclass(type(x), types.FunctionType):
            return list(self._parts_of_function(x))
        return list(self._parts_of_class(x)) if issubclass(type(x), type) else _parts_of_object(x)

    def _parts_of_function(self, fn: types.FunctionType) -> Iterator[Any]:
        operations = _operations(fn.__code__)
        words = lambda *kinds: sorted({word for kind, word in operations if kind in kinds})
        place = _Function(fn, words("LOAD_GLOBAL", "LOAD_NAME"))
        self.found.append(place)
        names = place.variables.held if place.is_users else ()
        inside = [*_closure(fn).values(), *(fn.__globals__.get(name) for name in names)]
        yield from (fn.__defaults__, fn.__kwdefaults__, vars(fn).get("__wrapped__"), *inside)
        self._mutated |= {place.cell_ids.get(name) for name in words("STORE_DEREF")}
        if not place.is_users:
            place.variables.held.clear()
            return
        self._mutated |= {(id(fn.__globals__), name) for name in words("STORE_GLOBAL")}
        stored = words("STORE_ATTR") if fn.__name__ not in _INITIAL else []
        owners: list[Any] = [_owner_id(x) for x in inside if issubclass(type(x), type | types.ModuleType)]
        if not {("LOAD_GLOBAL", "type"), ("LOAD_ATTR", "__class__")}.isdisjoint(operations):
            owners.append(None)  # `type(self).calls += 1`
        self._mutated |= {(owner, name) for owner in owners for name in stored}
        attributes = words("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
        modules = [*inside, *(fn.__defaults__ or ()), *(sys.modules.get(name) for name in words("IMPORT_NAME"))]
        yield from self._parts_of_modules(modules, attributes)

    def _parts_of_modules(self, modules: list[Any], attributes: list[str]) -> Iterator[Any]:
        """The variables of the user's modules that a function reads: `module.name`, also of a module in a module."""
        left, seen = list(modules), set()
        while left:
            x = left.pop()
            if type(x) is types.ModuleType and id(x) not in seen and not is_library(x.__name__):
                seen.add(id(x))
                names = [name for name in attributes if name in vars(x)]
                self.found.append(_Namespace(x, names, count=False))
                left += [vars(x)[name] for name in names]
                yield from (vars(x)[name] for name in names)

    def _parts_of_class(self, cls: type) -> Iterator[Any]:
        """The attributes of a class and of its bases, without those of installed libraries."""
        for base in cls.__mro__:
            if not is_library(base.__module__):
                names = [name for name, value in list(vars(base).items()) if _is_code(name, value)]
                self.found.append(_Namespace(base, names, count=True))
                yield from (vars(base).get(name) for name in names)


def _owner_id(of: Any) -> int:
    return id(vars(of)) if isinstance(of, types.ModuleType) else id(of)  # a module's variables are functions' globals


def _is_code(name: str, value: Any) -> bool:
    """Whether an attribute of a class determines what it does."""
    is_method = callable(value) or issubclass(type(value), (property, *_WRAPPERS))
    return is_method or not ((name.startswith("__") and name.endswith("__")) or issubclass(type(value), _SLOT))


def functions_in(roots: Iterable[Any]) -> Iterable[Any]:
    """The functions and classes outside of installed libraries in objects, which may be made anew in every call."""
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    left = list(roots)[::-1]
    while left and len(seen) < _MOST_OBJECTS:
        x = left.pop()
        kind = type(x)
        if issubclass(kind, _DATA) or id(x) in seen:
            continue
        seen[id(x)] = x
        if issubclass(kind, types.FunctionType):
            if x.__closure__ or vars(x) or not is_library(x.__module__ or ""):
                found[id(x)] = x
        elif issubclass(kind, type):
            if not all(is_library(base.__module__) for base in x.__mro__):
                found[id(x)] = x
        else:
            left += _try(_parts_of_object, x) or ()
    return found.values()


def _parts_of_object(x: Any) -> list[Any]:
    """The functions and classes that an object may call."""
    kind = type(x)
    if issubclass(kind, _CONTAINERS):
        own = next(base for base in _CONTAINERS if issubclass(kind, base))  # whose methods a subclass may replace
        items = dict.values(x) if own is dict else own.__iter__(x)
        return list(items) if own.__len__(x) <= _MOST_ITEMS else []
    if kind is types.MethodType:
        return [x.__func__, x.__self__]
    if issubclass(kind, ft.partial):
        return [x.func, x.args, x.keywords]
    if issubclass(kind, property):
        return [x.fget, x.fset]
    if issubclass(kind, _WRAPPERS):
        return [x.__func__]
    if issubclass(kind, types.ModuleType):
        return []
    if is_library(kind.__module__) and not any({"__call__", "__get__"} & vars(cls).keys() for cls in kind.__mro__):
        return []
    slots = [slot for cls in kind.__mro__ for slot in vars(cls).values() if type(slot) is types.MemberDescriptorType]
    return [kind, *(_try(slot.__get__, x) for slot in slots), _try(object.__getattribute__, x, "__dict__")]


def _try(get: Any, *args: Any) -> Any:
    try:
        return get(*args)
    except Exception:  # users' objects may raise anything when they are read; a program is then not told apart by them
        return None


def _closure(fn: types.FunctionType) -> dict[str, Any]:
    return dict(zip(fn.__code__.co_freevars, map(_content, fn.__closure__ or ()), strict=True))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return _MISSING


def _hold(value: Any) -> Any:
    """A weak reference to a value, or a tuple of it, if it does not support them."""
    try:
        return weakref.ref(value)
    except TypeError:
        return (value,)


def _is_held(held: Any, value: Any) -> bool:
    if type(held) is not tuple:
        return value is not None and held() is value  # one that was freed is `None`, too
    old = held[0]
    if old is value:
        return True
    return type(old) is type(value) and type(old) in _PLAIN and repr(old) == repr(value)  # 0.0 is not -0.0


@ft.lru_cache(maxsize=1024)
def _operations(code: types.CodeType) -> frozenset[tuple[str, Any]]:
    """The kinds of instructions of a function, and of those inside it, and the names in them."""
    inner = [_operations(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    own = {(x.opname, x.argval) for x in dis.get_instructions(code) if isinstance(x.argval, str)}
    return frozenset(own).union(*inner)


_MOST_KNOWN = 1024


class Code:
    """What functions and classes do at one time, by their code and by the variables that it reads.

    Compared by identity: `code_of` returns the same object while nothing has changed. Installed libraries are left out.
    """

    def __init__(self, roots: list[Any]) -> None:
        self._found: Any = Walk(roots).found
        self.is_users = any(place.is_users for place in self._found)

    def is_current(self) -> bool:
        """Whether nothing has changed since."""
        return self._found is not None and all(place.is_current() for place in self._found)

    def forget(self) -> None:
        """Ends its use as that of current code: keys of programs keep it, and it may hold a list or a dict."""
        self._found = None


_known: OrderedDict[tuple[int, ...], tuple[Code, list[weakref.ref]]] = OrderedDict()
_lock = threading.Lock()


def code_of(roots: Iterable[Any]) -> Code | None:
    """The code of functions, classes and objects that may be called; `None` if all of it is in installed libraries."""
    own = list(functions_in(roots))
    if not own:
        return None
    key = tuple(map(id, own))
    found = _known.get(key)
    if found is not None and found[0].is_current():
        return found[0] if found[0].is_users else None
    code = Code(own)
    refs = [weakref.ref(x, lambda _: _forget(key)) for x in own]  # before an id is used for another object
    with _lock:
        _forget(key)
        _known[key] = code, refs
        while len(_known) > _MOST_KNOWN:
            _forget(next(iter(_known)))
    return code if code.is_users else None


def _forget(key: tuple[int, ...]) -> None:
    found = _known.pop(key, None)
    if found is not None:
        found[0].forget()
