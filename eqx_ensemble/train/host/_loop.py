import dataclasses
import functools as ft
import math
import threading
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..._compiled import key_of
from ..._pytree import PyTree
from ...distributed import broadcast_from_first, to_host
from ...plan import AbstractPlan, Vmap
from ...plan._engine import Cost, Work, cost_of
from .._state import MemberState
from .._status import Status, check_may_train
from ..compiled._chunk import compiled_validation
from ..compiled._health import Carry, Inputs
from ..compiled._program import Program
from ..compiled._select import Occasion
from ..compiled._selection import rescore
from ..data._rows import Slots
from ..data._source import AbstractSource, AbstractWork, Cursor, EpochEnd, Length, Outcome, Setting
from ._active import ActiveMembers, width_for
from ._callbacks import Callbacks, Ending, Saving
from ._record import Record

if TYPE_CHECKING:
    from tqdm.std import tqdm


class Recording:
    """Records the outputs of steps and validations, and shows them in a progress line."""

    def __init__(self, record: Record, line: "tqdm") -> None:
        self.record, self._line = record, line

    def start(self, total: int | None, done: int) -> None:
        """Sets the length and the position of the progress line."""
        self._line.total, self._line.n = total, done

    def add(self, outcome: Outcome, slots: Slots) -> None:
        """Records the outputs of the members in `slots`."""
        for num_steps, windows, scores in outcome.outputs:
            self.record.add_steps(slots.expand(windows), num_steps)
            if scores is not None:
                self.add_scores(scores, slots)

    def add_scores(self, scores: Any, slots: Slots, *, of_all: bool = True) -> None:
        """Records validation scores `(slots,)`, of all members or only of stopped ones."""
        self.record.add_scores(slots.expand(np.asarray(scores)[None])[0], of_all=of_all)

    def report(self, steps: int, members: ActiveMembers) -> None:
        """Advances the progress line by `steps`, if it is shown."""
        if self._line.disable:
            return
        selection, status = members.carry.selection, members.status
        losses, scores = self.record.latest("min" if selection is None else selection.mode)
        shown = {"loss": f"{_mean(losses):.4g}"}
        if scores is not None:
            shown["best validation"] = f"{_mean(scores):.4g}"
        for name, code in (("stopped", Status.STOPPED), ("diverged", Status.DIVERGED)):
            if (status == code).any():
                shown[name] = str(int((status == code).sum()))
        self._line.set_postfix(shown, refresh=False)
        self._line.update(steps)


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")


class Executor:
    """Calls compiled programs.

    **Attributes:**

    - `program`: the program under the plan that `inspect` has chosen; before, under the one that was passed.
    """

    def __init__(self, program: Program, members: ActiveMembers) -> None:
        self.program, self._members, self._given = program, members, program.plan

    @property
    def key(self) -> Hashable:
        """The key of the current program; `None` if it cannot be hashed."""
        return key_of(self.program, self._members.inputs, self._members.carry)

    def call(self, work: AbstractWork) -> tuple[Carry, PyTree]:
        """Runs the work. Returns the carry and the results, which the device may still be computing."""
        return work.compiled((self.program, self._members.inputs, work.batch), self._members.carry)

    def inspect(self, *, data: PyTree = None, steps_inside: bool = False, **work: Any) -> Program:
        """Analyses a step, on the batch `data` if given, to choose the plan. Returns the program under it."""
        program = dataclasses.replace(self.program, plan=Vmap(), layout=None)
        layout, carry, inputs = self.program.layout, self._members.carry, self._members.inputs
        inputs = inputs if data is None else dataclasses.replace(inputs, data=data)
        count = carry.moving.status.shape[0]
        count = count if layout is None else layout.per_device(count)
        if layout is not None:
            work["steps"] = 0
        limits = inputs.limits.steps, inputs.limits.target
        work["stops"] = program.patience is not None or any(x is not None for x in limits)
        work["copied"] = sum(x.nbytes for x in jax.tree.leaves((carry.moving, carry.selection)))
        args = (program, inputs, carry)
        plan = self._given.begin(Work(_step_under, args, count, steps_inside=steps_inside, **work))
        self.program = dataclasses.replace(self.program, plan=plan)
        return self.program

    def cost(self) -> Cost:
        """The cost of one member's step."""
        program = dataclasses.replace(self.program, layout=None)
        leaves, treedef = jax.tree.flatten((program, self._members.inputs, self._members.carry))
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x for x in leaves)
        return _cost_of(shapes, treedef)


def _step_under(plan: AbstractPlan, program: Program, inputs: Inputs, carry: Carry) -> tuple[Carry, PyTree]:
    """One step under another plan than the program's own."""
    return dataclasses.replace(program, plan=plan).step(inputs, carry)


@ft.lru_cache(maxsize=64)
def _cost_of(leaves: tuple, treedef: Any) -> Cost:
    return cost_of(_own_step, *jax.tree.unflatten(treedef, leaves))


def _own_step(_: AbstractPlan, program: Program, *rest: Any) -> tuple[Carry, PyTree]:
    return program.step(*rest)  # under its own plan, on which a step may depend


# Nothing interrupts a chunk: Ctrl-C, time limits, stopped members, progress and checkpoints wait for its end. Short
# chunks would pay for many calls instead, so the length follows from measured times. It is an input of the program:
# another length compiles nothing. The first call of a program is left out, since its compilation would pass for slow
# steps, and chunks grow at most fourfold at once, since a short one is measured badly. Processes of one run must take
# equal chunks, or they would wait for each other forever: all use the times of the first, and none from earlier runs.

_SECONDS_PER_CHUNK = 1.0
_SECONDS_UNTIL_NOTICED = 0.2
_FIRST_STEPS = 32
_MOST_KNOWN = 256
_TAKING_FEWER = 0.05  # of the time to compile, to take members out of the arrays


@dataclasses.dataclass
class _Known:
    """Timings of one program in earlier runs, with all members and with fewer."""

    seconds_per_step: float | None = None  # of all members
    seconds_to_compile: float = 0.0
    widths: set[int] = dataclasses.field(default_factory=set)  # that were compiled


_known: dict[Hashable, _Known] = {}
_LOCK = threading.Lock()


class Pacing:
    """Measures steps, to set the length of chunks and to decide whether fewer members are worth another program.

    **Attributes:**

    - `steps`: the number of steps of the next chunk: about a second, or a fifth of one if members may stop, which is
        checked between chunks.
    """

    def __init__(self, plan: Callable[[], AbstractPlan], *, members_stop: bool = False) -> None:
        self._plan = plan
        self._members_stop = members_stop
        self.steps = _FIRST_STEPS
        self._is_fresh = True  # the next call compiles
        self._known = _Known()
        self._seconds_per_step = 0.0
        self._speedup = 1.0
        self._widest: tuple[int, float] | None = None

    def recall(self, key: Hashable) -> None:
        """Starts at the pace of an earlier run of the same program, if any, instead of growing the chunks."""
        if jax.process_count() > 1 or key is None:
            return
        with _LOCK:
            self._known = known = _known.pop(key, self._known)
            _known[key] = known
            if len(_known) > _MOST_KNOWN:
                del _known[next(iter(_known))]
        if (seconds := known.seconds_per_step) is not None:
            self._is_fresh, self._seconds_per_step = False, seconds
            self.steps = max(int(self._seconds_per_chunk / max(seconds, 1e-6)), 1)

    def measure(self, steps: int, seconds: float, *, width: int) -> None:
        """Records the time of steps of `width` members; the first time of a new program includes its compilation."""
        first, self._is_fresh, seconds = self._is_fresh, False, broadcast_from_first(seconds)
        known = self._known
        if first:
            known.seconds_to_compile = max(known.seconds_to_compile, seconds - steps * self._seconds_per_step)
            known.widths.add(_program_width(self._plan(), width))
        else:
            self._seconds_per_step = seconds / steps
            self._measure_width(width)
        if not first:
            wanted = self._seconds_per_chunk / max(self._seconds_per_step, 1e-6)
            self.steps = int(min(max(wanted, 1), 4 * self.steps))

    @property
    def _seconds_per_chunk(self) -> float:
        return min(_SECONDS_PER_CHUNK, _SECONDS_UNTIL_NOTICED) if self._members_stop else _SECONDS_PER_CHUNK

    def _measure_width(self, width: int) -> None:
        """Estimates how time depends on the number of members, from the widest and the current arrays of this run."""
        if self._widest is None:
            self._widest = (width, self._seconds_per_step)
        widest, seconds = self._widest
        if width == widest:
            self._known.seconds_per_step = self._seconds_per_step
        else:
            gain = math.log(seconds / max(self._seconds_per_step, 1e-9)) / math.log(widest / width)
            self._speedup = float(np.clip(gain, 0, 1))

    def pays(self, width: int, before: int, steps_left: int) -> bool:
        """Whether the time saved by `width` members instead of `before` exceeds the cost of another program."""
        if width == before:
            return False
        seconds_left, known = steps_left * self._seconds_per_step, self._known
        is_compiled = _program_width(self._plan(), width) in known.widths
        cost = known.seconds_to_compile * (_TAKING_FEWER if is_compiled else 1)
        return seconds_left * (1 - (width / before) ** self._speedup) > cost

    def restart(self) -> None:
        """Prepares for another program: the next call compiles, and the plan stays as it is."""
        self._is_fresh = True

    def halve(self, steps: int) -> int:
        """Sets the next chunks to half of `steps`. Returns it."""
        self.steps = steps // 2
        return self.steps


def _program_width(plan: AbstractPlan, width: int) -> int:
    """The number of members for which a program is compiled, if `width` members are in the arrays."""
    return plan.blocks(width).members[0].stop


@dataclasses.dataclass(frozen=True)
class Host:
    """The components of the training loop."""

    executor: Executor
    members: ActiveMembers
    pacing: Pacing
    recording: Recording
    stopping: Ending
    saving: Saving
    callbacks: Callbacks

    def should_stop(self) -> bool:
        """Whether to end the run."""
        return self.stopping.should_stop(self.members, begun=self.recording.record.has_steps)


def run(source: AbstractSource, host: Host, length: Length, cursor: Cursor) -> None:
    """The training loop; `host.members` and `host.recording` hold its results."""
    executor, members, pacing, recording = host.executor, host.members, host.pacing, host.recording
    record = recording.record
    host.stopping.revive(members)  # those that diverged in an earlier run
    source.start(_setting(host, length, cursor))
    recording.start(source.num_steps, record.steps - length.begun)
    pacing.recall(executor.key)
    while not host.should_stop() and (work := source.next(pacing.steps, members.slots)) is not None:
        if isinstance(work, EpochEnd):
            end_epoch(source, host)
            continue
        check_may_train()
        started = time.perf_counter()
        try:
            carry, results = executor.call(work)
            source.prefetch()  # while the device works
            outcome = work.unpack(to_host(results), carry)
        except RuntimeError:
            if not _can_halve(work):
                raise
            source.put_back(work.split(pacing.halve(work.num_steps)))
            continue
        recording.add(outcome, members.slots)
        members.carry = carry
        epoch_ended = source.advance(work, outcome)  # after a divergence, parts of the work come next
        if epoch_ended:  # before members are revived or stopped there, as inside a chunk
            end_epoch(source, host)
        steps_left = None if source.last_step is None else source.last_step - record.steps
        if not outcome.rest:
            seconds, width = time.perf_counter() - started, len(members.slots.index)
            pacing.measure(outcome.num_steps, seconds, width=width)
        if outcome.num_steps > 0:
            recording.report(outcome.num_steps, members)
            host.stopping.handle_stopped(members)  # not before steps that are run again in parts
        host.callbacks.call(members, source)
        host.saving.save(members, source, if_due=True)
        if not host.should_stop():
            drop_inactive(host, steps_left)
    host.saving.save(members, source)
    source.finish(record.steps)
    _validate_last(host)
    host.callbacks.finish(members, source)


def end_epoch(source: AbstractSource, host: Host) -> None:
    """Validates at the end of an epoch, and moves the source to the next one."""
    validate(host.executor.program, host.members, host.recording, Occasion.EPOCH_END)
    source.advance(EpochEnd())


def drop_inactive(host: Host, steps_left: int | None) -> None:
    """Removes members that no longer train from the compiled arrays, if that saves time.

    The remaining length counts up to the steps done so far; if it is unknown, it is assumed to equal them.
    """
    executor, members, pacing, recording = host.executor, host.members, host.pacing, host.recording
    if members.latest.num_training == len(members.slots.index):
        return
    steps = recording.record.steps
    width, before = width_for(members, executor.program.plan), len(members.slots.index)
    if pacing.pays(width, before, steps if steps_left is None else min(steps_left, steps)):
        pacing.restart()
        validate_stopped(executor.program, members, recording)
        members.shrink(width)


def _setting(host: Host, length: Length, cursor: Cursor) -> Setting:
    """The setting of the run, for its source."""
    executor, members = host.executor, host.members
    steps = members.inputs.limits.steps
    limits = np.unique(np.asarray([] if steps is None else to_host(steps), np.int64))
    saved_every = () if host.saving.every is None else (host.saving.every,)
    periods = (*saved_every, *host.callbacks.periods)
    return Setting(
        length, host.recording.record.steps, cursor, periods, limits, host.stopping.seconds_between_looks,
        host.stopping.must_end, executor.program, members.slots, executor.inspect, executor.cost,
    )  # fmt: skip


def _can_halve(work: AbstractWork) -> bool:
    """Whether work that raised can be rerun in halves, so that the run ends just before the failing step."""
    return work.may_raise and work.num_steps > 1 and jax.process_count() == 1


def _validate_last(host: Host) -> None:
    """Validates a run that ends within an epoch: all members that train, or only stopped ones if it ended early."""
    program, members, recording = host.executor.program, host.members, host.recording
    if program.score is None or recording.record.is_validated:
        return
    if host.should_stop():
        validate_stopped(program, members, recording)
    else:
        validate(program, members, recording, Occasion.RUN_END)


def validate(program: Program, members: ActiveMembers, recording: Recording, occasion: Occasion) -> None:
    """Scores members between chunks, if there are validation data."""
    if program.score is None:
        return
    carry, scores = compiled_validation((program, members.inputs, jnp.int32(occasion)), members.carry)
    recording.add_scores(to_host(scores), members.slots, of_all=occasion != Occasion.MEMBERS_STOPPED)
    members.carry = carry


def validate_best(program: Program, members: ActiveMembers) -> None:
    """Scores the best weights of an earlier run again: its validation data or its score may have been others.

    Scores that agree up to rounding are kept, so that a run in two parts equals one.
    """
    carry = members.carry
    moving, selection = carry.moving, carry.selection
    if program.score is None or selection is None or not (to_host(selection.step) >= 0).any():
        return
    stopped = jnp.full_like(moving.status, Status.STOPPED)
    best = MemberState(selection.params, moving.opt_state, selection.model_state, stopped, selection.step, moving.fault)
    unseen = Carry(best, dataclasses.replace(selection, scored=selection.step - 1), carry.step)
    _, scores = compiled_validation((program, members.inputs, jnp.int32(Occasion.MEMBERS_STOPPED)), unseen)
    scores, before, found = to_host((scores, selection.score, selection.step >= 0))
    is_half = any(x.dtype.itemsize < 4 for x in jax.tree.leaves(moving.params))
    # Another program sums in another order: a thousandth is far above that in float32, and far below other data.
    changed = found & ~np.isclose(scores, before, rtol=0.05 if is_half else 1e-3, atol=1e-7, equal_nan=True)
    if changed.any():
        members.carry = dataclasses.replace(carry, selection=rescore(selection, changed, scores))


def validate_stopped(program: Program, members: ActiveMembers, recording: Recording) -> None:
    """Scores members that stopped within an epoch, if the last weights of any are not validated yet."""
    moving, selection = members.carry.moving, members.carry.selection
    if program.score is None or selection is None:
        return
    status, stopped_at, scored = to_host((moving.status, moving.stopped_at, selection.scored))
    if ((status == Status.STOPPED) & (stopped_at != scored)).any():
        validate(program, members, recording, Occasion.MEMBERS_STOPPED)
