import re
from collections.abc import Iterable

from .._warnings import warn

_DIVERGED = re.compile(r"member\(s\) diverged")


class WarnOnce:
    """Repeats each warning of the workers once, without those about divergence, which the caller combines."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, texts: Iterable[str]) -> None:
        for text in texts:
            if text not in self._seen and not _DIVERGED.search(text):
                self._seen.add(text)
                warn(text)
