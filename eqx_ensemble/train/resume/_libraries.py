"""Which modules belong to installed libraries, whose code is compared by version."""

import functools as ft
import sys
from pathlib import PurePath
from typing import Any

from ...checkpoint._snapshot import versions

_FOLDERS = {"site-packages", "dist-packages"}
_OWN = __name__.partition(".")[0]


def is_standard(module: str) -> bool:
    """Whether a module is part of Python."""
    return _top(module) in sys.stdlib_module_names


def is_library(module: str) -> bool:
    """Whether a module is part of Python, of this library or of an installed one; other modules may be edited."""
    return is_standard(module) or _top(module) == _OWN or _is_third_party(_top(module))


def library_text(module: str) -> str:
    """The version of an installed library, unless it is one whose version is a condition of every run."""
    top = _top(module)
    if is_standard(module) or top in versions() or top == _OWN:
        return ""
    version: Any = getattr(sys.modules.get(top), "__version__", "")
    return str(version)


def _top(module: str) -> str:
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
