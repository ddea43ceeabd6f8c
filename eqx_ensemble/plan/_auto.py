from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax

from .. import _axes, _check
from .._pytree import PyTree
from ._candidates import candidates
from ._check import check_plan
from ._cost import cost_of
from ._plans import AbstractPlan, Vmap, Work
from ._report import search_report
from ._search import Search
from ._trials import cache_of

AnyPlan = AbstractPlan | Literal["auto"] | None
"""The argument `plan` of functions: a plan, `"auto"`, or `None` for `Vmap()`."""


class _Notes:
    """The searches of one plan, by function. They are not part of the plan's value: all notes are equal."""

    def __init__(self) -> None:
        self.searches: dict[str, Search] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Notes)

    def __hash__(self) -> int:
        return hash(_Notes)


class Auto(AbstractPlan):
    """Analyses the program, tries the few suitable plans, and keeps the fastest that fits in memory.

    `plan="auto"` is short for `plan=Auto()`. A trial is a part of the work itself: a search costs only compilations and
    the time lost under slower plans, together at most `max_overhead` of the total time. A short run therefore keeps the
    plan that static analysis suggests. Results of a search are cached for the lifetime of the process: another run of
    the same program starts with the fastest plan.

    Plans agree within float rounding, and the fastest may differ between runs: to reproduce a run bit for bit, pass its
    `run.plan.choice`.

    Where trials are impossible, in [`eqx_ensemble.map_members`][] and inside your own `jax.jit`, the plan is chosen by
    static analysis only; also with several processes, because their measurements would differ.

    **Arguments:**

    - `memory`: the bytes that a step may need in addition to the training state; nine tenths of the device's free
        memory by default. If memory may be short, plans are tried from the smallest up, because a compiler's own
        estimates can be many times too low, and the memory for more members is extrapolated from that for fewer.
    - `max_overhead`: the maximum cost of the search, as a fraction of the total time.

    **Raises:** `TypeError` or `ValueError` for invalid arguments.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    data = jnp.ones((100, 3)), jnp.zeros((100, 1))
    run = ee.fit(ensemble, loss, optax.adam(1e-3), data, epochs=2, plan="auto", key=key)
    print(run.plan.explain())
    ```
    """

    memory: int | None = eqx.field(static=True, default=None, kw_only=True)
    max_overhead: float = eqx.field(static=True, default=0.05, kw_only=True)
    notes: _Notes = eqx.field(static=True, default_factory=_Notes, kw_only=True, repr=False)

    def __check_init__(self) -> None:
        if self.memory is not None:
            _check.check_positive_int(self.memory, "memory", name="plan.Auto")
        _check.check_number(self.max_overhead, "max_overhead", name="plan.Auto", least=0, most=1)

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` under the plan that static analysis suggests."""
        num_members = jax.tree.leaves(arrays)[0].shape[0]
        work = Work("", lambda plan, arrays: plan.run(fn, arrays), (arrays,), num_members, unit="call")
        return _suggestion(work).run(fn, arrays)

    def begin(self, work: Work) -> tuple[AbstractPlan, Search | None]:
        """Starts a search, or continues an earlier one of the same program; no search in several processes."""
        if jax.process_count() > 1:
            return _suggestion(work), None
        leaves, treedef = jax.tree.flatten(work.args)
        key = (work.fn, tuple((x.shape, x.dtype) if _axes.is_array(x) else x for x in leaves), treedef, work.scan)
        cache = cache_of(key, lambda: cost_of(work.fn, *work.args), work)
        search = Search(cache, max_overhead=self.max_overhead, memory=self.memory)
        self.notes.searches.pop(work.name, None)  # the latest search is the last one
        self.notes.searches[work.name] = search
        return search.plan, search

    @property
    def choice(self) -> AbstractPlan | None:
        """The plan that the latest search has found; `None` before a search."""
        return list(self.notes.searches.values())[-1].plan if self.notes.searches else None

    def explain(self) -> str:
        """A report on the analysis, the trials and their times, and the choice."""
        if not self.notes.searches:
            return "No search has been run with this plan yet."
        return "\n\n".join(search_report(name, search) for name, search in self.notes.searches.items())


def as_plan(plan: AnyPlan) -> AbstractPlan:
    """The plan of an argument `plan`, checked."""
    if isinstance(plan, str) and plan == "auto":
        return Auto()
    plan = Vmap() if plan is None else plan
    check_plan(plan)
    return plan


def _suggestion(work: Work) -> AbstractPlan:
    """The plan that static analysis suggests."""
    cost = cost_of(work.fn, *work.args)
    return candidates(cost, work.num_members, steps_inside=work.steps_inside, scan=work.scan)[0]
