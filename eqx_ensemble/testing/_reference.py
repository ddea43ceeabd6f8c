import functools
from typing import Any

import numpy as np

from .._pytree import PyTree
from ._alone import Alone
from ._report import Check, distances, same, unlike

_REPEATS = 3
_MARGIN = 10  # one rounding may move training further than the largest of a few others
_CHAOS = 1e-2  # the relative effect of rounding on losses above which they are inconclusive


class Reference:
    """Every member trained alone, and the effect of rounding on each."""

    def __init__(self, members: list[Alone], batches: list) -> None:
        self._members, self._batches = members, batches
        self._expected = self._train_alone(None)

    def _train_alone(self, nudge: int | None) -> dict[str, PyTree]:
        trained = [member.train(self._batches, nudge=nudge) for member in self._members]
        return {"model": [one.model for one in trained], "losses": [one.losses for one in trained]}

    @functools.cached_property
    def _rounding_effects(self) -> dict[str, dict[str, float]]:
        """The effect of rounding on training alone, for every leaf of models and losses.

        A weight whose true gradient is zero (a bias in front of a normalisation, the bias of the keys of an attention)
        has rounding noise as its gradient, which Adam scales up to steps of full length. A line search may accept
        another point. No other training can be closer than these repetitions.
        """
        found: dict[str, dict[str, float]] = {part: {} for part in self._expected}
        for nudge in range(_REPEATS):
            for part, tree in self._train_alone(nudge).items():
                for path, distance in distances(tree, self._expected[part]).items():
                    found[part][path] = float(np.maximum(found[part].get(path, 0.0), distance))  # NaN stays
        return found

    def check(self, name: str, run: Any, rtol: float) -> Check:
        """Checks that the members of a run equal those trained alone."""
        models = run.ensemble.unstack()
        check = same(name, models, self._expected["model"], rtol)
        if check.problem is None or unlike(models, self._expected["model"]):
            return check
        again = same(name, self._train_alone(None), self._expected, rtol)
        if again.problem is not None:
            return Check(
                name,
                f"training alone is not the same twice, {again.problem}: does the loss draw without its key?",
            )
        largest = max(self._rounding_effects["losses"].values())
        if not largest <= _CHAOS:
            text = f"{check.problem}; this is inconclusive, because rounding alone changes the losses by {largest:.2g}"
            return Check(name, f"{text}: take fewer steps, or a larger `eps` of the optimiser")
        losses = list(np.asarray(run.history.loss))
        check = same(name, models, self._expected["model"], rtol, slack=self._slack("model"))
        if check.problem is not None:
            return check
        return same(name, losses, self._expected["losses"], rtol, slack=self._slack("losses"), noun="the losses ")

    def _slack(self, part: str) -> dict[str, float]:
        return {path: _MARGIN * moved for path, moved in self._rounding_effects[part].items()}
