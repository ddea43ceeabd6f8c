import dataclasses
import functools as ft
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ... import _axes, _keys
from ..._pytree import PyTree
from ..._sharding import Layout, pad_members, shard_data, shard_members
from .._state import put_new
from ..compiled._order import RowOrder


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
            return each if self.layout is None else shard_data(each, self.layout, whole=whole)

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


Shuffle = bool | Literal["shared"]


def row_order(
    key: Any,
    ids: jax.Array,
    shuffle: Shuffle,
    *,
    num_rows: int,
    rows: np.ndarray | None,
    batch_size: int,
    layout: Layout | None = None,
) -> RowOrder:
    """The row order of a run, on its devices: of `num_rows` rows of data, or of the members' own `rows` `(members, n)`.

    Permutations depend only on the root key and the members' ids.
    """
    words = order_words(key, ids, shuffle)
    words = words if words is None or shuffle == "shared" else _axes.Each(words)
    per_epoch = num_rows if rows is None else rows.shape[1]
    drawn = RowOrder(words, None if rows is None else _axes.Each(rows), per_epoch, batch_size)
    return jax.tree.map(put_new, drawn) if layout is None else shard_data(drawn, layout, whole=True)


def order_words(key: Any, ids: Any, shuffle: Shuffle) -> Any:
    """The key words of each member's row order `(members, 2)`, or of the shared one `(2,)`; `None` if not random."""
    if shuffle == "shared":
        return jax.random.key_data(_keys.member_keys(key, 1, purpose="shared rows"))[0]
    return jax.random.key_data(_keys.member_keys(key, ids, purpose="rows")) if shuffle else None


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive steps that are run together.

    `full` counts full batches; `rest` is 1 for the smaller batch at the end of an epoch, alone in its piece, else 0.
    """

    full: int
    rest: int = 0
    ends_epoch: bool = False

    @property
    def num_steps(self) -> int:
        """The number of its steps."""
        return self.full + self.rest

    def split(self, most: int) -> "list[Piece]":
        """The piece, split into parts of at most `most` steps each, at least one."""
        parts = [Piece(min(most, self.full - start)) for start in range(0, self.full, most)]
        return [*parts[:-1], dataclasses.replace(self, full=parts[-1].full if parts else 0)]

    def bisect_fault(self, step: int) -> "list[Piece]":
        """Splits the piece, such that a fault that shows at `step` is in a part of one step.

        The weights may have failed one step before the loss that shows it. Parts grow after the fault, because other
        members often fail soon after the first. If no loss shows the fault, `step` is the number of steps: the fault is
        in the last step or anywhere before.
        """
        length = self.full
        powers = 2 ** np.arange(length.bit_length())
        cuts = {step - 1, step, *(step + powers).tolist()} if step < length else {length // 2, length - 1}
        bounds = [0, *sorted(cut for cut in cuts if 0 < cut < length), length]
        parts = [Piece(stop - start) for start, stop in itertools.pairwise(bounds)]
        return [*parts[:-1], dataclasses.replace(self, full=parts[-1].full)]


@dataclasses.dataclass(frozen=True)
class PieceIterator:
    """A run's steps in pieces of at most `most()` full batches, evaluated for each piece; none crosses a limit.

    The run consists of the steps from `first_step` to before `last_step`, both counted from the first epoch;
    `limit_after` returns the next limit after a step. The smaller batch at the end of an epoch is a piece of its own: a
    chunk can end before it, to revive a member that failed in the last full batch.
    """

    order: RowOrder
    first_step: int
    last_step: int
    limit_after: Callable[[int], int | None]
    most: Callable[[], int]

    def epochs(self) -> Iterator[Piece]:
        """Pieces of one epoch each. The last epoch of a run that ends within it has no `rest` and no end."""
        per_epoch, rest = self.order.epoch, int(self.order.remainder > 0)
        whole = per_epoch - rest
        step = self.first_step
        while step < self.last_step:
            epoch, done = divmod(step, per_epoch)
            last = min(whole, done + self.last_step - step)
            ends = last == whole and (epoch + 1) * per_epoch <= self.last_step
            while True:
                stop = min(done + self._end(step) - step, last)
                if ends and stop == last:
                    yield from self._last_pieces(stop - done, rest)
                else:
                    yield Piece(stop - done)
                step, done = step + stop - done, stop
                if stop == last:
                    break
            step += ends and rest

    def _last_pieces(self, full: int, rest: int) -> Iterator[Piece]:
        """The last `full` batches of an epoch, and the smaller one."""
        if rest and full:
            yield Piece(full)
            full = 0
        yield Piece(full, rest, ends_epoch=True)

    def endless(self) -> Iterator[Piece]:
        """Pieces of a run without validation and without smaller last batches.

        A piece may continue into the next epoch, so that there are fewer of them.
        """
        step = self.first_step
        while step < self.last_step:
            stop = self._end(step)
            yield Piece(stop - step)
            step = stop

    def _end(self, step: int) -> int:
        """The step before which a piece that begins at `step` must end."""
        end, limit = min(step + max(self.most(), 1), self.last_step), self.limit_after(step)
        return end if limit is None else min(end, limit)
