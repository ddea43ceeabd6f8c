"""Members in the files of shards: which to read, in which order and shapes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import tree
from .._ensemble import Ensemble
from .._ensemble._concatenate import concatenate
from .._files import load
from ._check_saved import check_stored_ids
from ._folder import store_of
from ._shapes import resize

if TYPE_CHECKING:
    from ._sharded_run import ShardedRun


class Stored(NamedTuple):
    """Members to read: the paths of checkpoints, positions and ids of members in each, and their order afterwards.

    `like` has the shapes of the ensemble, or of the ensemble and its state, for any number of members.
    """

    like: Any
    paths: tuple[Path, ...]
    rows: tuple[np.ndarray, ...]
    ids: tuple[np.ndarray, ...]
    sizes: tuple[int, ...]
    order: np.ndarray

    def read(self) -> tuple[Ensemble[Any], Any]:
        """The ensemble, and its state or `None`."""
        parts = [self._part(*each) for each in zip(self.paths, self.rows, self.ids, self.sizes, strict=True)]
        ensembles, states = zip(*parts, strict=True)
        ensemble = ensembles[0] if len(parts) == 1 else concatenate(ensembles)
        state = states[0] if states[0] is None or len(parts) == 1 else tree.concatenate(states)
        if np.array_equal(self.order, np.arange(len(self.order))):
            return ensemble, state
        return ensemble[self.order], None if state is None else tree.take(state, self.order)

    def _part(self, path: Path, rows: np.ndarray, ids: np.ndarray, size: int) -> tuple[Ensemble[Any], Any]:
        whole = np.array_equal(rows, np.arange(size))
        found = load(path, resize(self.like, size), members=None if whole else rows.tolist())
        ensemble, state = found if isinstance(found, tuple) else (found, None)
        check_stored_ids(np.asarray(ensemble.ids), ids, path)
        return ensemble, state


def locate(run: "ShardedRun[Any]", positions: np.ndarray) -> Stored:
    """The stored members of a run at some positions, in this order."""
    sizes = np.array(run.sizes)
    shard = np.repeat(np.arange(len(sizes)), sizes)[positions]
    row = np.concatenate([np.arange(size) for size in sizes])[positions]
    order = np.lexsort((row, shard))
    found, first = np.unique(shard[order], return_index=True)
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return Stored(
        like=run.like,
        paths=tuple(store_of(run.folder, run.shards[i], "").path for i in found),
        rows=tuple(np.split(row[order], first[1:])),
        ids=tuple(np.split(run.ids[positions][order], first[1:])),
        sizes=tuple(run.sizes[i] for i in found),
        order=back,
    )


def by_file(run: "ShardedRun[Any]", positions: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Divides positions by the file that holds each member; returns numbered arrays of indices into `positions`."""
    shard = np.repeat(np.arange(len(run.sizes)), run.sizes)[positions]
    return list(enumerate(np.flatnonzero(shard == number) for number in np.unique(shard)))
