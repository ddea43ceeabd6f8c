import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ._candidates import candidates
from ._cost import Cost
from ._plans import AbstractPlan, Sequential, Work


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


def cache_of(key: Any, cost: Callable[[], Cost], work: Work) -> SearchCache:
    """The cache of a program, created if there is none."""
    if key not in _CACHES:
        found, num_members = cost(), work.num_members
        plans = candidates(found, num_members, steps_inside=work.steps_inside, scan=work.scan)
        _CACHES[key] = SearchCache(found, num_members, [Trial(plan) for plan in plans], work.unit)
        while len(_CACHES) > _MOST_CACHES:
            _CACHES.popitem(last=False)
    _CACHES.move_to_end(key)
    return _CACHES[key]
