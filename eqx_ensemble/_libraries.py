"""Which modules belong to Python and to installed libraries; others may be edited while Python runs."""

import functools as ft
import sys
from pathlib import PurePath

_FOLDERS = {"site-packages", "dist-packages"}
_OWN = __name__.partition(".")[0]
_known: dict[str, bool] = {}  # of imported packages


def is_standard(module: str) -> bool:
    """Whether a module is part of Python."""
    return top_of(module) in sys.stdlib_module_names


def is_library(module: str) -> bool:
    """Whether a module is part of Python, of this library or of an installed one; other modules may be edited."""
    found = _known.get(module)
    if found is None:
        top = top_of(module)
        found = is_standard(module) or top == _OWN or _is_third_party(top)
        if top in sys.modules:
            _known[module] = found
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
