"""Serialisation between caller and workers: functions by reference or by value, large arrays once per worker."""

import collections
import hashlib
import importlib
import io
import pickle
import sys
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._check import check_installed, is_typed_key
from ..tree._statics import static_parts
from ._explain_serialise import unserialisable_message
from ._serialise_classes import is_module_class, reduce_class

# Functions and callable objects by the hash of their pickle. One that returns from a worker is the caller's own object,
# and one that a worker receives again is the object for which it has compiled programs.
_known: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()
# The key in `_known` of callable objects, and the hash of their pickle in this process, which may differ.
_digests: "weakref.WeakKeyDictionary[Any, tuple[str, str]]" = weakref.WeakKeyDictionary()
_NAN = "nan"  # one object in each process: JAX compares static fields by `==`, or by identity in tuples
_ANY = ""  # of jitted functions, which are immutable
_Jitted: Any = type(jax.jit(lambda: None))
_kept: "collections.deque[Any]" = collections.deque(maxlen=256)
_MOST_ON_DEVICE = 64
_UNSERIALISABLE = (TypeError, AttributeError, pickle.PicklingError)


# The JAX arrays that a worker made of NumPy arrays that it received, by the `id` of the latter, which it keeps alive.
_on_device: dict[int, tuple[Any, jax.Array]] = {}


class ArrayRef(NamedTuple):
    """A placeholder for a large array: its number in the call, and whether it is a JAX array."""

    number: int
    is_jax: bool


def refs_of(arrays: Sequence[Any]) -> dict[int, ArrayRef]:
    """The placeholders of arrays, by `id`."""
    return {id(array): ArrayRef(i, isinstance(array, jax.Array)) for i, array in enumerate(arrays)}


def refs_on_worker(arrays: Sequence[Any]) -> dict[int, ArrayRef]:
    """As `refs_of`, on a worker that received `arrays`, and including the JAX arrays made of them."""
    found = refs_of(arrays)
    for i, array in enumerate(arrays):
        if id(array) in _on_device:
            found[id(_on_device[id(array)][1])] = ArrayRef(i, is_jax=True)
    return found


def dumps(value: Any, arrays: Mapping[int, ArrayRef] | None = None, *, name: str) -> bytes:
    """Serialises `value`. Arrays whose `id` is in `arrays` are replaced by placeholders.

    Raises a `TypeError` that names the function that holds what cannot be serialised.
    """
    check_installed("cloudpickle", what=name, extra="fleet")
    numbers = arrays or {}

    def fails(part: Any) -> bool:
        try:
            _dumps(part, numbers, is_part=False)
        except _UNSERIALISABLE:
            return True
        return False

    try:
        return _dumps(value, numbers, is_part=False)
    except _UNSERIALISABLE as error:
        raise TypeError(unserialisable_message(value, error, fails, name=name)) from error


def loads(data: bytes, arrays: Sequence[Any] = ()) -> Any:
    """Deserialises bytes exchanged between a caller and its workers; never used for files."""
    return _Unpickler(io.BytesIO(data), arrays).load()


def _dumps(value: Any, arrays: Mapping[int, ArrayRef], *, is_part: bool) -> bytes:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> tuple[int, bool] | str | None:
            if type(obj) is float and obj != obj:
                return _NAN
            number = arrays.get(id(obj))
            return None if number is None else (number.number, number.is_jax)

        def reducer_override(self, obj: Any) -> Any:
            if is_typed_key(obj):  # JAX before 0.10 cannot pickle these
                return _as_key, (np.asarray(jax.random.key_data(obj)), jax.random.key_impl(obj))
            if isinstance(obj, types.FunctionType | _Jitted):
                # Functions that it refers to are serialised inside it, since two functions may refer to each other.
                if _is_importable(obj) and isinstance(obj, _Jitted):
                    return _import_object, (obj.__module__, obj.__qualname__)
                if is_part or _is_importable(obj):
                    return super().reducer_override(obj)
                return _reduce_by_digest(obj)
            if is_module_class(obj):
                reduction = super().reducer_override(obj)
                return reduce_class(obj, reduction) if isinstance(reduction, tuple) else reduction
            if not isinstance(obj, type | types.ModuleType) and callable(obj) and _is_importable(obj):
                return _import_object, (obj.__module__, obj.__qualname__)
            sentinel = _name_of_sentinel(obj)
            if sentinel is not None:
                return _import_object, sentinel
            if not is_part and _is_static_callable(obj):
                return _reduce_by_digest(obj)
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: Sequence[Any]) -> None:
        super().__init__(file)
        self._arrays = arrays

    def persistent_load(self, pid: Any) -> Any:
        """The array with this number, or NaN."""
        if pid == _NAN:
            return np.nan
        number, is_jax = pid
        array = self._arrays[number]
        if not is_jax or isinstance(array, jax.Array):
            return array
        if id(array) not in _on_device:
            if len(_on_device) >= _MOST_ON_DEVICE:
                _on_device.clear()
            _on_device[id(array)] = array, jnp.asarray(array)
        return _on_device[id(array)][1]


def _is_importable(obj: Any) -> bool:
    """Whether other processes can import the object by name: not if it is defined in `__main__` or in a function."""
    module, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str) or module == "__main__":
        return False
    found = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found is obj


def _name_of_sentinel(obj: Any) -> tuple[str, str] | None:
    """The module of an object without state and its name there, such as Equinox's `MISSING`, compared by identity."""
    cls = type(obj)
    if cls.__reduce_ex__ is not object.__reduce_ex__ or getattr(cls, "__reduce__", None) is not object.__reduce__:
        return None
    if cls.__module__ == "__main__" or object.__getstate__(obj) is not None or static_parts(obj) != {}:
        return None
    module = sys.modules.get(cls.__module__)
    attributes = [] if module is None else list(vars(module).items())
    return next(((cls.__module__, name) for name, value in attributes if value is obj), None)


def _import_object(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _as_key(data: np.ndarray, impl: Any) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)


def _is_static_callable(obj: Any) -> bool:
    """Whether JAX takes the object for a constant, and finds compiled programs by its identity."""
    cls = type(obj)
    if isinstance(obj, type) or not callable(obj) or not cls.__weakrefoffset__ or not jtu.all_leaves((obj,)):
        return False
    is_by_identity = cls.__eq__ is object.__eq__ and cls.__hash__ is object.__hash__
    return isinstance(obj, types.MethodType) or (is_by_identity and static_parts(obj) is not None)


def _reduce_by_digest(obj: Any) -> tuple[Any, ...]:
    data = _dumps(obj, {}, is_part=True)
    own = hashlib.sha256(data).hexdigest()
    digest, before = _digests.get(obj, (own, own))
    if before not in (own, _ANY):
        digest = own  # it has changed
    _known[digest] = obj
    if not isinstance(obj, types.FunctionType | _Jitted):
        _digests[obj] = digest, own
    return _restore, (digest, data)


def _restore(digest: str, data: bytes) -> Any:
    found = _known.get(digest)
    if found is None or not _is_current(found, digest):
        found = loads(data)
        _known[digest] = found
        _kept.append(found)
        if isinstance(found, _Jitted):
            _digests[found] = digest, _ANY
        elif not isinstance(found, types.FunctionType):
            _digests[found] = digest, _own_digest(found)
    return found


def _is_current(found: Any, digest: str) -> bool:
    """Whether an object still has the state of its pickle; functions count as constant."""
    if isinstance(found, types.FunctionType | _Jitted):
        return True
    return _digests.get(found) == (digest, _own_digest(found))


def _own_digest(obj: Any) -> str:
    return hashlib.sha256(_dumps(obj, {}, is_part=True)).hexdigest()
