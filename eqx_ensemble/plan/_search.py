import dataclasses
import functools as ft
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._axes import is_array
from ._memory import Cost, Peak, cost_of, free_bytes
from ._plans import AbstractPlan, Chunked, Sequential, Unrolled, Vmap, Work

_BUSY_FLOPS = 4e6  # above this one member's step saturates a core, measured for dense models; see `benchmarks/`
_MOST_UNROLLED = 64


def candidates(cost: Cost, num_members: int, *, steps_inside: bool, scan: bool | None = None) -> list[AbstractPlan]:
    """The suitable plans for a program, the most promising first.

    `steps_inside` and `scan` are those of [`Work`][eqx_ensemble.plan._plans.Work].
    """
    if num_members == 1:
        return [Vmap()]
    on_cpu = jax.default_backend() == "cpu"
    chunks = Chunked(math.ceil(math.sqrt(num_members)))
    if cost.convolutions:
        unrolled: list[AbstractPlan] = [Unrolled()] if num_members <= _MOST_UNROLLED else []
        if not on_cpu:
            return [Vmap(), *unrolled, chunks]
        # `Sequential` is a compiled loop, where convolutions are slow, except in `fit`.
        return [Sequential(), Vmap(), *unrolled] if steps_inside and scan is not True else [Vmap(), *unrolled]
    if not on_cpu:
        return [Vmap(), chunks, Sequential()]
    busy = cost.flops > _BUSY_FLOPS or cost.batched_products > 0
    return [Sequential(), Vmap(), chunks] if busy and steps_inside else [Vmap(), Sequential(), chunks]


def cost_of_work(work: Work) -> Cost:
    """The cost of a unit of the work for one member, analysed once per program."""
    leaves, treedef = jax.tree.flatten(work.args)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x for x in leaves)
    return _known_cost(work.fn, shapes, treedef)


@ft.lru_cache(maxsize=128)
def _known_cost(fn: Callable[..., Any], leaves: tuple, treedef: Any) -> Cost:
    return cost_of(fn, *jax.tree.unflatten(treedef, leaves))


@dataclasses.dataclass
class Trial:
    """The measurements of a plan for a program: times in seconds, and the additional peak memory in bytes."""

    plan: AbstractPlan
    first_call: float | None = None
    first_units: int = 0
    per_unit: float | None = None
    rounds: int = 0
    peak: int | None = None
    refused: str = ""

    @property
    def compiling(self) -> float | None:
        """The seconds of the first call that were not spent on its work; `None` before that call."""
        if self.first_call is None:
            return None
        return max(0.0, self.first_call - self.first_units * (self.per_unit or 0.0))


@dataclasses.dataclass
class SearchCache:
    """The measurements of a program, cached for the process's lifetime. A `budget` is in bytes; `None` is no limit."""

    cost: Cost
    num_members: int
    trials: list[Trial]
    unit: str

    def trial(self, plan: AbstractPlan) -> Trial:
        """The trial of a plan, added if there is none."""
        for trial in self.trials:
            if trial.plan == plan:
                return trial
        self.trials.append(Trial(plan))
        return self.trials[-1]

    def best(self, budget: int | None) -> Trial | None:
        """The fastest plan within the budget, or of all if none is; `None` before any was timed."""
        known = [t for t in self.trials if t.per_unit is not None and not t.refused]
        fitting = [t for t in known if t.peak is None or budget is None or t.peak <= budget]
        return min(fitting or known, key=lambda t: t.per_unit or 0.0, default=None)

    def first(self, budget: int | None) -> Trial:
        """The trial to begin with."""
        best = self.best(budget)
        if best is not None:
            return best
        if budget is None or self.cost.bytes * self.num_members <= budget:
            return next(trial for trial in self.trials if not trial.refused)
        # The memory of larger plans is extrapolated from that of one member at a time.
        return self.trial(Sequential())

    def expected_peak(self, plan: AbstractPlan) -> int | None:
        """The peak memory that a plan is expected to need, in proportion to its members at a time."""
        width = lambda plan: plan.width(self.num_members)
        known = {width(t.plan): t.peak for t in self.trials if t.peak is not None}
        if not known:
            return None
        nearest = max((w for w in known if w <= width(plan)), default=min(known))
        return int(known[nearest] * width(plan) / nearest)

    def exceeds(self, plan: AbstractPlan, budget: int | None) -> bool:
        """Whether a plan is expected to need more than the budget."""
        expected = self.expected_peak(plan)
        return expected is not None and budget is not None and expected > budget

    def seconds_to_compile(self, trial: Trial) -> float:
        """The expected compile time of a plan; 0 if it has been compiled."""
        if trial.first_call is not None:
            return 0.0
        times = lambda plan: plan.compile_time(self.num_members)
        known = [t.compiling for t in self.trials if t.compiling is not None and times(t.plan) == 1]
        return max(known, default=0.0) * times(trial.plan)


_CACHES: OrderedDict[Any, SearchCache] = OrderedDict()
_MOST_CACHES = 128


def cache_of(key: Any, work: Work, plans: Sequence[AbstractPlan]) -> SearchCache:
    """The cache of a program, created if there is none, to try these plans."""
    if key not in _CACHES:
        _CACHES[key] = SearchCache(cost_of_work(work), work.num_members, [Trial(plan) for plan in plans], work.unit)
        while len(_CACHES) > _MOST_CACHES:
            _CACHES.popitem(last=False)
    _CACHES.move_to_end(key)
    return _CACHES[key]


_ENOUGH_CALLS, _ENOUGH_SECONDS = 3, 0.2
_SECONDS_PER_CALL = 0.1  # of a trial, at least
_PLENTY_OF_SECONDS = 0.6  # one call of this length is enough
_SURELY_COMPILED_BEFORE = 0.5  # of the time that a unit of the very first call took
_ROUNDS = 2  # because a shared machine may be slow just while one plan is tried
_SLOWER = 2.0  # than the best plan, for a plan that was never timed
_SAFETY = 0.9  # of the free memory


class Search:
    """Chooses a plan during the work: every trial is a stretch of the work itself.

    Read `plan` before each stretch, and pass its time to `note` afterwards. A plan is tried if its compilation and a
    stretch at half the speed of the best plan would take at most `max_overhead` of the total time, and if its memory is
    expected to stay within the budget.

    **Attributes:**

    - `watching`: whether the next stretch is part of a trial, so that its time and memory are measured.
    - `spent`: the seconds that trials took in addition to the work itself.
    - `budget`: the bytes that a plan may need; `None` for no limit.
    """

    watching: bool

    def __init__(self, cache: SearchCache, *, max_overhead: float, memory: int | None) -> None:
        self.cache, self.max_overhead = cache, max_overhead
        free = free_bytes() if memory is None else None
        self.budget = memory if free is None else int(_SAFETY * free)
        self.spent = 0.0
        self._start = time.perf_counter()
        self._compiled_here: set[AbstractPlan] = set()
        self._trial = cache.first(self.budget)
        self._calls, self._seconds = 0, 0.0
        self.watching = self._trial.rounds == 0

    @property
    def plan(self) -> AbstractPlan:
        """The plan for the next stretch."""
        return self._trial.plan

    @property
    def risky(self) -> bool:
        """Whether the current plan has never run for this program, so that it may run out of memory."""
        return self._trial.first_call is None

    @property
    def seconds(self) -> float:
        """The time since the search began."""
        return time.perf_counter() - self._start

    def note(self, units: int, seconds: float, peak: Peak | None, *, seconds_left: float | None) -> bool:
        """Records a stretch of `units`, and chooses the plan of the next. Returns whether that is another plan.

        `seconds_left` is the time that the rest is expected to take under the current plan, if known.
        """
        trial, before = self._trial, self.plan
        if trial.plan not in self._compiled_here:
            self._compiled_here.add(trial.plan)
            if trial.first_call is None:
                trial.first_call, trial.first_units = seconds, units
            first = trial.first_call / trial.first_units
            if seconds / units > _SURELY_COMPILED_BEFORE * first:
                if len(self._compiled_here) > 1:
                    self._add_overhead(units, seconds)
                return False
        if peak is not None and peak.bytes is not None:
            trial.peak = max(trial.peak or 0, peak.bytes)
        if self.watching:
            self._add_overhead(units, seconds)
            now = seconds / units
            trial.per_unit = now if trial.per_unit is None else min(trial.per_unit, now)
            self._calls, self._seconds = self._calls + 1, self._seconds + seconds
            enough = self._calls >= _ENOUGH_CALLS and self._seconds >= _ENOUGH_SECONDS
            if not enough and self._seconds < _PLENTY_OF_SECONDS:
                return False
            trial.rounds += 1
        upcoming = self._next(seconds_left, per_unit=seconds / units)
        self.watching = upcoming is not None
        self._calls, self._seconds = 0, 0.0
        self._trial = upcoming or self.cache.best(self.budget) or trial
        return self.plan != before

    def out_of_memory(self) -> AbstractPlan | None:
        """Records that the current plan ran out of memory. Returns the plan to continue with, if one is left."""
        self._trial.refused = "ran out of memory"
        plan = self.plan.smaller(self.cache.num_members)
        while plan is not None and self.cache.trial(plan).refused:
            plan = plan.smaller(self.cache.num_members)
        if plan is not None:
            self._trial, self.watching = self.cache.trial(plan), True
        return plan

    def _add_overhead(self, units: int, seconds: float) -> None:
        best = self.cache.best(self.budget)
        if best is not None and best is not self._trial:
            self.spent += max(0.0, seconds - units * (best.per_unit or 0.0))

    def _next(self, seconds_left: float | None, *, per_unit: float) -> Trial | None:
        """The next trial for which time and memory suffice; `None` if nothing is left to measure.

        `seconds_left` is the remaining time at `per_unit` seconds per unit.
        """
        cache = self.cache
        possible = [trial for trial in cache.trials if not trial.refused and not cache.exceeds(trial.plan, self.budget)]
        best = cache.best(self.budget)
        fastest = 0.0 if best is None else best.per_unit or 0.0
        left = (seconds_left or 0.0) * (min(fastest / max(per_unit, 1e-12), 1.0) if fastest else 1.0)
        room = self.max_overhead * (self.seconds + left) - self.spent
        lost = _seconds_lost(fastest, _SLOWER, first=True)
        for trial in possible:
            if trial.rounds == 0 and cache.seconds_to_compile(trial) + lost < room:
                return trial
        again = [trial for trial in possible if trial.rounds]
        for trial in again if fastest and len(again) > 1 else ():
            if trial.rounds < _ROUNDS and _seconds_lost(fastest, (trial.per_unit or 0.0) / fastest, first=False) < room:
                return trial
        return None


def _seconds_lost(fastest: float, slower: float, *, first: bool) -> float:
    """The time lost in a trial of a plan `slower` times as slow as the best, which takes `fastest` for a unit."""
    call = max(slower * fastest, _SECONDS_PER_CALL)
    trial = min(max(_ENOUGH_CALLS * call, _ENOUGH_SECONDS), max(_PLENTY_OF_SECONDS, call))
    return (trial + first * call) * (1 - 1 / slower) if fastest else 0.0
