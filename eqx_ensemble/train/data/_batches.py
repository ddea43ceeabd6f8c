import copy
import functools as ft
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from ... import _axes
from ..._axes import is_finite, not_finite_text
from ..._foreign import from_foreign, own_array
from ..._pytree import PyTree
from ..._sharding import Layout
from ..._warnings import warn
from .._texts import digest_of
from ..compiled._health import Carry
from ..compiled._stepwise import run_batches
from ._check import (
    check_last_step,
    check_not_exceeded,
    check_some_batches,
    explain_state,
    idle_patience_message,
    many_shapes_message,
)
from ._read_ahead import ReadAhead
from ._rows import Slots
from ._source import (
    NOTHING,
    AbstractSource,
    AbstractWork,
    Cursor,
    EpochEnd,
    Outcome,
    Outputs,
    Setting,
    member_shapes,
    on_device,
)

# One pass over an iterable of batches.


class Converter:
    """Checks batches, and puts them on the device.

    Checks that depend only on shapes are made once per shape. NumPy arrays are copied, because an iterator may
    overwrite its own; later ones are transferred to the device on first use.

    **Attributes:**

    - `shapes`: those of all batches so far, each with its dtypes.
    - `fault`: the first array of a batch that was not finite, in words.
    """

    def __init__(self, num_members: int, layout: Layout | None) -> None:
        self._num_members, self._layout = num_members, layout
        self.shapes: dict[Any, None] = {}  # in their order
        self.fault, self._count = "", 0
        self._known: set[Any] = set()

    def __call__(self, batch: PyTree) -> PyTree:
        """The batch, on the device or transferred on first use."""
        leaves, treedef = jax.tree.flatten(batch)
        leaves = [own_array(_as_numpy(x)) for x in leaves]
        key = (treedef, *((type(x), x.shape, x.dtype) if _axes.is_array(x) else None for x in leaves))
        batch = jax.tree.unflatten(treedef, leaves)
        self._count += 1
        if key in self._known:
            if not self.fault and not all(map(_is_finite, leaves)):
                self._note(batch)
            return batch
        converted, _ = on_device(batch, self._num_members, argument="batch", layout=self._layout)
        self.shapes[tuple((x.shape, x.dtype) for x in jax.tree.leaves(converted))] = None
        if self._layout is None and jax.tree.structure(converted) == treedef and all(map(_is_simple, leaves)):
            self._known.add(key)
        if not self.fault:
            self._note(converted)
        return converted

    def _note(self, batch: PyTree) -> None:
        text = not_finite_text(batch, argument="batch")
        self.fault = text and f"in batch {self._count} of this run, {text}"


def _as_numpy(x: Any) -> Any:
    """Data frames, and arrays of other frameworks, such as the tensors of a torch loader, as NumPy arrays."""
    x = from_foreign(x, "batch")
    return np.asarray(x) if not _axes.is_array(x) and hasattr(x, "__dlpack__") else x


def _is_simple(x: Any) -> bool:
    """Whether the checks of shape and finiteness suffice: 64-bit integers may be too large."""
    if isinstance(x, jax.Array):
        return True
    return type(x) is np.ndarray and (x.dtype.kind in "bf" or (x.dtype.kind in "iu" and x.dtype.itemsize < 8))


def _is_finite(x: Any) -> bool:
    if isinstance(x, jax.Array):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return True
        if x.dtype != np.float32 or not x.is_fully_addressable or any(d.platform != "cpu" for d in x.devices()):
            return is_finite(x)
        x = np.asarray(x)
    if x.dtype.kind != "f":
        return True
    with np.errstate(all="ignore"):  # the sum may overflow; then the elements are checked
        return bool(np.isfinite(np.add.reduce(x, axis=None)))


_END = object()
_SAVES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))  # of grain, of torch


class BatchIterator:
    """One pass over an iterable of batches; the next batch, `waiting`, can be on the device ahead of time."""

    def __init__(self, batches: Iterable[PyTree], convert: Converter, state: Any = None) -> None:
        self._iterator, self._convert = iter(batches), convert
        self._holder, self._names = _with_state(self._iterator, batches)
        if state is not None:
            if self._holder is None:
                raise TypeError(
                    "`fit` continues a run that stopped within an epoch of an iterator with `set_state` or "
                    "`load_state_dict`, which these batches lack.\nPass an iterator of the same kind; or continue "
                    "from `run.train_state`, which starts an epoch."
                )
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
        if digest_of(iterator.take()) != cursor.digest:
            raise ValueError(
                "`fit` cannot resume: the iterable gives other batches than it gave before the interruption.\nSeed it "
                "in each process, or give it `get_state` and `set_state` to support checkpointing."
            )
    return iterator


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
        check_some_batches(int(first is not None), 0)
        return member_shapes(first)

    def start(self, setting: Setting) -> None:
        """Begins, or resumes at the cursor with the first call of `next`."""
        begun, self._epochs, self.num_steps = setting.length
        self.last_step = None if self.num_steps is None else begun + self.num_steps
        check_not_exceeded(setting.step, self.last_step, "steps")
        check_last_step(self.last_step)
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
                check_some_batches(self.cursor.batches, self.cursor.epochs)
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
