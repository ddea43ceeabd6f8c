from typing import Any, final

import jax
import jax.numpy as jnp

from ..._pytree import PyTree
from ..resume._texts import array_text, array_texts
from ._batches import BatchWork, begin_work
from ._check import check_last_step, check_not_exceeded, check_patience_length
from ._data import member_shapes
from ._read_ahead import ReadAhead
from ._reading import Reading
from ._rows import Order
from ._slots import Slots
from ._source import NOTHING, AbstractSource, AbstractWork, EpochEnd, Outcome, Setting
from ._step_rows import StepRows


@final
class ReaderSource(AbstractSource):
    """Data that a [`RowReader`][eqx_ensemble.train.RowReader] reads, in the row order of data in memory.

    `own` are the members' own rows, on the host, and `kind` is the `order` of `fit`.
    """

    def __init__(self, reading: Reading, rows: StepRows, *, own: Any, kind: Order, num_rows: int, threads: int) -> None:
        self.rows = own
        self.fault = lambda: reading.fault
        self._reading, self._order, self._kind = reading, rows.order, kind
        self._num_rows, self._threads, self.epoch = num_rows, threads, rows.order.epoch
        self._ahead: ReadAhead | None = None

    @property
    def fingerprint(self) -> dict[str, str]:
        """Some rows of the data, the row order and the batch size."""
        order = {
            "order": self._kind,
            "rows": "None" if self.rows is None else array_text(self.rows),
            "batch_size": str(self._order.batch_size),
            "number of rows": str(self._num_rows),
        }
        return array_texts(self._reading.probe(), "data") | order

    def shapes(self) -> PyTree:
        """The shapes of a batch as one member sees it."""
        return member_shapes(jax.tree.map(jnp.asarray, self._reading.probe()), rows=self._order.batch_size)

    def start(self, setting: Setting) -> None:
        """Begins at the setting's step; the cursor counts the ends of epochs since the run began."""
        begun, epochs, steps = setting.length
        self.num_steps = int(steps or 0) if epochs is None else epochs * self._order.epoch
        self.last_step = begun + self.num_steps
        check_patience_length(setting.program.patience, self.num_steps, self._order.epoch, begun, name="fit")
        check_not_exceeded(setting.step, self.last_step, "steps")
        check_last_step(self.last_step, name="fit")
        self.cursor, self._step, self._setting, self._slots = setting.cursor, setting.step, setting, setting.slots
        self._begun_epoch, self._is_inspected = begun // self._order.epoch, False
        self._final = min([self.last_step, *setting.limits[-1:].tolist()])
        self._work: BatchWork | None = None

    def next(self, steps: int, slots: Slots) -> BatchWork | EpochEnd | None:
        """The next batches of an epoch: about `steps` of them, or one if each is to be inspected."""
        if self._work is not None and self._work.error is not None:
            raise self._work.error
        done = self._step % self._order.epoch
        if _is_epoch_over(self):
            return EpochEnd()
        if self._step == self.last_step:
            return None
        ahead = self._reads(slots)
        first = ahead.take()
        if not self._is_inspected:
            self._setting.inspect(data=first)
            self._is_inspected = True
        final = min(self._final, self._step + self._order.epoch - done)
        self._work = begin_work(
            first, ahead, lambda batch: batch, self._setting, steps=steps, step=self._step, final=final
        )
        return self._work

    def _reads(self, slots: Slots) -> ReadAhead:
        """The reads for the members in the slots."""
        if self._ahead is None:
            self._ahead = ReadAhead(
                lambda step: self._reading.begin(step, self._slots),
                lambda batch, step: self._reading.place(batch, step, self._slots),
                first=self._step, last=self._final, threads=self._threads,
            )  # fmt: skip
        if slots is not self._slots:
            self._slots = slots
            self._ahead.restart(self._step)
        return self._ahead

    def prefetch(self) -> None:
        """Does nothing: threads read already."""

    def advance(self, work: AbstractWork | EpochEnd, outcome: Outcome = NOTHING) -> bool:
        """Counts the steps, or the end of an epoch."""
        self._step += outcome.num_steps
        if isinstance(work, EpochEnd):
            self.cursor = self.cursor._replace(epochs=self.cursor.epochs + 1)
        return _is_epoch_over(self)

    def finish(self, step: int) -> None:
        """Ends the threads."""
        if self._ahead is not None:
            self._ahead.close()


def _is_epoch_over(source: ReaderSource) -> bool:
    """Whether the steps done complete an epoch that the cursor does not count yet."""
    return source.cursor.epochs < source._step // source._order.epoch - source._begun_epoch
