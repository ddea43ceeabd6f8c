import functools as ft
import warnings
from collections.abc import Callable, Iterable
from typing import Any, final

import jax
from jaxtyping import PyTree

from ...sharding._layout import Layout
from ..compiled._carry import Carry
from ..compiled._chunk import compiled_batch
from ..resume._texts import digest_of
from ._check import check_last_step, check_not_exceeded, check_some_batches, idle_patience_message, many_shapes_message
from ._cursor import Cursor
from ._data import member_shapes
from ._iterator import BatchIterator, iterate_from
from ._slots import Slots
from ._source import NOTHING, AbstractSource, AbstractWork, EpochEnd, Outcome, Outputs, Setting

_MANY_SHAPES = 8


@final
class BatchWork(AbstractWork):
    """One step on a batch."""

    num_steps = 1
    compiled = staticmethod(compiled_batch)

    def __init__(self, batch: PyTree):
        self.batch = batch

    def unpack(self, results: PyTree, carry: Carry) -> Outcome:
        """The outputs of one step, whose program has reverted the members that diverged."""
        return Outcome([Outputs(jax.tree.map(lambda x: x[None], results))], 1)


@final
class IterableSource(AbstractSource):
    """An iterable of batches, iterated once an epoch, the next batch being fetched while the device works."""

    def __init__(self, batches: Iterable[PyTree], num_members: int, layout: Layout | None):
        self._iterate = ft.partial(BatchIterator, batches, num_members, layout)
        self._first: BatchIterator | None = None

    @property
    def fingerprint(self) -> dict[str, str]:
        """Nothing: what an iterable will give is not known."""
        return {}

    def shapes(self) -> PyTree:
        """The shapes of the first batch as one member sees it."""
        self._first = self._iterate()
        first = self._first.peek()
        check_some_batches(int(first is not None), 0, name="fit")
        return member_shapes(first)

    def start(self, setting: Setting) -> None:
        """Begins, or resumes at the cursor with the first call of `next`."""
        begun, self._epochs, self.num_steps = setting.length
        self.last_step = None if self.num_steps is None else begun + self.num_steps
        check_not_exceeded(setting.step, self.last_step, "steps")
        check_last_step(self.last_step, name="fit")
        check_not_exceeded(setting.cursor.epochs, self._epochs, "epochs")
        self.cursor, self._step, self._patience = setting.cursor, setting.step, setting.program.patience
        # The run before may have counted an epoch whose end it did not see.
        self._may_be_empty = self.cursor.state is not None
        self._go_on: Callable[[], BatchIterator] | None
        self._go_on = ft.partial(iterate_from, self.cursor, self._iterate, self._first)
        self._inspect, self._iterator, self._first = setting.inspect, None, None
        self._taken = self._batch = None
        self._seen: set[Any] = set()

    def next(self, steps: int, slots: Slots) -> BatchWork | EpochEnd | None:
        """The next batch, on the device."""
        if self.cursor.epochs == self._epochs or self._step == self.last_step:
            return None
        if self._iterator is None:
            iterate, self._go_on = self._go_on or self._iterate, None
            self._iterator = iterate()
        self._taken = self._iterator.take()
        if self._taken is None:
            if not self._may_be_empty:
                check_some_batches(self.cursor.batches, self.cursor.epochs, name="fit")
            return EpochEnd()
        _warn_of_many_shapes(self._taken, self._seen)
        batch = slots.own(self._taken)
        if self._inspect is not None:
            self._inspect(data=batch)
            self._inspect = None
        return BatchWork(batch)

    def prefetch(self) -> None:
        """Fetches the next batch, if there is to be one."""
        if self._iterator is not None and self._step + 1 != self.last_step:
            self._iterator.draw()

    def advance(self, work: AbstractWork | EpochEnd, outcome: Outcome = NOTHING) -> None:
        """Moves the cursor past the batch, or to the next epoch."""
        state = None if self._iterator is None else self._iterator.state
        if isinstance(work, EpochEnd):
            epochs = self.cursor.epochs + int(self.cursor.batches > 0 or not self._may_be_empty)
            self.cursor = Cursor(epochs, 0, state)
            self._iterator, self._may_be_empty = None, False
        else:
            self._step, self._batch = self._step + 1, self._taken
            self.cursor = Cursor(self.cursor.epochs, self.cursor.batches + 1, state)

    def bookmark(self) -> Cursor:
        """The cursor, with the last batch's digest where the iterator does not support checkpointing."""
        cursor = self.cursor
        if cursor.batches == 0 or cursor.state is not None:
            return cursor
        return cursor._replace(digest=digest_of(self._batch))

    def finish(self, step: int) -> None:
        """Warns where patience never acted, because no epoch ended."""
        if self.cursor.epochs == 0 and self._patience is not None and step == self.last_step:
            warnings.warn(idle_patience_message(), stacklevel=5)


def _warn_of_many_shapes(batch: PyTree, seen: set[Any]) -> None:
    shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(batch))
    before = len(seen)
    seen.add(shapes)
    if before < len(seen) == _MANY_SHAPES:
        warnings.warn(many_shapes_message(seen), stacklevel=6)
