"""One pass over an iterable of batches."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from ..._pytree import PyTree
from ..resume._texts import digest_of
from ._check import check_resumable, check_same_batches, explain_state
from ._converter import Converter
from ._cursor import Cursor

_END = object()
_SAVES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))  # of grain, of torch


class BatchIterator:
    """One pass over an iterable of batches; the next batch, `waiting`, can be on the device ahead of time."""

    def __init__(self, batches: Iterable[PyTree], convert: Converter, state: Any = None) -> None:
        self._iterator, self._convert = iter(batches), convert
        self._holder, self._names = _with_state(self._iterator, batches)
        if state is not None:
            check_resumable(able=self._holder is not None)
            with explain_state():
                getattr(self._holder, self._names[1])(copy.deepcopy(state))
            if self._holder is not self._iterator:  # a loader resumes with the next iterator that it makes
                self._iterator = iter(batches)
        self.waiting: PyTree = None
        self._drawn = self._over = False
        self._before: Any = None
        self._error: Exception | None = None

    @property
    def state(self) -> Any:
        """The iterator's state after the last batch taken, or just before its end; `None` without checkpointing.

        It is a copy, because an iterator may return its own live state, which the next batch changes.
        """
        if self._holder is None:
            return None
        return self._before if self._drawn else copy.deepcopy(getattr(self._holder, self._names[0])())

    def peek(self) -> PyTree:
        """The next batch on the device, checked; `None` at the end. Raises the error of drawing it."""
        self.draw()
        if self._error is not None:
            raise self._error
        return self.waiting

    def take(self) -> PyTree:
        """The next batch, which is thereby used."""
        batch = self.peek()
        self.waiting, self._drawn = None, self._over
        return batch

    @property
    def has_drawn(self) -> bool:
        """Whether the next batch is drawn; false after the last one, and if drawing it failed."""
        return self._drawn and not self._over and self._error is None

    @property
    def is_over(self) -> bool:
        """Whether the end was found: the last batch is taken, and drawing another one gave none."""
        return self._over

    def pass_over(self) -> bool:
        """Draws a batch without using it. Returns whether there was one."""
        if self._drawn:
            self.peek()
            self.waiting, self._drawn = None, False
            return not self._over
        return next(self._iterator, _END) is not _END

    def draw(self) -> None:
        """Fetches the next batch, if there is one.

        An error is raised only when the batch is taken, because the step on the previous batch is still running.
        """
        if self._drawn or self._over:
            return
        try:
            self._before, self._drawn = self.state, True
            self.waiting = self._next()
        except Exception as error:
            self._error = error

    def _next(self) -> PyTree:
        batch = next(self._iterator, _END)
        if batch is _END:
            self._over = True
            return None
        return self._convert(batch)


def _with_state(*candidates: Any) -> tuple[Any, tuple[str, str]]:
    """The first candidate that supports checkpointing, with the names of its methods."""
    for candidate in candidates:
        for names in _SAVES:
            if all(callable(getattr(candidate, name, None)) for name in names):
                return candidate, names
    return None, ("", "")


def iterate_from(
    cursor: Cursor, iterate: Callable[..., BatchIterator], first: BatchIterator | None = None
) -> BatchIterator:
    """Batches from the cursor on; without checkpointing, they are drawn again from the beginning.

    `first` is an unused pass.
    """
    if cursor.state is not None:
        iterator = iterate(state=cursor.state)
        if cursor.epochs > 0 and cursor.batches == 0:  # saved after an epoch, whose end is counted
            iterator.draw()
        return iterate() if iterator.is_over else iterator
    iterator = iterate() if first is None else first
    for _ in range(cursor.epochs):
        while iterator.pass_over():
            pass
        iterator = iterate()
    for _ in range(cursor.batches - 1):
        iterator.pass_over()
    if cursor.batches > 0:
        check_same_batches(digest_of(iterator.take()), cursor.digest)
    return iterator
