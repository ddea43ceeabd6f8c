"""How a function of one member runs for all of them. It affects only time and memory."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ._check import check_positive_int
from ._cores import cache_size, num_cores
from ._pytree import PyTree

__all__ = ["AnyPlan", "Blocks", "Vmap"]

_FEWEST = 4  # members of a block: with fewer, programs of tiny models wait for themselves


class Vmap(eqx.Module):
    """All members at once, by `equinox.filter_vmap`: the default on accelerators."""

    def run(self, fn: Callable[[PyTree], PyTree], own: PyTree) -> PyTree:
        """Maps `fn` over the leading axis of the arrays of a tree."""
        return eqx.filter_vmap(fn)(own)


class Blocks(eqx.Module):
    """Equal blocks of members: the default on CPUs.

    In [`eqx_ensemble.fit`][] and [`eqx_ensemble.predict`][], blocks run on threads, and use all cores; inside compiled
    programs they are steps of `jax.lax.map`. The last block is filled with copies of a member.

    **Arguments:**

    - `size`: members per block; by default as many as fit into the second-level cache of a core.
    - `cores`: the number of threads; by default all cores.
    """

    size: int | None = eqx.field(static=True, default=None)
    cores: int | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        for name in ("size", "cores"):
            if getattr(self, name) is not None:
                check_positive_int(getattr(self, name), name)

    def run(self, fn: Callable[[PyTree], PyTree], own: PyTree) -> PyTree:
        """Maps `fn` over the leading axis of the arrays of a tree, `size` members at a time."""
        arrays, rest = eqx.partition(own, eqx.is_array)
        static = None

        def on_arrays(arrays: PyTree) -> PyTree:
            nonlocal static
            out, static = eqx.partition(fn(eqx.combine(arrays, rest)), eqx.is_array)
            return out

        # Not `batch_size` of `jax.lax.map`, which takes no arrays without elements.
        count = jax.tree.leaves(arrays)[0].shape[0]
        size = min(self.size_for(arrays), count)
        width = -(-count // size) * size
        index = np.minimum(np.arange(width), count - 1)
        cut = lambda x: (x if width == count else x[index]).reshape(width // size, size, *x.shape[1:])
        out = jax.lax.map(jax.vmap(on_arrays), jax.tree.map(cut, arrays))
        out = jax.tree.map(lambda x: x.reshape(width, *x.shape[2:])[:count], out)
        return eqx.combine(out, static)

    def size_for(self, own: PyTree, bytes_of_step: int = 0) -> int:
        """The number of members of a block, for the arrays of all members `(members, ...)` that a step changes.

        They, and what a step writes, fill two thirds of a core's cache. The smallest blocks have four members, or one
        if it fills the cache.
        """
        leaves = [x for x in jax.tree.leaves(own) if eqx.is_array(x)]
        count = leaves[0].shape[0]
        if self.size is not None:  # also of fewer members, for which nothing compiles again
            return self.size
        bytes_of_one = sum(x.size * x.dtype.itemsize for x in leaves) // count + bytes_of_step
        fits = int(cache_size() * 2 / 3) // max(bytes_of_one, 1)
        most = -(-count // (2 * (self.cores or num_cores())))  # two blocks a core, to be packed as members stop
        return min(1 if fits <= 1 else max(min(fits, most), _FEWEST), count)


AnyPlan = Vmap | Blocks


def as_plan(plan: Any, default: AnyPlan) -> AnyPlan:
    """Raises unless `plan` is a plan or `None`, for the default."""
    if plan is None:
        return default
    if not isinstance(plan, AnyPlan):
        raise TypeError(f"`plan` is `plan.Vmap()` or `plan.Blocks(size)`, got {plan!r}.")
    return plan
