import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .. import _check
from .._axes import is_array, is_per_member
from .._cores import cache_bytes, num_cores
from .._pytree import PyTree
from ._memory import Cost, cost_of, free_bytes
from ._plans import FEWEST, AbstractPlan, Blocks, Chunked, Sequential, Vmap, Work

# A step's intermediate arrays are counted with all that a compiler fuses: about a quarter of their bytes are ever
# written. A third of the cache is left to the data, and to what else runs on the core.

_WRITTEN, _OF_THE_CACHE = 1 / 4, 2 / 3
_WORTH_IT = 0.8  # of the time of one call
_CALLS_IF_MEMBERS_STOP, _MOST_CALLS = 4, 16  # of one core: the members that are left are gathered in fewer blocks


class Cores(AbstractPlan):
    """Equal blocks of members, each a call of one program, on all cores of a CPU: the default in `eqx_ensemble.fit`.

    Results do not depend on the number of cores. Where blocks save nothing, all members are one call: [how it
    works](../speed.md#all-cores-of-a-cpu).

    **Arguments:**

    - `inner`: the plan of each block. By default [`eqx_ensemble.plan.Vmap`][], [`eqx_ensemble.plan.Sequential`][] for
        members that keep a core busy, or `Chunked` for very many members.
    - `block`: the members of a block; by default from the bytes of a step and the core's cache.
    - `count`: the number of cores; by default all that this process may use.

    **Raises:** `TypeError` or `ValueError` for invalid arguments.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 16, key=key)
    data = jnp.ones((100, 3)), jnp.zeros((100, 1))
    run = ee.fit(ensemble, loss, optax.adam(1e-3), data, epochs=40, key=key, plan=ee.plan.Cores(count=2))
    ```
    """

    inner: AbstractPlan | None = None
    block: int | None = eqx.field(static=True, default=None, kw_only=True)
    count: int | None = eqx.field(static=True, default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.scan is None and isinstance(self.inner, AbstractPlan):
            self.scan = self.inner.scan

    def __check_init__(self) -> None:
        if self.inner is not None and not isinstance(self.inner, AbstractPlan):
            hint = "The number of cores is `count`, that of members in a block `block`."
            raise TypeError(f"`inner` must be a plan such as `Vmap()`, got {self.inner!r}.\n{hint}")
        for name in ("block", "count"):
            if getattr(self, name) is not None:
                _check.check_positive_int(getattr(self, name), name)

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` over all members under the inner plan, as inside of a program."""
        return _inner_of(self).run(fn, arrays)

    def width(self, num_members: int) -> int:
        """The members that all cores run at a time."""
        return min(self._cores * _inner_of(self).width(self.block or num_members), num_members)

    def smaller(self, num_members: int) -> AbstractPlan | None:
        """Half of a block at a time, on one core."""
        return _inner_of(self).smaller(min(self.block or num_members, num_members))

    @property
    def _cores(self) -> int:
        return self.count or num_cores()

    def begin(self, work: Work) -> AbstractPlan:
        """Chooses the inner plan and, if members are to be divided, the blocks, without measuring."""
        has_mesh = not jax.sharding.get_abstract_mesh().empty  # of `jax.set_mesh`, which would shard blocks
        if not work.steps or jax.default_backend() != "cpu" or jax.process_count() > 1 or has_mesh:
            return dataclasses.replace(self, block=None)
        cost = _cost_of(work)
        chosen = _suggest(cost, work) if self.inner is None else self.inner
        if self.block is not None and not cost.runs_alone:
            return dataclasses.replace(self, inner=chosen)
        if _is_worth_dividing(cost, work):
            return _divide(dataclasses.replace(self, inner=chosen), work, cost)
        return chosen

    def blocks(self, num_members: int) -> Blocks:
        """Blocks of equal size: members that two of them share are computed twice."""
        size = min(self.block or num_members, num_members)
        starts = [min(start, num_members - size) for start in range(0, num_members, size)]
        return Blocks(_inner_of(self), [slice(start, start + size) for start in starts], self._cores)


def _inner_of(plan: Cores) -> AbstractPlan:
    return Vmap() if plan.inner is None else plan.inner


def _divide(plan: Cores, work: Work, cost: Cost) -> Cores:
    """The plan with a block size: of members that fit in the cache together, or of whole chunks of its inner plan."""
    inner, num_members = _inner_of(plan), work.num_members
    cores, width = plan.blocks(num_members).cores, inner.width(num_members)
    calls = cores * (_CALLS_IF_MEMBERS_STOP if work.stops else 1)
    if width < num_members:
        chunks = _size(math.ceil(num_members / width), cores, range(calls, 0, -1), least=2 if width == 1 else 1)
        return dataclasses.replace(plan, block=min(width * chunks, num_members))
    most = max(int(cache_bytes() * _OF_THE_CACHE / _bytes_of(cost)), FEWEST)
    fewest = max(math.ceil(num_members / most), calls if work.stops else 1)
    size = _size(num_members, cores, range(fewest, 2 * fewest + cores), least=FEWEST)
    turns = math.ceil(num_members / size / (_MOST_CALLS * cores))
    inner = inner if turns == 1 else Chunked(size, scan=inner.scan)
    return dataclasses.replace(plan, inner=inner, block=min(turns * size, num_members))


_BUSY_FLOPS = 4e6  # above this one member's step saturates a core, measured for dense models


def _suggest(cost: Cost, work: Work) -> AbstractPlan:
    """One member after another where each keeps a core busy; also for convolutions, which `jax.vmap` groups.

    These are slow inside a compiled loop, which `fit` therefore avoids for them by default.
    """
    busy = cost.flops > _BUSY_FLOPS or cost.batched_products > 0
    in_turn = work.scan is not True if cost.convolutions else busy
    return Sequential() if work.num_members > 1 and work.steps_inside and in_turn else Vmap()


def _cost_of(work: Work) -> Cost:
    """The cost of a step for one member, analysed once per program."""
    leaves, treedef = jax.tree.flatten(work.args)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x for x in leaves)
    return _known_cost(work.fn, shapes, treedef)


@ft.lru_cache(maxsize=128)
def _known_cost(fn: Callable[..., Any], leaves: tuple, treedef: Any) -> Cost:
    return cost_of(fn, *jax.tree.unflatten(treedef, leaves))


def _bytes_of(cost: Cost) -> int:
    return max(int(cost.bytes * _WRITTEN), 1)


def _is_worth_dividing(cost: Cost, work: Work) -> bool:
    """Whether a call is much longer than dividing its members and joining them again, and the copies fit in memory."""
    is_loop = work.scan or (work.scan is None and not cost.convolutions)
    flops = cost.flops * work.num_members * (work.steps if is_loop else 1)
    free = free_bytes()
    each = [x for x in jax.tree.leaves(work.args, is_leaf=is_per_member) if is_per_member(x)]
    own_data = sum(x.nbytes for x in jax.tree.leaves(each) if is_array(x))
    fits = free is None or work.copied + own_data < free / 4
    return not cost.runs_alone and flops > 2e7 + 20 * work.copied and fits


def _size(count: int, cores: int, blocks: range, *, least: int) -> int:
    """The size, of at least `least`, of equal blocks of a `count`, whose number is the first for which the cores finish
    soonest.
    """
    size = lambda blocks: min(max(math.ceil(count / blocks), least), count)
    turns = lambda blocks: math.ceil(math.ceil(count / size(blocks)) / cores) * size(blocks)
    best = min(blocks, key=turns)
    return size(best) if 1 not in blocks or turns(best) <= _WORTH_IT * count else count
