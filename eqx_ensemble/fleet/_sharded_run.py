import dataclasses
from pathlib import Path
from typing import Any, Generic, final

import numpy as np
from jaxtyping import Float, Int, Int8

from .._ensemble import Ensemble, M
from ..checkpoint._check_record import check_valid, explain_record
from ..train._rank import rank_members
from ..train._status import Status, status_names
from ..train._summary import data_frame
from ..train.compiled._selection import Mode
from ._check_saved import check_wanted_ids, ids_text
from ._columns import Columns, count_status, join_columns
from ._folder import SavedCall
from ._shard import ShardReport
from ._stored import locate


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardedRun(Generic[M]):
    """A run whose members are in files, one per shard: the result of [`eqx_ensemble.fleet.fit`][] with `save`.

    Only a few numbers per member are in memory. [`eqx_ensemble.fleet.predict`][] and
    [`eqx_ensemble.fleet.map_members`][] take it in place of an ensemble, and read the members on the workers.

    **Attributes:**

    - `folder`: the folder. `folder/shard-000000` and so on are checkpoints of [`eqx_ensemble.save`][], each of an
        ensemble, or of an ensemble and its state.
    - `ids`: `(members,)`, the ids of the members of completed shards.
    - `missing`: the ids of the other members, of shards that were abandoned or incomplete when the call ended.
    - `lost`: the shards that this call abandoned, each an [`eqx_ensemble.fleet.ShardReport`][] with the reason.
    - `status`, `stopped_at`, `fault`, `best_step`, `best_score`: as of an [`eqx_ensemble.Run`][].
    - `loss`: `(members,)`, the mean loss of each member's last epoch. Other losses are not kept.
    - `hyper`: the hyper-parameters, each array `(members, ...)`, by their column names in the table.
    - `mode`: whether lower (`"min"`) or higher (`"max"`) validation scores are better.
    - `interrupted`: whether Ctrl-C ended the call early.
    - `seconds`: the duration of the call, 0 after [`eqx_ensemble.fleet.open_run`][].
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
        """Reads members from any shards.

        **Arguments:**

        - `ids`: the ids of the members to read, in this order; by default all.

        **Returns:** the ensemble of these members. Other members are not read.

        **Raises:** `ValueError`, which names them, for ids that are missing, unknown or repeated; `TypeError` unless
        `ids` are integers `(members,)`, at least one.
        """
        return self.load_with_state(ids)[0]

    def load_with_state(self, ids: Any = None) -> tuple[Ensemble[M], Any]:
        """Reads members and their stacked `equinox.nn.State`, `None` for stateless members.

        **Arguments:** as for [`eqx_ensemble.fleet.ShardedRun.load`][].

        **Returns:** the ensemble and the state.

        **Raises:** as for [`eqx_ensemble.fleet.ShardedRun.load`][].
        """
        if ids is None:
            return locate(self, np.arange(len(self.ids))).read()
        wanted = check_wanted_ids(ids, self.ids, self.missing, name="fleet.ShardedRun.load")
        order = np.argsort(self.ids, kind="stable")
        return locate(self, order[np.searchsorted(self.ids, wanted, sorter=order)]).read()

    def best(self, count: int = 1, *, by: Any = None, mode: Mode | None = None) -> Ensemble[M]:
        """Reads the best members, the best one first, without diverged ones.

        **Arguments:** as of [`eqx_ensemble.Run.best`][].

        **Returns:** the ensemble of these members. Stateful members: `run.load_with_state(run.best(count).ids)`.

        **Raises:** as [`eqx_ensemble.Run.best`][], but not for stateful members.
        """
        return self.load(self.ids[rank_members(self, count, by, mode, name="fleet.ShardedRun.best")])

    def table(self, *, as_frame: bool = False) -> Any:
        """A table of one row per member: id, hyper-parameters, scores, status.

        **Arguments:**

        - `as_frame`: return a `pandas.DataFrame` (extra `pandas`).

        **Returns:** a dict from column names to arrays `(members, ...)`, or a data frame.
        """
        columns = {"member": self.ids, **self.hyper, "loss": self.loss}
        if self.best_score is not None and self.best_step is not None:
            columns |= {"validation": self.best_score, "best_step": self.best_step}
        columns |= {"status": status_names(self.status), "stopped_at": self.stopped_at}
        return data_frame(columns) if as_frame else columns


def run_of_columns(
    folder: Path,
    call: SavedCall,
    done: dict[int, Columns],
    like: Any,
    *,
    lost: tuple[ShardReport, ...],
    interrupted: bool,
    seconds: float,
) -> ShardedRun[Any]:
    """The run of the completed shards."""
    numbers = sorted(done)
    with explain_record(folder):
        columns = join_columns([done[number] for number in numbers])
        ids = np.concatenate([call.ids[call.positions()[number]] for number in numbers])
        check_valid("shards hold other members than its call", holds=np.array_equal(columns.ids, ids))
    sizes = tuple(len(done[number].ids) for number in numbers)
    return ShardedRun(
        folder=folder,
        missing=call.ids[~np.isin(call.ids, columns.ids)],
        lost=lost,
        interrupted=interrupted,
        seconds=seconds,
        like=like,
        shards=tuple(numbers),
        sizes=sizes,
        **columns._asdict(),
    )
