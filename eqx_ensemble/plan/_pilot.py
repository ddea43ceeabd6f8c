import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from .. import _axes
from .._check import is_typed_key
from .._pytree import PyTree
from .._warnings import warn
from ._check import out_of_memory_message, smaller_plan_message
from ._memory import Peak, is_out_of_memory, peak
from ._plans import AbstractPlan, Work
from ._search import Search


class Pilot:
    """Runs stretches of work under a plan; with `plan="auto"`, changes the plan between them.

    **Attributes:**

    - `plan`: the plan of the next stretch; before `look`, the plan that was passed.
    """

    def __init__(self, plan: AbstractPlan, *, name: str) -> None:
        self.plan: AbstractPlan = plan
        self._search: Search | None = None
        self._name = name
        self._peak: Peak | None = None

    @property
    def watching(self) -> bool:
        """Whether the next stretch is a trial of a plan."""
        return self._search is not None and self._search.watching

    @property
    def is_trial(self) -> bool:
        """Whether the next stretch is a trial, or may run out of memory."""
        return self._search is not None and (self._search.watching or self._search.risky)

    def look(self, fn: Callable[..., Any], *args: PyTree, **work: Any) -> None:
        """Chooses the plan of `fn(plan, *args)`, one unit of the work, if the plan searches."""
        self.plan, search = self.plan.begin(Work(self._name, fn, args, **work))
        self._search = search or self._search

    def call(self, stretch: Callable[[AbstractPlan, Any], Any], carry: Any) -> Any:
        """Calls `stretch(plan, carry)`, which may donate `carry`.

        The first call under a plan may run out of memory. It is then repeated under a smaller plan, with a copy of the
        carry on the host, because a donated carry is deleted.
        """
        if self._search is None or not self.is_trial:
            return stretch(self.plan, carry)
        while True:
            kept = _on_host(carry) if self._search.risky else None
            try:
                with peak() as self._peak:
                    return jax.block_until_ready(stretch(self.plan, carry))
            except jax.errors.JaxRuntimeError as error:
                less = self._search.out_of_memory() if is_out_of_memory(error) and kept is not None else None
                if less is None:
                    raise
                warn(smaller_plan_message(repr(self.plan), repr(less), name=self._name))
                self.plan, carry = less, jax.device_put(kept)

    def note(self, units: int, seconds: float, *, seconds_left: float | None) -> bool:
        """Records the time of the last stretch. Returns whether the next one runs under another plan."""
        if self._search is None:
            return False
        changed = self._search.note(units, seconds, self._peak, seconds_left=seconds_left)
        self._peak, self.plan = None, self._search.plan
        return changed

    def settle(self) -> None:
        """Ends the search with the current plan."""
        self._search = None


@contextlib.contextmanager
def explain_memory(pilot: Pilot, num_members: int, *, name: str) -> Iterator[None]:
    """Raises a `MemoryError` that names a smaller plan when a compiled program runs out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        less = pilot.plan.smaller(num_members)
        tried, next_one = repr(pilot.plan), None if less is None else repr(less)
        raise MemoryError(out_of_memory_message(num_members, tried, next_one, str(error), name=name)) from error


def _on_host(tree: PyTree) -> PyTree:
    copy = lambda x: x.copy() if is_typed_key(x) else np.array(x) if _axes.is_array(x) else x
    return jax.tree.map(copy, tree)
