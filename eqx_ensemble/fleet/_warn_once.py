import re
from collections.abc import Iterable

from .._warnings import warn

_DIVERGED = re.compile(r"member\(s\) diverged")


class WarnOnce:
    """Warns of what workers were warned of, once; of members that diverged the caller does, of all in one."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, texts: Iterable[str]) -> None:
        for text in texts:
            if text not in self._told and not _DIVERGED.search(text):
                self._told.add(text)
                warn(text)
