import contextlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_PASSED_OVER = {"eqx_ensemble", "equinox", "jax", "jaxtyping"}  # packages between the user's code and `warn`


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of user code that led here, outside of this library, Equinox, JAX and jaxtyping."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        frame = frame.f_back
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


@contextlib.contextmanager
def ignore_warnings(message: str = "") -> Iterator[None]:
    """Ignores the warnings of this thread whose text starts with a match of the regular expression `message`.

    `warnings.catch_warnings` replaces the filters of all threads, and two that overlap in time leave those of one in
    place. Here each thread adds and removes its own filter.
    """
    if getattr(sys.flags, "context_aware_warnings", False):  # of Python 3.14, where filters belong to a thread
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=message)
            yield
        return
    with _own_filter(_OwnWarnings(message)):
        yield


@contextlib.contextmanager
def _own_filter(own: "_OwnWarnings") -> Iterator[None]:
    entry: Any = ("ignore", own, Warning, None, 0)
    filters: Any = warnings.filters  # a list, which another thread may replace meanwhile
    filters.insert(0, entry)
    try:
        yield
    finally:
        own.active = False
        filters = warnings.filters
        for old in list(filters):  # also those that `warnings.catch_warnings` in another thread has put back
            if isinstance(old[1], _OwnWarnings) and not old[1].active:
                with contextlib.suppress(ValueError):
                    filters.remove(old)


class _OwnWarnings:
    """Replaces the regular expression of a filter; matches only warnings of the thread that made it."""

    def __init__(self, message: str) -> None:
        self.active = True
        self._pattern, self._thread = re.compile(message, re.IGNORECASE), threading.get_ident()

    def match(self, text: str) -> bool:
        """Whether to ignore a warning with this text."""
        return self.active and threading.get_ident() == self._thread and self._pattern.match(text) is not None
