"""Modules' classes that other processes cannot import: those of a script, of a notebook or of a function."""

import dataclasses
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx

_tokens: "weakref.WeakKeyDictionary[type, str]" = weakref.WeakKeyDictionary()
_classes: "weakref.WeakValueDictionary[str, type]" = weakref.WeakValueDictionary()
_received: "weakref.WeakSet[type]" = weakref.WeakSet()


def is_module_class(obj: Any) -> bool:
    """Whether `obj` is a class of Equinox modules."""
    return isinstance(obj, type(eqx.Module))


def reduce_class(cls: Any, reduction: tuple[Any, ...]) -> tuple[Any, ...]:
    """The reduction of a class, from the one of cloudpickle.

    That makes a class without fields first and fills it later, because a class may refer to itself. Equinox registers a
    class as a PyTree when it is made, so the fields have to be there by then.
    """
    (_, (metaclass, name, bases, namespace, *_), state, _, _, fill) = reduction
    fields = {name: _declaration(field) for name, field in _own_fields(cls).items()}
    token = _tokens.setdefault(cls, uuid.uuid4().hex)
    _classes[token] = cls
    arguments = (token, metaclass, name, bases, namespace, fields, _has_own_init(cls))
    return _make, arguments, (fill, state), None, None, _fill


def _own_fields(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """The fields that this class declares, not those of its bases alone."""
    inherited = [getattr(base, "__dataclass_fields__", {}) for base in cls.__bases__]
    fields = {field.name: field for field in dataclasses.fields(cls)}
    return {name: field for name, field in fields.items() if not any(x.get(name) is field for x in inherited)}


def _has_own_init(cls: Any) -> bool:
    """Whether `__init__` is one that a user wrote; that of a dataclass is made from source text."""
    init = cls.__dict__.get("__init__")
    return isinstance(init, types.FunctionType) and init.__code__.co_filename != "<string>"


def _declaration(field: dataclasses.Field[Any]) -> dict[str, Any]:
    options = {word: getattr(field, word) for word in ("init", "repr", "hash", "compare", "kw_only")}
    defaults = {word: getattr(field, word) for word in ("default", "default_factory")}
    given = {word: value for word, value in defaults.items() if value is not dataclasses.MISSING}
    return options | given | {"metadata": dict(field.metadata)}


def _make(
    token: str,
    metaclass: Any,
    name: str,
    bases: tuple[type, ...],
    namespace: dict[str, Any],
    fields: dict[str, dict[str, Any]],
    has_init: bool,  # noqa: FBT001 (an argument of a reduction)
) -> type:
    found = _classes.get(token)
    if found is not None:
        return found
    own: dict[str, Any] = {word: dataclasses.field(**options) for word, options in fields.items()}
    own["__annotations__"] = dict.fromkeys(fields, Any)
    if has_init:
        own["__init__"] = lambda self: None  # until the class is filled
    cls = types.new_class(name, bases, {"metaclass": metaclass}, lambda body: body.update(namespace | own))
    _tokens[cls], _classes[token] = token, cls
    _received.add(cls)
    return cls


def _fill(cls: type, state: tuple[Callable[[type, Any], Any], Any]) -> None:
    """Sets methods and all else; not in the process that the class comes from, whose own it is."""
    fill, attributes = state
    if cls in _received:
        fill(cls, attributes)
