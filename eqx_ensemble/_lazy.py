import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


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
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = importlib.import_module(f"{package}.{homes.get(name, name)}")
        value = getattr(found, name) if name in homes else found
        # Further look-ups find the attribute without this function.
        setattr(importlib.import_module(package), name, value)
        return value

    return find, lambda: public, public
