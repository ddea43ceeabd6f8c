import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def import_when_used(
    package: str, rooms: Sequence[str], names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package that imports its modules when they are first used.

    **Arguments:**

    - `package`: its name.
    - `rooms`: its public subpackages.
    - `names`: of each private module the names that the package exports.
    """
    homes = {name: module for module, exported in names.items() for name in exported}
    public = sorted([*rooms, *homes])

    def find(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        elif name in rooms:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # From now on the attribute is found without this function.
        setattr(importlib.import_module(package), name, value)
        return value

    def names_of_package() -> list[str]:
        own = (name for name in vars(importlib.import_module(package)) if name.startswith("__"))
        return sorted({*own, *public})

    return find, names_of_package, public
