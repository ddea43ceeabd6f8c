import time

from ._memory import Peak, free_bytes
from ._plans import AbstractPlan
from ._trials import SearchCache, Trial

_ENOUGH_CALLS, _ENOUGH_SECONDS = 3, 0.2
_PLENTY_OF_SECONDS = 0.6  # one call of this length is enough
_SURELY_COMPILED_BEFORE = 0.5  # of the time that a unit of the very first call took
_ROUNDS = 2  # because a shared machine may be slow just while one plan is tried
_SAFETY = 0.9  # of the free memory


class Search:
    """Chooses a plan while the work goes on: every trial is a stretch of the work itself.

    Read `plan` before each stretch, and pass its time to `note` afterwards. A plan is tried if its compilation is
    expected to take at most `max_overhead` of the whole time, and if its memory is expected to stay within the budget.

    **Attributes:**

    - `watching`: whether the next stretch is part of a trial, so that its time and memory are measured.
    - `spent`: the seconds that trials took in addition to the work itself.
    - `budget`: the bytes that a plan may need; `None` for no limit.
    """

    watching: bool

    def __init__(self, cache: SearchCache, *, max_overhead: float, memory: int | None):
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
        """Whether the present plan has never run for this program, so that it may run out of memory."""
        return self._trial.first_call is None

    @property
    def seconds(self) -> float:
        """The time since the search began."""
        return time.perf_counter() - self._start

    def note(self, units: int, seconds: float, peak: Peak | None, *, seconds_left: float | None) -> bool:
        """Records a stretch of `units`, and chooses the plan of the next. Returns whether that is another plan.

        `seconds_left` is how long the rest is expected to take under the present plan, if known.
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
        upcoming = self._next(seconds_left)
        self.watching = upcoming is not None
        self._calls, self._seconds = 0, 0.0
        self._trial = upcoming or self.cache.best(self.budget) or trial
        return self.plan != before

    def out_of_memory(self) -> AbstractPlan | None:
        """Records that the present plan ran out of memory. Returns the plan to continue with, if one is left."""
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

    def _next(self, seconds_left: float | None) -> Trial | None:
        """The next trial for which there is time and memory; `None` when nothing is left to measure."""
        cache = self.cache
        room = self.max_overhead * (self.seconds + (seconds_left or 0.0)) - self.spent
        possible = [trial for trial in cache.trials if not trial.refused and not cache.exceeds(trial.plan, self.budget)]
        for trial in possible:
            if trial.rounds == 0 and cache.seconds_to_compile(trial) < room:
                return trial
        best = cache.best(self.budget)
        again = [trial for trial in possible if trial.rounds]
        for trial in again if best is not None and len(again) > 1 else ():
            slower = (trial.per_unit or 0.0) / ((best and best.per_unit) or 1.0)
            if trial.rounds < _ROUNDS and _ENOUGH_SECONDS * (slower - 1) < room:
                return trial
        return None
