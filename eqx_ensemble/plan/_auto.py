from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
from jaxtyping import PyTree

from .. import _axes, _check
from ._candidates import candidates
from ._plans import AbstractPlan, Vmap, in_words
from ._search import Search, book_of, table_of
from ._traits import Traits, traits_of

AnyPlan = AbstractPlan | Literal["auto"] | None
"""What functions take as `plan`: a plan, `"auto"`, or nothing for `Vmap()`."""


class _Notes:
    """The searches made with one plan, newest last. They are no part of what the plan says: all notes are equal."""

    def __init__(self):
        self.searches: dict[str, Search] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Notes)

    def __hash__(self) -> int:
        return hash(_Notes)


class Auto(AbstractPlan):
    """Looks at the program, tries the few plans that make sense for it, and goes on with the fastest that fits.

    Written `plan="auto"`. A trial is a stretch of the work itself, so that all that a search costs are compilations and
    slower stretches: together at most `share` of the time, which leaves a short run with the plan that a look at the
    program suggests. What was found out is remembered for the process's life: another run of the same program starts
    with the fastest plan.

    Plans agree within float rounding, and which is the fastest may differ from one run to the next: for the same bits
    again, pass `run.plan.chosen`.

    Where nothing can be tried, in [`eqx_ensemble.map_members`][] and in a program of your own, the look decides alone;
    in several processes too, because each would measure for itself.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    data = jnp.ones((100, 3)), jnp.zeros((100, 1))
    run = ee.fit(ensemble, loss, optax.adam(1e-3), data, epochs=2, plan="auto", key=key)
    print(run.plan.explain())
    ```

    **Arguments:**

    - `memory`: the bytes that a step may need beside the training state. If not given: nine tenths of what the device
        has left. Plans are then tried from the smallest up, because a compiler's own estimates can be many times too
        low, and what fewer members needed foretells what more will need.
    - `share`: the most that the search may cost, as a part of the whole time.
    """

    memory: int | None = eqx.field(static=True, default=None, kw_only=True)
    share: float = eqx.field(static=True, default=0.05, kw_only=True)
    scan: bool | None = eqx.field(static=True, default=None, kw_only=True)
    notes: _Notes = eqx.field(static=True, default_factory=_Notes, kw_only=True, repr=False)

    def __check_init__(self):
        if self.memory is not None:
            _check.check_positive_int(self.memory, "memory", name="Auto")
        _check.share(self.share)

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` under the plan that a look at it suggests."""
        num_members = jax.tree.leaves(arrays)[0].shape[0]
        found = traits_of(lambda plan, arrays: plan.run(fn, arrays), arrays)
        return candidates(found, num_members, steps_inside=False)[0].run(fn, arrays)

    @property
    def chosen(self) -> AbstractPlan | None:
        """The plan that the latest search has come to; `None` before there is one."""
        return list(self.notes.searches.values())[-1].plan if self.notes.searches else None

    def explain(self) -> str:
        """What was looked at, what was tried, how long it took, and what was chosen: in words and numbers."""
        if not self.notes.searches:
            return "Nothing was run with this plan yet, so that nothing was tried."
        return "\n\n".join(_explained(name, search) for name, search in self.notes.searches.items())


def as_plan(plan: AnyPlan) -> AbstractPlan:
    """What was given as `plan`, checked, as a plan."""
    if isinstance(plan, str) and plan == "auto":
        return Auto()
    plan = Vmap() if plan is None else plan
    _check.plan(plan, AbstractPlan)
    return plan


def search_for(
    auto: Auto, fn: Callable[..., Any], *args: PyTree, num_members: int, steps_inside: bool, name: str, unit: str
) -> Search:
    """A search for the plan of `fn(plan, *args)`, which goes on where an earlier one of the same program ended."""
    leaves, treedef = jax.tree.flatten(args)
    key = (fn, tuple((x.shape, x.dtype) if _axes.is_array(x) else x for x in leaves), treedef, auto.scan)
    look = lambda: traits_of(fn, *args)
    book = book_of(key, look, num_members, scan=auto.scan, steps_inside=steps_inside, unit=unit)
    auto.notes.searches[name] = Search(book, share=auto.share, memory=auto.memory)
    return auto.notes.searches[name]


def suggested(auto: Auto, fn: Callable[..., Any], *args: PyTree, num_members: int, steps_inside: bool) -> AbstractPlan:
    """The plan that a look at `fn(plan, *args)` suggests."""
    return candidates(traits_of(fn, *args), num_members, steps_inside=steps_inside, scan=auto.scan)[0]


def _explained(name: str, search: Search) -> str:
    book = search.book
    cost = f"{search.spent:.2f} s of {search.seconds:.2f}" if search.spent else "nothing beside the work itself"
    return (
        f"`{name}` runs {book.num_members} members on {jax.default_backend()} under {in_words(search.plan)}.\n"
        f"One member's {book.unit}: {_described(book.traits)}.\n{table_of(search)}\nThe search cost {cost}."
    )


def _described(traits: Traits) -> str:
    counts = {
        "convolutions": traits.convolutions,
        "batched products as in attention": traits.batched_products,
        "loops": traits.loops,
    }
    parts = [f"{count} {what}" if count else f"no {what}" for what, count in counts.items()]
    size = f"at most {traits.bytes / 2**20:.3g} MiB of intermediate arrays"
    return f"{traits.flops / 1e6:.3g} MFLOP in products, {', '.join(parts)}, {size}"
