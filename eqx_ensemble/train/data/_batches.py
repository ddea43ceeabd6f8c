import functools as ft
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from typing import final

import jax
import numpy as np

from ..._pytree import PyTree
from ..._warnings import warn
from ...sharding._layout import Layout
from ..compiled._carry import Carry
from ..compiled._stepwise import run_batches
from ..resume._code_texts import digest_of
from ._check import check_last_step, check_not_exceeded, check_some_batches, idle_patience_message, many_shapes_message
from ._cursor import Cursor
from ._data import member_shapes
from ._iterator import BatchIterator, Converter, iterate_from
from ._read_ahead import ReadAhead
from ._rows import Slots
from ._source import NOTHING, AbstractSource, AbstractWork, EpochEnd, Outcome, Outputs, Setting

_MANY_SHAPES = 8
_MOST_BYTES = 2**25  # of the batches of a piece of work, all of which are kept until its end


@final
class BatchWork(AbstractWork):
    """Steps on consecutive batches, each a compiled call; the host inspects their results after the last one.

    They end after `most` steps or `seconds`, or earlier if `must_end()`. `taken` holds their batches, `states` the
    states of the iterator after all but the last one. `error` is an error of a later step: the steps before it count.
    """

    compiled = staticmethod(run_batches)

    def __init__(
        self,
        first: PyTree,
        iterator: BatchIterator | ReadAhead,
        own: Callable[[PyTree], PyTree],
        *,
        most: int,
        seconds: float,
        must_end: Callable[[], bool],
    ) -> None:
        self.taken, self.states = [first], []
        self.error: Exception | None = None
        self._iterator, self._own = iterator, own
        self._most, self._end, self._must_end = most, time.perf_counter() + seconds, must_end

    @property
    def batch(self) -> "BatchWork":
        """The work itself; an attribute would be a cycle of references, which would keep its batches."""
        return self

    @property
    def num_steps(self) -> int:
        """The number of drawn batches."""
        return len(self.taken)

    def __iter__(self) -> Iterator[PyTree]:
        """Yields the batches of the active members. The next one is drawn on demand, while the device works."""
        yield from map(self._own, self.taken)
        while self._draw():
            self.states.append(self._iterator.state)
            self.taken.append(self._iterator.take())
            yield self._own(self.taken[-1])

    def _draw(self) -> bool:
        """Draws another batch, unless it is time to inspect the results. Returns whether there is one."""
        if len(self.taken) >= self._most or time.perf_counter() >= self._end:
            return False
        self._iterator.draw()
        return self._iterator.has_drawn and not self._must_end()

    def unpack(self, results: PyTree, carry: Carry) -> Outcome:
        """The outputs of the steps; their program has already reverted the members that diverged."""
        num_steps, outputs = results
        num_steps = int(num_steps)
        return Outcome([Outputs(num_steps, jax.tree.map(lambda *xs: np.stack(xs), *outputs))], num_steps)


def begin_work(
    first: PyTree,
    iterator: BatchIterator | ReadAhead,
    own: Callable[[PyTree], PyTree],
    setting: Setting,
    *,
    steps: int,
    step: int,
    final: int | None,
) -> BatchWork:
    """Work of about `steps` steps from `step` on, before `final`; one step if each is to be inspected."""
    # The maximum number of steps between two inspections of their results.
    most = [steps if setting.seconds > 0 else 1, _MOST_BYTES // max(sum(x.nbytes for x in jax.tree.leaves(first)), 1)]
    most += [period - step % period for period in setting.periods]
    most += [] if final is None else [final - step]
    options = {"seconds": setting.seconds, "must_end": setting.must_end}
    return BatchWork(first, iterator, own, most=max(min(most), 1), **options)


@final
class IterableSource(AbstractSource):
    """An iterable of batches, iterated once per epoch; the next batch is fetched while the device works."""

    def __init__(self, batches: Iterable[PyTree], num_members: int, layout: Layout | None) -> None:
        self._convert = convert = Converter(num_members, layout)
        self.fault = lambda: convert.fault
        self._iterate = ft.partial(BatchIterator, batches, self._convert)
        self._per_epoch = operator.length_hint(batches, -1)
        self._first: BatchIterator | None = None

    @property
    def fingerprint(self) -> dict[str, str]:
        """Empty: the batches of an iterable are not known in advance."""
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
        # The previous run may have counted an epoch whose end it did not see.
        self._may_be_empty = self.cursor.state is not None
        self._go_on: Callable[[], BatchIterator] | None
        self._go_on = ft.partial(iterate_from, self.cursor, self._iterate, self._first)
        self._inspect, self._iterator, self._first = setting.inspect, None, None
        self._work, self._last = None, None
        self._setting = setting
        self._final = min([x for x in (self.last_step, *setting.limits[-1:].tolist()) if x is not None], default=None)
        self._warned = False

    def next(self, steps: int, slots: Slots) -> BatchWork | EpochEnd | None:
        """The next batches: about `steps` of them, or one if each is to be inspected."""
        if self._work is not None and self._work.error is not None:
            raise self._work.error
        if _is_epoch_over(self):
            return EpochEnd()
        if self.cursor.epochs == self._epochs or self._step == self.last_step:
            return None
        if self._iterator is None:
            iterate, self._go_on = self._go_on or self._iterate, None
            self._iterator = iterate()
        first = self._iterator.take()
        if first is None:
            if not self._may_be_empty:
                check_some_batches(self.cursor.batches, self.cursor.epochs, name="fit")
            return EpochEnd()
        if self._inspect is not None:
            self._inspect(data=slots.own(first))
            self._inspect = None
        self._work = begin_work(
            first, self._iterator, slots.own, self._setting, steps=steps, step=self._step, final=self._final
        )
        return self._work

    def prefetch(self) -> None:
        """Fetches the next batch, if there is to be one."""
        if self._iterator is not None and self._work is not None:
            if self._step + self._work.num_steps != self.last_step:
                self._iterator.draw()

    def advance(self, work: AbstractWork | EpochEnd, outcome: Outcome = NOTHING) -> bool:
        """Moves the cursor past the batches, or to the next epoch."""
        state = None if self._iterator is None else self._iterator.state
        if not isinstance(work, BatchWork):
            epochs = self.cursor.epochs + int(self.cursor.batches > 0 or not self._may_be_empty)
            self.cursor = Cursor(epochs, 0, state)
            self._iterator, self._may_be_empty = None, False
            return False
        if not self._warned and len(self._convert.shapes) >= _MANY_SHAPES:
            self._warned = True
            warn(many_shapes_message([*self._convert.shapes][:_MANY_SHAPES]))
        count = outcome.num_steps
        if count < work.num_steps:  # the run ends here
            state = work.states[count - 1]
        self._step += count
        self.cursor, self._last = Cursor(self.cursor.epochs, self.cursor.batches + count, state), work.taken[count - 1]
        return count == work.num_steps and _is_epoch_over(self)

    def bookmark(self) -> Cursor:
        """The cursor, with the last batch's digest if the iterator does not support checkpointing."""
        cursor = self.cursor
        if cursor.batches == 0 or cursor.state is not None:
            return cursor
        return cursor._replace(digest=digest_of(self._last))

    def finish(self, step: int) -> None:
        """Warns if patience had no effect, because no epoch ended."""
        if self.cursor.epochs == 0 and self._patience is not None and step == self.last_step:
            warn(idle_patience_message())


def _is_epoch_over(source: IterableSource) -> bool:
    """Whether no batch of the epoch is left, as far as that is known without drawing one beyond the last step."""
    if source._step == source.last_step and source.cursor.batches == source._per_epoch:
        return True
    return source.cursor.batches > 0 and source._iterator is not None and source._iterator.is_over
