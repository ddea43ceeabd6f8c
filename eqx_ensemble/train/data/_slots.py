import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ... import _axes
from ..._pytree import PyTree
from ...sharding._layout import Layout
from ...sharding._shard import pad_members, replicate_rows, shard_members, shard_rows


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """The members in the compiled arrays, in order; on a mesh, padded with copies of the last one.

    **Attributes:**

    - `members`: their indices in the ensemble.
    - `num_members`: the size of the ensemble.
    """

    members: np.ndarray
    num_members: int
    layout: Layout | None

    @ft.cached_property
    def index(self) -> np.ndarray:
        """The index in the ensemble of each slot, padding included."""
        return self.members if self.layout is None else pad_members(self.members, self.layout)

    @property
    def complete(self) -> bool:
        """Whether all members are in the compiled arrays."""
        return len(self.members) == self.num_members

    def distinct(self, ids: np.ndarray) -> np.ndarray:
        """A distinct id for each slot, padding included."""
        own = ids[self.members]
        return np.concatenate([own, ids.max() + 1 + np.arange(len(self.index) - len(own), dtype=ids.dtype)])

    def take(self, tree: PyTree) -> PyTree:
        """The slots' part of arrays `(all members, ...)`."""
        return self.shard(take(tree, self.index))

    def without_pads(self, tree: PyTree) -> PyTree:
        """Arrays `(slots, ...)` without padding."""
        count = len(self.members)
        return tree if len(self.index) == count else self.shard(take(tree, np.arange(count)))

    def shard(self, tree: PyTree) -> PyTree:
        """Shards arrays of members over their devices."""
        return tree if self.layout is None else shard_members(tree, self.layout)

    def own(self, data: PyTree, *, whole: bool = False) -> PyTree:
        """Data whose parts marked `Each` hold only the slots; their rows are replicated if `whole`, else sharded."""
        if len(self.index) == self.num_members:
            return data

        def own(value: Any) -> _axes.Each:
            each = _axes.Each(take(value, self.index))
            if self.layout is None:
                return each
            return replicate_rows(each, self.layout) if whole else shard_rows(each, self.layout)

        return _axes.map_each(own, data)

    def expand(self, outputs: PyTree) -> PyTree:
        """Outputs `(steps, slots, ...)` as `(steps, all members, ...)`; NaN or zero for members without a slot."""
        if len(self.index) > len(self.members):
            outputs = jax.tree.map(lambda x: x[:, : len(self.members)], outputs)
        return outputs if self.complete else jax.tree.map(self._expand, outputs)

    def _expand(self, x: np.ndarray) -> np.ndarray:
        fill = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
        all_members = np.full((x.shape[0], self.num_members, *x.shape[2:]), fill, x.dtype)
        all_members[:, self.members] = x
        return all_members


@eqx.filter_jit
def take(tree: PyTree, index: Any) -> PyTree:
    """The members at `index` of arrays `(members, ...)`."""
    return jax.tree.map(lambda x: x[index] if eqx.is_array(x) else x, tree)
