import functools
from typing import Any

import numpy as np
from jaxtyping import PyTree

from ._alone import Alone
from ._report import Check, distances, same, unlike

_REPEATS = 3
_MARGIN = 10  # one rounding may move training further than the largest of a few others
_CHAOS = 1e-2  # losses that a rounding moves further than this part of them decide nothing


class Reference:
    """Every member trained alone, and how far each is moved by rounding."""

    def __init__(self, members: list[Alone], batches: list):
        self._members, self._batches = members, batches
        self._expected = self._trained(None)

    def _trained(self, nudge: int | None) -> dict[str, PyTree]:
        trained = [member.train(self._batches, nudge=nudge) for member in self._members]
        return {"model": [one.model for one in trained], "losses": [one.losses for one in trained]}

    @functools.cached_property
    def _moved(self) -> dict[str, dict[str, float]]:
        """For models and losses, and every leaf: how far training alone is moved by rounding.

        A weight whose true gradient is zero (a bias in front of a normalisation, the bias of the keys of an attention)
        has rounding noise for a gradient, which Adam scales up to steps of full length. A line search may accept
        another point. Nothing that is trained with others can be nearer to training alone than that is to itself.
        """
        found: dict[str, dict[str, float]] = {part: {} for part in self._expected}
        for nudge in range(_REPEATS):
            for part, tree in self._trained(nudge).items():
                for path, distance in distances(tree, self._expected[part]).items():
                    found[part][path] = float(np.maximum(found[part].get(path, 0.0), distance))  # NaN stays
        return found

    def check(self, name: str, run: Any, rtol: float) -> Check:
        """The members of a run are what training each alone gives."""
        models = run.ensemble.unstack()
        check = same(name, models, self._expected["model"], rtol)
        if check.problem is None or unlike(models, self._expected["model"]):
            return check
        again = same(name, self._trained(None), self._expected, rtol)
        if again.problem is not None:
            return Check(
                name, f"training alone is not the same twice, {again.problem}: does the loss draw without its key?"
            )
        largest = max(self._moved["losses"].values())
        if not largest <= _CHAOS:
            told = f"{check.problem}; nothing can be told, because rounding alone moves the losses by {largest:.2g}"
            return Check(name, f"{told}: take fewer steps, or a larger `eps` of the optimiser")
        losses = list(np.asarray(run.history.loss))
        check = same(name, models, self._expected["model"], rtol, slack=self._slack("model"))
        if check.problem is not None:
            return check
        return same(name, losses, self._expected["losses"], rtol, slack=self._slack("losses"), noun="the losses ")

    def _slack(self, part: str) -> dict[str, float]:
        return {path: _MARGIN * moved for path, moved in self._moved[part].items()}
