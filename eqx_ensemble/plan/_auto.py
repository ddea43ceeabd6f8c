import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np

from .. import _axes, _check
from .._caller import caller
from .._check import MemberMismatchError, is_key, path_text
from .._leaf_text import leaf_text
from .._pytree import PyTree
from .._warnings import warn
from ..tree._engine import static_gap
from ._cores import Cores
from ._memory import Cost, Peak, is_out_of_memory, peak
from ._plans import AbstractPlan, Notes, Vmap, Work
from ._search import Search, Trial, cache_of, candidates, cost_of_work


def check_plan(value: Any) -> None:
    """Raises unless `value` is a plan, not its class; the caller has converted `"auto"`."""
    if isinstance(value, AbstractPlan):
        return
    hint = "For example `plan.Vmap()`."
    if isinstance(value, type):
        hint = f"Pass an instance: `{value.__name__}(...)`."
    plans = '`"auto"`, `Cores()`, `Vmap()`, `Chunked(size)`, `Sequential()`, `Unrolled()`'
    raise TypeError(f"`plan` must be one of {plans}, got {value!r}.\n{hint}")


def smaller_plan_message(plan: str, less: str) -> str:
    """The warning that a plan needs too much memory."""
    return f"`{caller()}` ran out of memory under `{plan}` and continues under `{less}`."


def out_of_memory_message(num_members: int, plan: str, less: str | None, error: str) -> str:
    """The message that memory has run out, with a plan to try."""
    first = error.splitlines()[0] if error else "RESOURCE_EXHAUSTED"
    hint = f'Try `plan={less}`, or `plan="auto"`, which searches for a plan that fits.'
    if less is None:
        hint = "Not even one member at a time fits: choose a smaller `batch_size`."
    return f"`{caller()}` ran out of memory with {num_members} members under `{plan}`: {first}\n{hint}"


def plan_in_program(plan: AbstractPlan) -> AbstractPlan | None:
    """What of a plan distinguishes compiled programs: nothing if its options only choose others."""
    return None if isinstance(plan, Auto | Cores) else plan


def check_equal_constants(outputs: list[PyTree]) -> None:
    """Raises unless the outputs that are not arrays are equal in all calls of a function of one member."""
    if len(outputs) < 2:  # traced once for all members
        return
    first, *others = ({path_text(path): x for path, x in jax.tree.leaves_with_path(output)} for output in outputs)
    for other in others:
        seen: dict[Any, Any] = {}
        for path in first | other:
            gap = static_gap(first.get(path), other.get(path), seen)
            if gap is not None:
                texts, location = (leaf_text(gap.expected), leaf_text(gap.got)), gap.location()
                got = f"two values of {texts[0]}" if texts[0] == texts[1] else f"{texts[0]} and {texts[1]}"
                raise MemberMismatchError(
                    f"`{caller()}` returns outputs that are not arrays once: they must be equal for all members.\n"
                    f"  at `{path or '<root>'}`: got {got}{location and f' in {location}'}\n"
                    "Return an array, which gains the axis `members`: `jnp.asarray(x)` in place of `float(x)`."
                )


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
                warn(smaller_plan_message(repr(self.plan), repr(less)))
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
def explain_memory(pilot: Pilot, num_members: int) -> Iterator[None]:
    """Raises a `MemoryError` that names a smaller plan when a compiled program runs out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        less = pilot.plan.smaller(num_members)
        tried, next_one = repr(pilot.plan), None if less is None else repr(less)
        raise MemoryError(out_of_memory_message(num_members, tried, next_one, str(error))) from error


def _on_host(tree: PyTree) -> PyTree:
    copy = lambda x: x.copy() if is_key(x) else np.array(x) if _axes.is_array(x) else x
    return jax.tree.map(copy, tree)


# The report of `plan.Auto.explain`.

_SEEN_BYTES = 2**25  # the process reuses smaller blocks, which are therefore not measured


def search_report(name: str, search: Search) -> str:
    """The report on the search for the program of the function `name`: analysis, trials and choice."""
    cache = search.cache
    spent = f"cost {search.spent:.2f} s of {search.seconds:.2f}" if search.spent else "had no overhead"
    return (
        f"`{name}` runs {cache.num_members} members on {jax.default_backend()} under {search.plan!r}.\n"
        f"One member's {cache.unit}: {_cost_text(cache.cost)}.\n{_table(search)}\nThe search {spent}."
    )


def reason(search: Search, trial: Trial) -> str:
    """Why a plan was not tried."""
    if trial.refused:
        return trial.refused
    if search.cache.exceeds(trial.plan, search.budget):
        expected = (search.cache.expected_peak(trial.plan) or 0) / 2**20
        return f"not tried: expected to need {expected:.0f} MiB of a budget of {(search.budget or 0) / 2**20:.0f}"
    seconds = search.cache.seconds_to_compile(trial)
    most = f"{search.max_overhead:.0%} of the time"
    return f"not tried: compiling it was expected to take {seconds:.1f} s, more than {most}"


def _table(search: Search) -> str:
    """A line for each plan, the fastest first."""
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
            cells.append("too few calls to measure its speed")
        elif trial.per_unit is None or trial.refused:
            cells.append(reason(search, trial))
        if trial.plan == search.plan:
            cells.append("<- in use")
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _cost_text(cost: Cost) -> str:
    counts = {
        "convolutions": cost.convolutions,
        "batched products as in attention": cost.batched_products,
        "loops": cost.loops,
    }
    parts = [f"{count} {what}" if count else f"no {what}" for what, count in counts.items()]
    size = f"at most {cost.bytes / 2**20:.3g} MiB of intermediate arrays"
    return f"{cost.flops / 1e6:.3g} MFLOP in products, {', '.join(parts)}, {size}"


AnyPlan = AbstractPlan | Literal["auto"] | None
"""The argument `plan` of functions: a plan, `"auto"`, or `None` for `Vmap()`."""


class Auto(AbstractPlan):
    """Analyses the program, tries the few suitable plans, and keeps the fastest that fits in memory.

    `plan="auto"` is short for `plan=Auto()`. Trials are a part of the work itself: [what it
    does](../speed.md#what-planauto-does). To reproduce a run bit for bit, pass its `run.plan.choice`. In
    [`eqx_ensemble.map_members`][], inside your own `jax.jit` and with several processes, static analysis alone chooses.

    **Arguments:**

    - `memory`: the bytes that a step may need in addition to the training state; by default nine tenths of the device's
        free memory.
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
    notes: Notes = eqx.field(static=True, default_factory=Notes, kw_only=True, repr=False)

    def __check_init__(self) -> None:
        if self.memory is not None:
            _check.check_positive_int(self.memory, "memory")
        _check.check_number(self.max_overhead, "max_overhead", least=0, most=1)

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` under the plan that static analysis suggests."""
        num_members = jax.tree.leaves(arrays)[0].shape[0]
        work = Work("", lambda plan, arrays: plan.run(fn, arrays), (arrays,), num_members, unit="call")
        return _candidates(work)[0].run(fn, arrays)

    def begin(self, work: Work) -> tuple[AbstractPlan, Search | None]:
        """Starts a search, or continues an earlier one of the same program; no search in several processes."""
        if jax.process_count() > 1:
            return _candidates(work)[0], None
        leaves, treedef = jax.tree.flatten(work.args)
        plans = _candidates(work)
        if work.steps_inside:
            plans = [Cores(plan).begin(work)[0] for plan in plans]
        shapes = tuple((x.shape, x.dtype) if _axes.is_array(x) else x for x in leaves)
        cache = cache_of((work.fn, shapes, treedef, work.scan, *plans), work, plans)
        search = Search(cache, max_overhead=self.max_overhead, memory=self.memory)
        self.notes.found.pop(work.name, None)  # the latest search is the last one
        self.notes.found[work.name] = search
        return search.plan, search

    @property
    def choice(self) -> AbstractPlan | None:
        """The plan that the latest search has found; `None` before a search."""
        return list(self.notes.found.values())[-1].plan if self.notes.found else None

    def explain(self) -> str:
        """A report on the analysis, the trials and their times, and the choice."""
        if not self.notes.found:
            return "No search has been run with this plan yet."
        return "\n\n".join(search_report(name, search) for name, search in self.notes.found.items())


def as_plan(plan: AnyPlan) -> AbstractPlan:
    """The plan of an argument `plan`, checked."""
    if isinstance(plan, str) and plan == "auto":
        return Auto()
    plan = Vmap() if plan is None else plan
    check_plan(plan)
    return plan


def _candidates(work: Work) -> list[AbstractPlan]:
    """The plans that static analysis suggests, the most promising first."""
    return candidates(cost_of_work(work), work.num_members, steps_inside=work.steps_inside, scan=work.scan)
