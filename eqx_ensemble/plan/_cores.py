import dataclasses
import math
from collections.abc import Callable

import equinox as eqx
import jax

from .. import _check
from .._cores import cache_bytes, num_cores
from .._pytree import PyTree
from ._memory import Cost, free_bytes
from ._plans import FEWEST, AbstractPlan, Chunked, Notes, Vmap, Work
from ._search import Search, candidates, cost_of_work

# A step's intermediate arrays are counted with all that a compiler fuses: about a quarter of their bytes are ever
# written. Half of the cache is left to the data, and to what else runs on the core.

_WRITTEN, _OF_THE_CACHE = 1 / 4, 1 / 2
_WORTH_IT = 0.8  # of the time of one call
_FEW_CALLS, _MOST_CALLS = 4, 16  # of one core; a few allow cores to take turns, and members to stop


class Cores(AbstractPlan):
    """Equal blocks of members, each a call of one program, on all cores of a CPU: the default in `eqx_ensemble.fit`.

    XLA runs the small operations of members on one core. Blocks run at the same time, on threads that end with the
    call; and a block whose step fits in a core's cache is faster, even on one core. Values do not depend on the number
    of cores, and a run resumes on another number. Where blocks save nothing, all members are one call: on
    accelerators, on a mesh, with several processes; if the host looks at the results after few, short steps; for
    functions that call Python; and for batches of an iterable or a reader, which are one call per step.

    **Arguments:**

    - `inner`: the plan of each block. By default [`eqx_ensemble.plan.Vmap`][], [`eqx_ensemble.plan.Sequential`][] for
        members that keep a core busy, or `Chunked` if there are very many blocks.
    - `block`: the members of a block. By default their number follows from the bytes that a step reads and writes, and
        the core's cache.
    - `count`: the number of cores; by default all that the process may use: its affinity, the quota of its container,
        and `OMP_NUM_THREADS` are respected.

    **Raises:** `TypeError` or `ValueError` for invalid arguments.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 16, key=key)
    data = jnp.ones((100, 3)), jnp.zeros((100, 1))
    run = ee.fit(ensemble, loss, optax.adam(1e-3), data, epochs=40, key=key, plan=ee.plan.Cores(count=2))
    print(run.plan.explain())
    ```
    """

    inner: AbstractPlan | None = None
    block: int | None = eqx.field(static=True, default=None, kw_only=True)
    count: int | None = eqx.field(static=True, default=None, kw_only=True)
    notes: Notes = eqx.field(static=True, default_factory=Notes, kw_only=True, repr=False)

    def __check_init__(self) -> None:
        if self.inner is not None and not isinstance(self.inner, AbstractPlan):
            raise TypeError(f"`inner` must be a plan such as `Vmap()`, got {self.inner!r}.")
        for name in ("block", "count"):
            if getattr(self, name) is not None:
                _check.check_positive_int(getattr(self, name), name)

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` over all members under the inner plan, as inside of a program."""
        return self._inner.run(fn, arrays)

    @property
    def _inner(self) -> AbstractPlan:
        return Vmap() if self.inner is None else self.inner

    def width(self, num_members: int) -> int:
        """The members that all cores run at a time."""
        return min(self.cores * self._inner.width(self.block or num_members), num_members)

    @property
    def cores(self) -> int:
        """The number of cores in use."""
        return self.count or num_cores()

    @property
    def compiles(self) -> bool:
        """Whether the inner plan compiles."""
        return self._inner.compiles

    @property
    def one_by_one(self) -> bool:
        """As for the inner plan."""
        return self._inner.one_by_one

    def smaller(self, num_members: int) -> AbstractPlan | None:
        """Half of the members at a time, on one core."""
        return self._inner.smaller(min(self.block or num_members, num_members))

    def begin(self, work: Work) -> tuple[AbstractPlan, Search | None]:
        """Chooses the inner plan and the blocks, without measuring."""
        if jax.default_backend() != "cpu" or jax.process_count() > 1:
            return self._inner, None
        cost, count = cost_of_work(work), work.num_members
        suggested = candidates(cost, count, steps_inside=work.steps_inside, scan=work.scan)[0]
        chosen = dataclasses.replace(self, inner=suggested if self.inner is None else self.inner)
        if not work.steps_inside or cost.callbacks:
            chosen = dataclasses.replace(chosen, block=None)
        elif self.block is None and _is_worth_dividing(cost, work):
            chosen = chosen._divided(count, cost)
        self.notes.found[work.name] = chosen, cost, count
        return chosen, None

    def _divided(self, num_members: int, cost: Cost) -> "Cores":
        inner, width = self._inner, self._inner.width(num_members)
        if width < num_members:  # blocks of whole chunks, or of members that take turns
            counts = range(_FEW_CALLS * self.cores, 0, -1)
            chunks = _size(math.ceil(num_members / width), self.cores, counts, least=2 if width == 1 else 1)
            return dataclasses.replace(self, block=min(width * chunks, num_members))
        most = max(int(cache_bytes() * _OF_THE_CACHE / _bytes_of(cost)), FEWEST)
        fewest = math.ceil(num_members / most)
        size = _size(num_members, self.cores, range(fewest, 2 * fewest + self.cores), least=FEWEST)
        turns = math.ceil(num_members / size / (_MOST_CALLS * self.cores))
        if turns > 1:
            inner = Chunked(size, scan=inner.scan)
        return dataclasses.replace(self, inner=inner, block=turns * size)

    def blocks(self, num_members: int) -> "tuple[AbstractPlan, list[slice]]":
        """The plan of a block, and the members of each; the last may overlap the one before it, so that all are equal.

        Members that are in two blocks are computed twice.
        """
        size = min(self.block or num_members, num_members)
        starts = [min(start, num_members - size) for start in range(0, num_members, size)]
        return self._inner, [slice(start, start + size) for start in starts]

    def explain(self) -> str:
        """A report on the choice of the blocks."""
        if not self.notes.found:
            return "Nothing has been run with this plan yet."
        return "\n\n".join(_report(name, *found) for name, found in self.notes.found.items())


def _report(name: str, plan: Cores, cost: Cost, num_members: int) -> str:
    inner, blocks = plan.blocks(num_members)
    cores = f"{plan.cores} core" + "s" * (plan.cores > 1)
    runs = (
        f"{num_members} members in one call" if len(blocks) == 1 else f"blocks of {blocks[0].stop} members on {cores}"
    )
    return (
        f"`{name}` runs {runs}, under `{inner!r}`.\nOne member's step: {cost.flops / 1e6:.3g} MFLOP in products, about "
        f"{_bytes_of(cost) / 2**10:.3g} KiB written; the cache of a core has {cache_bytes() / 2**10:.4g} KiB."
    )


def _bytes_of(cost: Cost) -> int:
    return max(int(cost.bytes * _WRITTEN), 1)


def _is_worth_dividing(cost: Cost, work: Work) -> bool:
    """Whether a call is much longer than dividing its members and joining them again, and the copies fit in memory."""
    is_loop = work.scan or (work.scan is None and not cost.convolutions)
    flops = cost.flops * work.num_members * (work.steps if is_loop else 1)
    copied, free = _bytes_of(cost) * work.num_members, free_bytes()
    return flops > 2e7 + 20 * copied and (free is None or copied < free / 4)


def _size(count: int, cores: int, blocks: range, *, least: int) -> int:
    """The size, of at least `least`, of equal blocks of a `count`, whose number is the first for which the cores finish
    soonest.
    """
    size = lambda blocks: min(max(math.ceil(count / blocks), least), count)
    turns = lambda blocks: math.ceil(math.ceil(count / size(blocks)) / cores) * size(blocks)
    best = min(blocks, key=turns)
    return size(best) if 1 not in blocks or turns(best) <= _WORTH_IT * count else count
