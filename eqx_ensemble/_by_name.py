"""Functions by the name under which other processes import them.

pickle takes plain functions by name, but not `jax.nn.relu`, the default activation of `equinox.nn.MLP`, nor other
objects that `jax.jit`, `jax.custom_jvp` and `jnp.ufunc` made of functions. `copy.deepcopy` makes them anew, which is
another function for JAX.
"""

import importlib
import sys
import types
from typing import Any

import jax


def is_importable(obj: Any) -> bool:
    """Whether other processes can import the object by name: not if it is defined in `__main__` or in a function."""
    module, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str) or module == "__main__":
        return False
    found = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found is obj


def import_object(module: str, qualname: str) -> Any:
    """The object of that name."""
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def reduce_shared(self: Any) -> tuple[Any, ...]:
    """The `__reduce__` of a Module with a field `shared`, in which functions that can be imported stay themselves."""
    fields = vars(self)
    return _restore, (type(self), fields | {"shared": jax.tree.map(_as_reference, fields["shared"])})


def _restore(cls: type, fields: dict[str, Any]) -> Any:
    module = object.__new__(cls)
    own = jax.tree.map(lambda x: x.function if isinstance(x, _Reference) else x, fields["shared"])
    vars(module).update(fields | {"shared": own})
    return module


class _Reference:
    """A function in the state of a Module; pickled and copied by its name."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return import_object, (self.function.__module__, self.function.__qualname__)


def _as_reference(x: Any) -> Any:
    is_plain = isinstance(x, types.FunctionType | types.BuiltinFunctionType | type)
    return _Reference(x) if callable(x) and not is_plain and is_importable(x) else x
