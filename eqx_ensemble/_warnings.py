import contextlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_PASSED_OVER = {"eqx_ensemble", "equinox", "jax", "jaxtyping"}  # what users' calls go through on their way here


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user's code that led here: that of the innermost frame outside of this library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        frame = frame.f_back
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


@contextlib.contextmanager
def ignore_warnings(message: str = "") -> Iterator[None]:
    """Ignores the warnings of this thread whose text begins as the regular expression `message` says.

    `warnings.catch_warnings` replaces the filters of all threads, and two that overlap in time leave those of the one
    for good. Here each thread adds a filter of its own and removes it.
    """
    if getattr(sys.flags, "context_aware_warnings", False):  # of Python 3.14, where filters belong to a thread
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=message)
            yield
        return
    own = _OwnWarnings(message)
    entry: Any = ("ignore", own, Warning, None, 0)
    filters: Any = warnings.filters  # a list, which another thread may replace meanwhile
    filters.insert(0, entry)
    try:
        yield
    finally:
        own.active = False
        filters = warnings.filters
        with contextlib.suppress(ValueError):
            filters.remove(entry)


class _OwnWarnings:
    """What a filter matches texts with, in place of a regular expression: only those of the thread that made it."""

    def __init__(self, message: str) -> None:
        self.active = True
        self._pattern, self._thread = re.compile(message, re.IGNORECASE), threading.get_ident()

    def match(self, text: str) -> bool:
        """Whether the text is of a warning to ignore."""
        return self.active and threading.get_ident() == self._thread and self._pattern.match(text) is not None
