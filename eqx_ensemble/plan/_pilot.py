import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .. import _axes, _check
from ._auto import Auto, search_for, suggested
from ._candidates import smaller
from ._memory import Peak, is_out_of_memory, peak
from ._plans import AbstractPlan, in_words
from ._search import Search


class Pilot:
    """Runs stretches of work under a plan; with `plan="auto"`, changes the plan on the way.

    **Attributes:**

    - `plan`: the plan of the next stretch; until `look` was called, what was asked for.
    """

    def __init__(self, plan: AbstractPlan, *, name: str):
        self.plan = plan
        self._search: Search | None = None
        self._name = name
        self._peak: Peak | None = None

    @property
    def watching(self) -> bool:
        """Whether the next stretch is a trial of a plan."""
        return self._search is not None and self._search.watching

    def look(
        self, fn: Callable[..., Any], *args: PyTree, num_members: int, unit: str, steps_inside: bool = False
    ) -> None:
        """Looks at `fn(plan, *args)`, one `unit` of the work, if the plan is still to be chosen."""
        if not isinstance(self.plan, Auto):
            return
        if jax.process_count() > 1:  # each would measure for itself, and might choose another plan than the others
            self.plan = suggested(self.plan, fn, *args, num_members=num_members, steps_inside=steps_inside)
        else:
            options = {"num_members": num_members, "steps_inside": steps_inside, "name": self._name, "unit": unit}
            self._search = search_for(self.plan, fn, *args, **options)
            self.plan = self._search.plan

    def call(self, stretch: Callable[[AbstractPlan, Any], Any], carry: Any) -> Any:
        """`stretch(plan, carry)`, which may donate `carry`.

        A plan's first call may find too little memory. It is then called again under a smaller one, with the carry from
        a copy on the host, because a donated one is gone.
        """
        if self._search is None or not (self._search.watching or self._search.risky):
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
                warnings.warn(_check.smaller_plan(in_words(self.plan), in_words(less), name=self._name), stacklevel=3)
                self.plan, carry = less, jax.device_put(kept)

    def note(self, units: int, seconds: float, *, seconds_left: float | None) -> bool:
        """Notes how long the last stretch took. Returns whether the next one runs under another plan."""
        if self._search is None:
            return False
        changed = self._search.note(units, seconds, self._peak, seconds_left=seconds_left)
        self._peak, self.plan = None, self._search.plan
        return changed

    def settle(self) -> None:
        """Stays with the present plan from here on."""
        self._search = None


@contextlib.contextmanager
def explained_memory(pilot: Pilot, num_members: int, *, name: str) -> Iterator[None]:
    """Says what to try when a compiled program finds too little memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        less = smaller(pilot.plan, num_members)
        tried, next_one = in_words(pilot.plan), None if less is None else in_words(less)
        raise MemoryError(_check.out_of_memory(num_members, tried, next_one, str(error), name=name)) from error


def _on_host(tree: PyTree) -> PyTree:
    copied = lambda x: x.copy() if _check.is_typed_key(x) else np.array(x) if _axes.is_array(x) else x
    return jax.tree.map(copied, tree)
