"""The host's part of a run: calls of compiled programs, and what happens between them, at ends of epochs."""

import contextlib
import functools as ft
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._data import batches_of
from .._pytree import PyTree
from ..distributed import broadcast_from_first, to_host
from ._blocks import Block, Crew, begin_part, end_block, step_block, train_block
from ._history import History, join_in_time
from ._member import Clock, Curves, Task
from ._options import Every
from ._state import Pieces, Status, TrainState

_LONGEST_CALL = 0.2  # seconds; then callbacks, limits of time and Ctrl-C are looked at


class Position(NamedTuple):
    """Where a run is: its state, its curves, the steps and epochs of this call that are done, and the time before."""

    state: TrainState
    history: History
    done: int
    epoch: int
    seconds: float


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Within it, the first Ctrl-C only sets an event, the next one raises: between a call and the assignment of its
    result an error would lose weights. Another handler, and other threads than the main one, are left alone.
    """
    came = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield came
        return

    def handle(number: int, frame: Any) -> None:
        if came.is_set():
            signal.default_int_handler(number, frame)
        came.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Loop:
    """A run as it goes on.

    **Attributes:**

    - `done`, `end`: the steps of this call of `fit` that are done, and all of them; `epoch`: the epochs that are.
    - `history`: the curves so far, in pieces.
    - `fatal`: the members `(members,)` that end the run if they diverge.
    """

    def __init__(
        self, crew: Crew, task: Task, position: "Position", *, first: int, end: int, callbacks: list[Every],
        seconds: Any, began: float, fatal: np.ndarray, saver: Any, line: Any, in_epochs: bool,
        interrupt: threading.Event,
    ) -> None:  # fmt: skip
        self.crew, self.task, self.first, self.end, self.interrupt = crew, task, first, end, interrupt
        self.history, self.done, self.epoch = [position.history], position.done, position.epoch
        self.callbacks, self.fatal, self.saver, self.line = callbacks, fatal, saver, line
        self.in_epochs, self.best = in_epochs, np.nan
        self.seconds, self.began, self.seconds_before = seconds, began, position.seconds

    @property
    def faulty(self) -> bool:
        """Whether a member diverged that ends the run."""
        return bool((self.fatal & (self.crew.status == Status.DIVERGED)).any())

    def seconds_so_far(self) -> float:
        """The time since the call, and that before it was resumed."""
        return time.perf_counter() - self.began + self.seconds_before

    # Data in arrays.

    def train_on_arrays(self) -> None:
        """Trains until the end of the run, in calls of so many parts that one takes a fifth of a second."""
        crew, task, parts = self.crew, self.task, 1
        while self.goes_on():
            schedule = self._schedule(parts)
            began = time.perf_counter()
            clock = Clock(np.int32(self.done), np.int32(self.end), np.int32(len(schedule)))
            results = crew.call(ft.partial(train_one_block, task, crew, clock), crew.blocks)
            crew.update([out[:2] for out in results])
            curves = [curves for *_, curves in results]
            # Parts in which no member trained are not of the run: how many there are depends on time.
            schedule = schedule[: int(np.any([to_host(one.trains).any(axis=0) for one in curves], axis=0).sum())]
            self._record(curves, schedule)
            self.done += sum(count for count, _ in schedule)
            self.epoch += sum(ends for _, ends in schedule)
            took = broadcast_from_first(time.perf_counter() - began)
            parts = max(min(int(parts * _LONGEST_CALL / took), 8 * parts, task.room), 1)
            self._between(ends=schedule[-1][1])

    def _schedule(self, most: int) -> list[tuple[int, bool]]:
        """The steps of the next parts, and whether each ends an epoch; up to the next turn of a callback."""
        parts, done, epoch = [], self.done, self.epoch
        while len(parts) < most and done < self.end:
            count, ends = (x.item() for x in Clock(0, self.end, 0).part(self.task, np.int64(done), np))
            parts.append((count, ends))
            done, epoch = done + count, epoch + ends
            if ends and self._is_due(epoch):
                break
        return parts

    def _record(self, curves: list[Curves], schedule: list[tuple[int, bool]]) -> None:
        """Adds the curves of the blocks' members; NaN, or zero for integers, for members in no block."""
        task, counts = self.task, [count for count, _ in schedule]
        ends = np.cumsum(counts)

        def of_all(*blocks: Any) -> np.ndarray:
            rows = [np.asarray(to_host(x)) for x in blocks]
            if task.per_step:
                rows = [np.concatenate([x[:, i, :n] for i, n in enumerate(counts)], axis=1) for x in rows]
            else:
                rows = [x[:, : len(counts)] for x in rows]
            return self._put(rows)

        loss = of_all(*(one.loss for one in curves))
        aux = jax.tree.map(of_all, *(one.aux for one in curves))
        step = self.first + self.done + (np.arange(1, ends[-1] + 1) if task.per_step else ends)
        validates = [i for i, (_, end) in enumerate(schedule) if end]
        scores, score_step = None, np.zeros(0, np.int64)
        if task.score is not None:
            scores = self._put([np.asarray(to_host(one.score))[:, validates] for one in curves])
            score_step = self.first + self.done + ends[validates]
        self.history.append(History(loss, aux, scores, step, score_step))

    def _put(self, blocks: list[np.ndarray]) -> np.ndarray:
        """Blocks' rows in the order of members."""
        shape, dtype = blocks[0].shape[1:], blocks[0].dtype
        out = np.full((self.crew.num_members, *shape), _blank(dtype), dtype)
        for block, rows in zip(self.crew.blocks, blocks, strict=True):
            out[block.members] = rows[: len(block.members)]
        return out

    # Batches of an iterable.

    def train_on_batches(self, data: Iterator[Iterable[Any]], skip: int, passes: int | None) -> None:
        """Trains on batches; each pass in `data` is an epoch. The first `skip` batches were seen before."""
        crew, number = self.crew, 0
        while (passes is None or number < passes) and self.goes_on():
            part, is_empty = None, True
            for batch in batches_of(next(data), crew.num_members):
                is_empty = False
                if skip:
                    skip -= 1
                    continue
                if part is not None and part.count == self.task.part:  # only now it is known to be not the last
                    self._end(part, ends=False)
                    part = None
                    if not self.goes_on():
                        return
                part = Part(crew, self.task) if part is None else part
                part.step(batch)
                if self.done + part.count == self.end or self.interrupt.is_set():
                    break
            if part is not None:
                self._end(part, ends=self.done + part.count == self.end or not self.interrupt.is_set())
            if is_empty:
                raise ValueError(f"`fit` got no batch in pass {number} over its data: does it give them only once?")
            number += 1

    def _end(self, part: "Part", *, ends: bool) -> None:
        """Ends a part: members keep what it gave them or not, and its curves are recorded."""
        crew, task, count = self.crew, self.task, part.count
        trained = crew.status == Status.OK
        outputs = part.end(ends=ends)  # which changes the status
        loss, aux = jax.tree.map(lambda *xs: self._put([*xs]), *outputs)
        if not task.per_step:
            loss, aux = loss.mean(axis=1, keepdims=True), jax.tree.map(lambda x: x[:, -1:], aux)
        blank = lambda x: np.where(trained.reshape(-1, *[1] * (x.ndim - 1)), x, _blank(x.dtype)).astype(x.dtype)
        loss, aux = jax.tree.map(blank, (loss, aux))
        now = self.first + self.done + np.arange(1, count + 1)
        scores, score_step = None, np.zeros(0, np.int64)
        if task.score is not None:
            score = self._put([np.asarray(to_host(block.moving.score)) for block in crew.blocks])
            score = np.where(crew.status == Status.DIVERGED, np.nan, score).astype(score.dtype)
            scores = blank(score)[:, None] if ends else np.zeros((len(score), 0), score.dtype)
            score_step = now[-1:] if ends else score_step
        self.history.append(History(loss, aux, scores, now if task.per_step else now[-1:], score_step))
        self.done += count
        self.epoch += ends
        self._between(ends=ends)

    # Between calls.

    def goes_on(self) -> bool:
        """Whether there is more to train."""
        return self.done < self.end and not self.interrupt.is_set() and not self.faulty and self.crew.trains

    def _is_due(self, epoch: int) -> bool:
        save = self.saver is not None and self.saver.is_due_at(epoch)
        return save or any(epoch % one.epochs == 0 for one in self.callbacks)

    def _between(self, *, ends: bool) -> None:
        crew = self.crew
        self._show()
        if self.faulty:
            return
        if self.seconds is not None:
            over = self.seconds.value <= broadcast_from_first(self.seconds_so_far())
            if (over & (crew.status == Status.OK)).any():
                crew.load(crew.state().stop(over))
        at_end = self.done == self.end or not crew.trains
        is_due = lambda one: one.at_end if at_end else ends and self.epoch % one.epochs == 0
        due = [one for one in self.callbacks if is_due(one)]
        if due:
            state = crew.state()
            for one in due:
                changed = one.callback(state)
                if changed is not None:
                    state = check_changed(changed, state, one.callback)
                    crew.load(state)
        if self.saver is not None:
            self.saver.offer(self, ends=ends)
        crew.pack()

    def _show(self) -> None:
        """Moves the progress line: epochs or steps, members that train, and their best score or their mean loss."""
        if self.line.disable:
            return
        last, said = self.history[-1], f"{(self.crew.status == Status.OK).sum()} training"
        known = last.loss[np.isfinite(last.loss)]
        if last.validation is not None:
            pick = np.fmin if self.task.mode == "min" else np.fmax
            self.best = float(pick.reduce(last.validation, axis=None, initial=self.best))
            said += f", best {self.best:.4g}"
        elif known.size:
            said += f", loss {known.mean():.4g}"
        is_long = self.in_epochs and self.task.num_rows and self.done % self.task.epoch
        self.line.n = round(self.done / self.task.epoch, 1) if is_long else self.epoch if self.in_epochs else self.done
        self.line.set_postfix_str(said + self.line.note, refresh=False)
        self.line.update(0)

    def curves(self) -> History:
        """The curves so far."""
        self.history = [join_in_time(self.history)]
        return self.history[0]


def train_one_block(task: Task, crew: Crew, clock: Clock, block: Block) -> tuple:
    """The call of the program for one block."""
    return train_block((task, crew.rest, block.inputs, clock), block.moving, crew.common)


class Part:
    """The steps of all blocks on batches of an iterable, from the start of an epoch, or of a part of a long one."""

    def __init__(self, crew: Crew, task: Task) -> None:
        self.crew, self.task = crew, task
        self.pieces = [Pieces(block.moving, crew.common, crew.rest) for block in crew.blocks]
        self.now = crew.call(lambda one: begin_part(one), self.pieces)
        self.outputs: list[list[Any]] = []  # of every step, of every block

    @property
    def count(self) -> int:
        """The steps so far."""
        return len(self.outputs)

    def step(self, batch: PyTree) -> None:
        """One step of all blocks."""
        index, blocks, batch = np.int32(self.count), self.crew.blocks, self.crew.on_mesh(batch)
        call = lambda i: step_block((self.task, self.pieces[i], blocks[i].cut(batch), index), self.now[i])
        out = self.crew.call(call, range(len(blocks)))
        self.now = [now for now, _ in out]
        self.outputs.append([values for _, values in out])

    def end(self, *, ends: bool) -> list[Any]:
        """Updates the crew. Returns the losses and auxiliary outputs of every block, `(members, steps, ...)`."""
        on_host = lambda *xs: np.stack([np.asarray(to_host(x)) for x in xs], axis=1)
        outputs = [jax.tree.map(on_host, *steps) for steps in zip(*self.outputs, strict=True)]
        blocks, count = self.crew.blocks, self.count
        room = [np.pad(loss, [(0, 0), (0, self.task.part - count)]).astype(float) for loss, _ in outputs]
        read = lambda i: (self.task, self.pieces[i], blocks[i].inputs, np.int32(count), np.bool_(ends))
        self.crew.update(self.crew.call(lambda i: end_block(read(i), self.now[i], room[i]), range(len(blocks))))
        return outputs


def _blank(dtype: Any) -> Any:
    """What fills the curves of members that do not train."""
    return np.nan if jnp.issubdtype(dtype, jnp.inexact) else 0


def check_changed(changed: Any, state: TrainState, callback: Callable[..., Any]) -> TrainState:
    """Raises unless a callback has returned a training state of the same members."""
    name = getattr(callback, "__name__", type(callback).__name__)
    if not isinstance(changed, TrainState):
        raise TypeError(
            f"A callback of `fit` returns a `TrainState`, or `None` to go on; `{name}` returned "
            f"`{type(changed).__name__}`.\nTo stop members: `return state.stop(mask)`."
        )
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree) if eqx.is_array(x)]
    if shapes(changed) != shapes(state):
        raise ValueError(
            f"A callback of `fit` returns a state of the same shapes and dtypes; that of `{name}` differs."
        )
    return changed
