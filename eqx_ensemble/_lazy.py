import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._suggest import explain_calls, refuse_attribute

# Two threads that import modules which import each other would see them partially initialised.
_one_at_a_time = threading.RLock()


def import_when_used(
    package: str, subpackages: Sequence[str], names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package that imports its modules when they are first used.

    **Arguments:**

    - `package`: its name.
    - `subpackages`: its public subpackages.
    - `names`: the exported names of each private module.
    """
    homes = {name: module for module, exported in names.items() for name in exported}
    public = sorted([*subpackages, *homes])

    def find(name: str) -> Any:
        if name not in homes and name not in subpackages:
            refuse_attribute(package, name)
        # A module that is being imported must not wait: another thread may wait for it.
        with contextlib.nullcontext() if _is_used_inside(package) else _one_at_a_time:
            if name in homes:
                value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
                value = explain_calls(value, package, name)
            else:
                value = importlib.import_module(f"{package}.{name}")
        # Further look-ups find the attribute without this function.
        setattr(importlib.import_module(package), name, value)
        return value

    def names_of_package() -> list[str]:
        own = (name for name in vars(importlib.import_module(package)) if name.startswith("__"))
        return sorted({*own, *public})

    return find, names_of_package, public


def _is_used_inside(package: str) -> bool:
    """Whether a module of the package itself, not a user of it, looks up a name."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") == "importlib._bootstrap" and frame.f_back is not None:  # `from package import`
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith(f"{package}.")
