import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ._candidates import candidates
from ._cost import Cost
from ._memory import Peak, free_bytes
from ._plans import AbstractPlan, Sequential, Work

_ENOUGH_CALLS, _ENOUGH_SECONDS = 3, 0.2
_PLENTY_OF_SECONDS = 0.6  # for one call to tell
_SURELY_COMPILED_BEFORE = 0.5  # of the time that a unit of the very first call took
_ROUNDS = 2  # because a shared machine may be slow just while one plan is tried
_SAFETY = 0.9  # of the memory that there is
_SEEN_BYTES = 2**25  # a process keeps smaller blocks for its next call, so that they do not show


@dataclasses.dataclass
class Trial:
    """What is known of a plan for a program: times in seconds, and the peak of memory on top of what was in use."""

    plan: AbstractPlan
    first_call: float | None = None
    first_units: int = 0
    per_unit: float | None = None
    rounds: int = 0
    peak: int | None = None
    refused: str = ""

    @property
    def compiling(self) -> float | None:
        """Seconds of the first call that were not spent on its work; `None` before there was one."""
        if self.first_call is None:
            return None
        return max(0.0, self.first_call - self.first_units * (self.per_unit or 0.0))


@dataclasses.dataclass
class SearchCache:
    """What has been found out about a program, kept for the process's life."""

    cost: Cost
    num_members: int
    trials: list[Trial]
    unit: str


_CACHES: OrderedDict[Any, SearchCache] = OrderedDict()
_MOST_CACHES = 128


def cache_of(key: Any, cost: Callable[[], Cost], work: Work) -> SearchCache:
    """The cache of a program, made if there is none."""
    if key not in _CACHES:
        found, num_members = cost(), work.num_members
        plans = candidates(found, num_members, steps_inside=work.steps_inside, scan=work.scan)
        _CACHES[key] = SearchCache(found, num_members, [Trial(plan) for plan in plans], work.unit)
        while len(_CACHES) > _MOST_CACHES:
            _CACHES.popitem(last=False)
    _CACHES.move_to_end(key)
    return _CACHES[key]


class Search:
    """Chooses a plan while the work goes on: every trial is a stretch of the work itself.

    Ask for `plan` before each stretch, and say with `note` how long it took. A plan is tried when the time of its
    compilation is expected to lie within `max_overhead` of the whole time, and when its memory is within the budget.

    **Attributes:**

    - `watching`: whether the next stretch is part of a trial, whose time and memory matter.
    """

    watching: bool

    def __init__(self, cache: SearchCache, *, max_overhead: float, memory: int | None):
        self.cache = cache
        self._max_overhead = max_overhead
        free = free_bytes() if memory is None else None
        self._budget = memory if free is None else int(_SAFETY * free)
        self._start = time.perf_counter()
        self.spent = 0.0
        self._compiled_here: set[AbstractPlan] = set()
        self._trial = self._first()
        self._calls, self._seconds = 0, 0.0
        self.watching = self._trial.rounds == 0

    @property
    def plan(self) -> AbstractPlan:
        """The plan for the next stretch."""
        return self._trial.plan

    @property
    def untested(self) -> bool:
        """Whether the present plan has not run here yet, so that the next stretch may be the compiler's."""
        return self.plan not in self._compiled_here

    @property
    def risky(self) -> bool:
        """Whether the present plan never ran for this program, so that nobody knows whether its memory is there."""
        return self._trial.first_call is None

    @property
    def seconds(self) -> float:
        """The time since the search began."""
        return time.perf_counter() - self._start

    def note(self, units: int, seconds: float, peak: Peak | None, *, seconds_left: float | None) -> bool:
        """Notes a stretch of `units`, and chooses the plan of the next. Returns whether that is another plan.

        `seconds_left` is how long the rest is expected to take under the present plan, if known.
        """
        trial, before = self._trial, self.plan
        if self.untested:
            self._compiled_here.add(trial.plan)
            if trial.first_call is None:
                trial.first_call, trial.first_units = seconds, units
            first = trial.first_call / trial.first_units
            if seconds / units > _SURELY_COMPILED_BEFORE * first:
                if len(self._compiled_here) > 1:
                    self._lost(units, seconds)
                return False
        if peak is not None and peak.bytes is not None:
            trial.peak = max(trial.peak or 0, peak.bytes)
        if self.watching:
            self._lost(units, seconds)
            now = seconds / units
            trial.per_unit = now if trial.per_unit is None else min(trial.per_unit, now)
            self._calls, self._seconds = self._calls + 1, self._seconds + seconds
            enough = self._calls >= _ENOUGH_CALLS and self._seconds >= _ENOUGH_SECONDS
            if not enough and self._seconds < _PLENTY_OF_SECONDS:
                return False
            trial.rounds += 1
        upcoming = self._next(seconds_left)
        self.watching = upcoming is not None
        self._calls, self._seconds = 0, 0.0
        self._trial = upcoming or self._best() or trial
        return self.plan != before

    def _lost(self, units: int, seconds: float) -> None:
        best = self._best()
        if best is not None and best is not self._trial:
            self.spent += max(0.0, seconds - units * (best.per_unit or 0.0))

    def out_of_memory(self) -> AbstractPlan | None:
        """Takes note that the present plan found too little memory. Returns the plan to go on with, if there is one."""
        self._trial.refused = "ran out of memory"
        plan = self.plan.smaller(self.cache.num_members)
        while plan is not None and self._trial_of(plan).refused:
            plan = plan.smaller(self.cache.num_members)
        if plan is not None:
            self._trial, self.watching = self._trial_of(plan), True
        return plan

    def _trial_of(self, plan: AbstractPlan) -> Trial:
        for trial in self.cache.trials:
            if trial.plan == plan:
                return trial
        self.cache.trials.append(Trial(plan))
        return self.cache.trials[-1]

    def _first(self) -> Trial:
        best = self._best()
        if best is not None:
            return best
        most = self.cache.cost.bytes * self.cache.num_members
        if self._budget is None or most <= self._budget:
            return next(trial for trial in self.cache.trials if not trial.refused)
        # From one member at a time, the memory of larger plans can be foretold.
        return self._trial_of(Sequential())

    def _best(self) -> Trial | None:
        known = [t for t in self.cache.trials if t.per_unit is not None and not t.refused]
        fitting = [t for t in known if t.peak is None or self._budget is None or t.peak <= self._budget]
        return min(fitting or known, key=lambda t: t.per_unit or 0.0, default=None)

    def _next(self, seconds_left: float | None) -> Trial | None:
        """The next trial that there is time and memory for; `None` when all is known that can be."""
        room = self._max_overhead * (self.seconds + (seconds_left or 0.0)) - self.spent
        for trial in self.cache.trials:
            if trial.rounds == 0 and not self._refused(trial) and self._seconds_to_compile(trial) < room:
                return trial
        best = self._best()
        tried = [trial for trial in self.cache.trials if trial.rounds and not self._refused(trial)]
        for trial in tried if best is not None and len(tried) > 1 else ():
            slower = (trial.per_unit or 0.0) / ((best and best.per_unit) or 1.0)
            if trial.rounds < _ROUNDS and _ENOUGH_SECONDS * (slower - 1) < room:
                return trial
        return None

    def _refused(self, trial: Trial) -> bool:
        return bool(trial.refused) or self._too_big(trial)

    def _seconds_to_compile(self, trial: Trial) -> float:
        if trial.first_call is not None:
            return 0.0
        times = lambda plan: plan.compile_time(self.cache.num_members)
        known = [t.compiling for t in self.cache.trials if t.compiling is not None and times(t.plan) == 1]
        return max(known, default=0.0) * times(trial.plan)

    def _too_big(self, trial: Trial) -> bool:
        expected = self.expected_peak(trial.plan)
        return expected is not None and self._budget is not None and expected > self._budget

    def expected_peak(self, plan: AbstractPlan) -> int | None:
        """The peak memory that a plan is expected to need: in proportion to the members that it takes at a time."""
        width = lambda plan: plan.width(self.cache.num_members)
        known = {width(t.plan): t.peak for t in self.cache.trials if t.peak is not None}
        if not known:
            return None
        nearest = max((w for w in known if w <= width(plan)), default=min(known))
        return int(known[nearest] * width(plan) / nearest)

    def reason(self, trial: Trial) -> str:
        """Why a plan was not tried, in words."""
        if trial.refused:
            return trial.refused
        if self._too_big(trial):
            expected = (self.expected_peak(trial.plan) or 0) / 2**20
            return f"not tried: expected to need {expected:.0f} MiB of a budget of {(self._budget or 0) / 2**20:.0f}"
        seconds = self._seconds_to_compile(trial)
        most = f"{self._max_overhead:.0%} of the time"
        return f"not tried: compiling it was expected to take {seconds:.1f} s, more than {most}"


def search_table(search: Search) -> str:
    """What a search has found, in words and numbers."""
    cache = search.cache
    lines = []
    best = min((t.per_unit for t in cache.trials if t.per_unit is not None), default=None)
    for trial in sorted(cache.trials, key=lambda t: (t.per_unit is None, t.per_unit or 0.0)):
        cells = [f"  {trial.plan!r:14}"]
        if trial.per_unit is not None and best is not None:
            cells.append(f"{trial.per_unit * 1e3:.3g} ms a {cache.unit} ({trial.per_unit / best:.2f}x)")
            cells.append(f"compiled in {trial.compiling or 0:.1f} s")
            if trial.peak is not None and trial.peak > _SEEN_BYTES:
                cells.append(f"at most {trial.peak / 2**20:.0f} MiB more than before")
        if trial.per_unit is None and trial.first_call is not None and not trial.refused:
            cells.append("too few calls to tell its speed")
        elif trial.per_unit is None or trial.refused:
            cells.append(search.reason(trial))
        if trial.plan == search.plan:
            cells.append("<- in use")
        lines.append("  ".join(cells))
    return "\n".join(lines)
