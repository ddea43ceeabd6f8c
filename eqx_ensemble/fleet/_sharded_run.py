import dataclasses
import errno
import os
from pathlib import Path
from typing import Any, Generic, NamedTuple, final

import numpy as np
from jaxtyping import Float, Int, Int8

from .._caller import caller
from .._check import check_sequence, kind_text
from .._ensemble import Ensemble, M, join, take
from .._files import as_like, check_like_given, load
from ..checkpoint._engine import as_path, check_valid, explain_record, has_call, read_manifest
from ..train._engine import Mode, Status, data_frame, rank_members, status_names
from ._columns import Columns, count_status, join_columns
from ._divide import resize
from ._folder import SavedCall, load_call, shard_path
from ._shard import ShardReport

_MOST_NAMED = 8


def ids_text(ids: np.ndarray) -> str:
    """Ids in a message, at most eight of them."""
    return ", ".join(map(str, ids[:_MOST_NAMED].tolist())) + (", ..." if len(ids) > _MOST_NAMED else "")


def check_wanted_ids(ids: Any, there: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Raises unless `ids` are different ids of saved members. Returns them as an array."""
    if isinstance(ids, int | np.integer):
        raise TypeError(f"`{caller()}` needs a list of ids, got {ids}.\nWrite `ids=[{ids}]`.")
    wanted = np.asarray(ids if isinstance(ids, np.ndarray) else check_sequence(ids, "ids", of="integers"))
    if wanted.ndim != 1 or not len(wanted) or not np.issubdtype(wanted.dtype, np.integer):
        raise TypeError(
            f"`{caller()}` needs `ids` to be integers `(members,)`, at least one, got {kind_text(ids)} of shape "
            f"{wanted.shape}.\nFor members by a condition: `ids=run.ids[condition]`."
        )
    unique, counts = np.unique(wanted, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"`{caller()}` needs different `ids`; repeated: {ids_text(unique[counts > 1])}.")
    absent = wanted[~np.isin(wanted, there)]
    if len(absent):
        lost = absent[np.isin(absent, missing)]
        never = absent[~np.isin(absent, missing)]
        lines = [f"`{caller()}` found no members with some of these `ids`."]
        if len(never):
            lines.append(f"  not in this run: {ids_text(never)}")
        if len(lost):
            lines.append(f"  in incomplete shards: {ids_text(lost)}")
            lines.append("Rerun the call of `fleet.fit` to complete them.")
        raise ValueError("\n".join(lines))
    return wanted


# Members in the files of shards: which to read, in which order and shapes.


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
        whole = parts[0] if len(parts) == 1 else join(parts)
        return whole if np.array_equal(self.order, np.arange(len(self.order))) else take(whole, self.order)

    def _part(self, path: Path, rows: np.ndarray, ids: np.ndarray, size: int) -> tuple[Ensemble[Any], Any]:
        whole = np.array_equal(rows, np.arange(size))
        found = load(path, resize(self.like, size), members=None if whole else rows.tolist())
        ensemble, state = found if isinstance(found, tuple) else (found, None)
        if not np.array_equal(ensemble.ids, ids):
            raise ValueError(
                f"`{path}` holds members {ids_text(np.asarray(ensemble.ids))}, and the run needs {ids_text(ids)} "
                "there: it was renamed or replaced.\nRerun the call of its folder."
            )
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
        paths=tuple(shard_path(run.folder, run.shards[i]) for i in found),
        rows=tuple(np.split(row[order], first[1:])),
        ids=tuple(np.split(run.ids[positions][order], first[1:])),
        sizes=tuple(run.sizes[i] for i in found),
        order=back,
    )


def by_file(run: "ShardedRun[Any]", positions: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Divides positions by the file that holds each member; returns numbered arrays of indices into `positions`."""
    shard = np.repeat(np.arange(len(run.sizes)), run.sizes)[positions]
    return list(enumerate(np.flatnonzero(shard == number) for number in np.unique(shard)))


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardedRun(Generic[M]):
    """A run whose members are in files, one per shard: the result of [`eqx_ensemble.fleet.fit`][] with `save`.

    [`eqx_ensemble.fleet.predict`][] and [`eqx_ensemble.fleet.map_members`][] take it in place of an ensemble.

    **Attributes:**

    - `folder`: the folder, with a checkpoint of [`eqx_ensemble.save`][] for each shard: `folder/shard-000000` and so
        on.
    - `ids`, `missing`: the ids of the members of completed shards `(members,)`, and those of the others.
    - `lost`: an [`eqx_ensemble.fleet.ShardReport`][] for each shard that this call abandoned.
    - `status`, `stopped_at`, `fault`, `best_step`, `best_score`: as of an [`eqx_ensemble.Run`][].
    - `loss`: `(members,)`, the mean loss of each member's last epoch.
    - `hyper`: the hyper-parameters, each array `(members, ...)`, by their column names in the table.
    - `mode`: whether lower (`"min"`) or higher (`"max"`) validation scores are better.
    - `interrupted`, `seconds`: whether Ctrl-C ended the call early, and its duration.
    - `shards`, `sizes`: the numbers of the completed shards, and their numbers of members.
    - `like`: the shapes of the members to read.
    """

    folder: Path
    ids: Int[np.ndarray, " members"]
    missing: Int[np.ndarray, " missing"]
    lost: tuple[ShardReport, ...]
    status: Int8[np.ndarray, " members"]
    stopped_at: Int[np.ndarray, " members"]
    fault: np.ndarray
    loss: Float[np.ndarray, " members"]
    best_step: Int[np.ndarray, " members"] | None
    best_score: Float[np.ndarray, " members"] | None
    hyper: dict[str, np.ndarray]
    mode: Mode
    interrupted: bool
    seconds: float
    shards: tuple[int, ...]
    sizes: tuple[int, ...]
    like: Any

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {word}" for word, count in count_status(self.status).items() if count)
        lines = [f"ShardedRun of {len(self.ids)} members in {len(self.shards)} files", f"  status   {counts}"]
        if len(self.missing):
            lines.append(f"  missing  {len(self.missing)} (id {ids_text(self.missing)})")
        return "\n".join([*lines, f"  folder   {self.folder}"])

    @property
    def healthy_ids(self) -> Int[np.ndarray, " healthy"]:
        """The ids of the members that did not diverge."""
        return self.ids[self.status != Status.DIVERGED]

    def load(self, ids: Any = None) -> Ensemble[M]:
        """Reads the ensemble of some members from any shards.

        **Arguments:**

        - `ids`: the ids of the members to read, in this order; by default all.

        **Raises:** `ValueError` for ids that are missing, unknown or repeated; `TypeError` unless `ids` are integers
        `(members,)`, at least one.
        """
        return self.load_with_state(ids)[0]

    def load_with_state(self, ids: Any = None) -> tuple[Ensemble[M], Any]:
        """As [`eqx_ensemble.fleet.ShardedRun.load`][], with the stacked `equinox.nn.State`, `None` for stateless
        members.
        """
        if ids is None:
            return locate(self, np.arange(len(self.ids))).read()
        wanted = check_wanted_ids(ids, self.ids, self.missing)
        order = np.argsort(self.ids, kind="stable")
        return locate(self, order[np.searchsorted(self.ids, wanted, sorter=order)]).read()

    def best(self, count: int = 1, *, by: Any = None, mode: Mode | None = None) -> Ensemble[M]:
        """Reads the ensemble of the best members, the best one first, without diverged ones.

        Arguments and errors are those of [`eqx_ensemble.Run.best`][]. For stateful members:
        `run.load_with_state(run.best(count).ids)`.
        """
        return self.load(self.ids[rank_members(self, count, by, mode)])

    def table(self, *, as_frame: bool = False) -> Any:
        """A table of one row per member, as of [`eqx_ensemble.Run.table`][]: a dict of arrays or, if `as_frame`, a
        data frame.
        """
        columns = {"member": self.ids, **self.hyper, "loss": self.loss}
        if self.best_score is not None and self.best_step is not None:
            columns |= {"validation": self.best_score, "best_step": self.best_step}
        columns |= {"status": status_names(self.status), "stopped_at": self.stopped_at}
        return data_frame(columns) if as_frame else columns


def run_of_columns(
    call: SavedCall, done: dict[int, Columns], like: Any, *, lost: tuple[ShardReport, ...], interrupted: bool,
    seconds: float,
) -> ShardedRun[Any]:  # fmt: skip
    """The run of the completed shards."""
    numbers = sorted(done)
    with explain_record(call.folder):
        columns = join_columns([done[number] for number in numbers])
        ids = np.concatenate([call.ids[call.positions()[number]] for number in numbers])
        check_valid("shards hold other members than its call", holds=np.array_equal(columns.ids, ids))
    sizes = tuple(len(done[number].ids) for number in numbers)
    return ShardedRun(
        folder=call.folder,
        missing=call.ids[~np.isin(call.ids, columns.ids)],
        lost=lost,
        interrupted=interrupted,
        seconds=seconds,
        like=like,
        shards=tuple(numbers),
        sizes=sizes,
        **columns._asdict(),
    )


def open_run(folder: str | os.PathLike[str], like: Any) -> ShardedRun[Any]:
    """Opens a folder in which [`eqx_ensemble.fleet.fit`][] saved members: [an example](../workers.md#members-in-files).

    **Arguments:**

    - `folder`: the argument `save` of that call.
    - `like`: as for [`eqx_ensemble.load`][]: the function that makes one member from a key, or an ensemble of such
        members (for stateful members a pair of an ensemble and its state), of any number.

    **Returns:** [`eqx_ensemble.fleet.ShardedRun`][], with the members of the completed shards.

    **Raises:** `FileNotFoundError` if `fleet.fit` saved nothing in the folder; `ValueError` if no shard is complete, or
    if files do not belong to the run; `TypeError` for an invalid `like`.
    """
    path = as_path(folder)
    if not has_call(path):
        exists = "holds no run of it" if os.path.isdir(path) else "does not exist"
        raise FileNotFoundError(
            errno.ENOENT, f"`{caller()}` needs a folder of `fleet.fit(save=...)`, and `{path}` {exists}"
        )
    check_like_given(like)
    call = load_call(path)
    done = {number: store.read() for number, store in call.complete().items()}
    if not done:
        raise ValueError(
            f"`{caller()}` needs at least one complete shard, and `{path}` has none.\n"
            "Rerun the call of `fleet.fit` that started it."
        )
    like = as_like(like, read_manifest(shard_path(path, min(done))))
    if not isinstance(like[0] if isinstance(like, tuple) and len(like) == 2 else like, Ensemble):
        raise TypeError(
            f"`{caller()}` needs as `like` the function that makes one member from a key, or an `Ensemble`; got "
            f"{kind_text(like)}."
        )
    return run_of_columns(call, done, like, lost=(), interrupted=False, seconds=0.0)
