"""Short texts of functions and objects: a name, and a digest of the code and of the values that it refers to."""

import argparse
import dataclasses
import enum
import functools as ft
import hashlib
import os
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ... import _axes
from ..._check import is_key
from ..._code import is_library, is_standard, top_of
from ..._pytree import PyTree
from ...checkpoint._engine import shape_text, versions
from ...distributed import to_host
from ...tree._engine import global_names, static_parts

# Short texts of values and programs, the same in every process.

_ADDRESS = re.compile(r"(?: at )?0x[0-9a-f]+")
SET = re.compile(r"frozenset\(\{([^{}]*)\}\)")
_SHOWN = 8


def option_text(option: Any) -> str:
    """A text for a number, a string, a key, or one number per member, regardless of the type of a number."""
    if option is None or isinstance(option, str):
        return repr(option)
    if is_key(option):
        option = jax.random.key_data(option)
    values = np.asarray(to_host(option))
    if values.size > _SHOWN:
        return array_text(values)
    return repr(values.tolist())


def without_addresses(text: str) -> str:
    """A text of objects without their addresses in memory, which differ between processes."""
    return _ADDRESS.sub("", text)


def array_texts(tree: PyTree, root: str) -> dict[str, str]:
    """A text for every array of a tree."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {f"{root}{jax.tree_util.keystr(path)}": array_text(x) for path, x in keyed}


def array_text(x: Any) -> str:
    """An array's shape, dtype, first values and digest."""
    x = to_host(x)
    first = "" if is_key(x) else ", ".join(map(str, np.ravel(x[:_SHOWN] if x.ndim else x)[:_SHOWN]))
    more = ", ..." if x.size > _SHOWN else ""
    return f"{shape_text(x.shape, x.dtype)} [{first}{more}], {digest_of(x)}"


def digest_of(tree: PyTree) -> str:
    """A digest of the arrays and numbers of a tree, with their paths."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if _axes.is_array(leaf) or isinstance(leaf, bool | int | float | complex | np.generic):
            add_array(digest, jax.tree_util.keystr(path), leaf)
    return digest.hexdigest()


def add_array(digest: Any, path: str, leaf: Any) -> None:
    """Adds an array or a number to a digest."""
    if is_key(leaf):
        path, leaf = f"{path} {jax.random.key_impl(leaf)}", jax.random.key_data(leaf)
    array = np.ascontiguousarray(to_host(leaf))
    digest.update(f"{path} {array.dtype} {array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
_MAPPINGS = (dict, types.MappingProxyType)
_CONTAINERS = (*_MAPPINGS, list, tuple, set, frozenset, types.SimpleNamespace, argparse.Namespace)
# A compiler may merge equal constants of a file, so that whether two are one object says nothing.
_CONSTANTS = (tuple, frozenset, types.CodeType)
_WRAPPERS = (staticmethod, classmethod)
# Attributes of a class that do not change what it does, or that other attributes determine.
_NOT_CODE = frozenset({
    "__abstractclassvars__", "__abstractmethods__", "__abstractvars__", "__annotate__", "__annotate_func__",
    "__annotations__", "__annotations_cache__", "__conditional_annotations__", "__dict__", "__doc__",
    "__firstlineno__", "__match_args__", "__module__", "__orig_bases__", "__parameters__", "__signature__",
    "__slotnames__", "__static_attributes__", "__weakref__", "_abc_impl",
})  # fmt: skip
# Attributes that `functools.wraps` copies from one function to another.
_NOT_PARTS = frozenset(f"attribute `{word}`" for word in ("__annotations__", "__doc__", "__module__", "_jit_info"))

_Parts = list[tuple[str, Any]]


def code_text(x: Any) -> str:
    """The name of a function, or of the type of an object, and a digest of its code and of all that it refers to."""
    return f"{getattr(x, '__qualname__', type(x).__qualname__)} {_code_digest(x)}"


def _code_digest(fn: Any) -> str:
    """The digest of all parts of a function or an object, down to numbers and names, from the first to the last."""
    digest = hashlib.sha256()
    seen: dict[int, tuple[int, Any]] = {}
    left: _Parts = [("", fn)]
    while left:
        name, x = left.pop()
        digest.update(f"{name} {type(x).__qualname__} ".encode())
        if _axes.is_array(x) and not isinstance(x, np.generic):
            add_array(digest, "", x)
        elif id(x) in seen:
            digest.update(f"number {seen[id(x)][0]}".encode())
        else:
            if not isinstance(x, _PLAIN + _CONSTANTS):
                seen[id(x)] = len(seen), x  # kept alive, so that its id is not reused
            text, parts = _split(x)
            digest.update(f"{text} {len(parts)}".encode())
            left += reversed(parts)
    return digest.hexdigest()


def _split(x: Any) -> tuple[str, _Parts]:
    """A value as a text and its parts."""
    if isinstance(x, _PLAIN) and type(x).__module__ in ("builtins", "numpy"):
        return repr(x), []
    if isinstance(x, types.ModuleType):
        return x.__name__, []
    if isinstance(x, type):
        return _split_class(x)
    if isinstance(x, types.FunctionType):
        if _is_type_check(x):
            return "", [("wrapped", vars(x)["__wrapped__"])]
        return "", [*_part_list(static_parts(x)), *_globals_of(x)]
    if isinstance(x, _WRAPPERS):
        return "", [("function", x.__func__)]
    if isinstance(x, property):
        return "", [("get", x.fget), ("set", x.fset), ("delete", x.fdel)]
    if isinstance(x, set | frozenset):
        return repr(sorted(_plain_repr(item) for item in x)), []
    if isinstance(x, os.PathLike):
        return os.fsdecode(x), []
    return _split_object(x)


def _split_object(x: Any) -> tuple[str, _Parts]:
    """An object as a text and its parts: its items, attributes and class, and the function that it wraps."""
    kind: _Parts = [] if is_library(type(x).__module__) else [("class", type(x))]
    if isinstance(x, enum.Enum):
        return x.name, kind
    if isinstance(x, _MAPPINGS):
        return "", [*kind, *_items(x)]
    if isinstance(x, ft.cached_property):
        return "", [("function", x.func)]
    wrapped = getattr(x, "__wrapped__", None) if callable(x) else None
    if wrapped is not None:
        kind.append(("wrapped", wrapped))
        if isinstance(x, jax.stages.Wrapped):  # `jit` changes no result, and records the line of the function
            return "", kind
    parts = static_parts(x)
    if parts is None:  # an object written in C
        return "" if type(x).__repr__ is object.__repr__ else _plain_repr(x), kind
    if _is_opaque(x):
        return "", kind
    return "", [*kind, *_part_list(parts)]


def _is_opaque(x: Any) -> bool:
    """Whether an object of the standard library may change while it is used, as a logger or a cache does."""
    described = isinstance(x, _CONTAINERS) or dataclasses.is_dataclass(x) or isinstance(x, dataclasses.Field)
    module = type(x).__module__
    return is_standard(module) and module != "builtins" and not described and not callable(x)


def _split_class(cls: type) -> tuple[str, _Parts]:
    """A class as its name and its attributes and bases; a class of an installed library as its name and version."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if is_library(cls.__module__):
        return f"{name} {_version_text(cls.__module__)}", []
    own = {word: x for word, x in vars(cls).items() if word not in _NOT_CODE and not _is_descriptor(x)}
    if issubclass(cls, enum.Enum):
        members = [(word, member.value) for word, member in cls.__members__.items()]
        own = {word: x for word, x in own.items() if isinstance(x, (types.FunctionType, property, *_WRAPPERS))}
        return name, [*members, *sorted(own.items()), *_bases(cls)]
    return name, [*sorted(own.items()), *_bases(cls)]


def _version_text(module: str) -> str:
    """The version of an installed library, unless it is one whose version is a condition of every run."""
    top = top_of(module)
    if is_standard(module) or top in versions() or top == top_of(__name__):
        return ""
    version: Any = getattr(sys.modules.get(top), "__version__", "")
    return str(version)


def _bases(cls: type) -> _Parts:
    return [("base", base) for base in cls.__bases__]


def _is_descriptor(x: Any) -> bool:
    """Whether an attribute of a class is the place of a slot, of `__dict__` or of `__weakref__`."""
    return isinstance(x, types.GetSetDescriptorType | types.MemberDescriptorType)


def _is_type_check(fn: types.FunctionType) -> bool:
    """Whether a function is one with run-time type checks around it, whose variables have addresses as names."""
    checker = str(fn.__globals__.get("__name__")).startswith("jaxtyping.")
    return "__wrapped__" in vars(fn) and (checker or fn.__code__.co_filename.startswith("<@beartype("))


def _globals_of(fn: types.FunctionType) -> _Parts:
    """The globals that a function reads; none for one of an installed library."""
    if is_library(fn.__globals__.get("__name__", "")):
        return []
    return _read(fn.__globals__, set(global_names(fn.__code__)), ())


def _read(namespace: Mapping[str, Any], names: set[str], within: tuple[Any, ...]) -> _Parts:
    """The names of a namespace that code reads, and those of the user's modules in it: `module.name`."""
    found: _Parts = []
    for name in sorted(names & namespace.keys()):
        x = namespace[name]
        found.append((f"global `{name}`", x))
        if isinstance(x, types.ModuleType) and x not in within and not is_library(x.__name__):
            found += _read(vars(x), names, (*within, x))
    return found


def _items(x: Mapping[Any, Any]) -> _Parts:
    """The keys and values of a dictionary."""
    found: _Parts = []
    for key, value in x.items():
        found += [("key", key), ("value", value)]
    return found


def _part_list(parts: Mapping[Any, Any] | None) -> _Parts:
    return [(name, part) for name, part in (parts or {}).items() if name not in _NOT_PARTS]


def _plain_repr(x: Any) -> str:
    """The representation of an object without its address."""
    return without_addresses(repr(x))
