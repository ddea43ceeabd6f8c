"""Shards of members, their outcomes, and the reports on them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import Int

from .._caller import caller

_MOST_NAMED = 8


class Shard(NamedTuple):
    """Some members: the shard's number, their positions and ids, and a function that makes its arguments."""

    number: int
    positions: np.ndarray
    ids: np.ndarray
    own: Callable[[], Any]


@final
@dataclasses.dataclass(frozen=True)
class ShardReport:
    """A report on one shard, passed to `on_shard` of [`eqx_ensemble.fleet.fit`][].

    **Attributes:**

    - `number`: the number of the shard, from 0 in the order of the members.
    - `ids`: `(members,)`, the ids of its members.
    - `attempts`: the number of attempts.
    - `seconds`: the duration of the last attempt on its worker; NaN if the worker died.
    - `status`: the number of members with each [`eqx_ensemble.train.Status`][], by name; empty if the worker died.
    - `error`: why the shard was abandoned; `None` if it was completed.
    """

    number: int
    ids: Int[np.ndarray, " members"]
    attempts: int
    seconds: float
    status: dict[str, int]
    error: BaseException | None


class Finished(NamedTuple):
    """The results of completed shards, in order; reports on abandoned shards; whether Ctrl-C ended the call."""

    results: list[tuple[Shard, Any]]
    lost: list[ShardReport]
    interrupted: bool


def members_text(ids: np.ndarray) -> str:
    """The ids of members in a message, at most eight of them."""
    listed = ", ".join(map(str, ids[:_MOST_NAMED].tolist()))
    return f"the members {listed}" + (f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else "")


def lost_message(finished: Finished, missing: np.ndarray | None = None) -> str:
    """The text of the warning or error that members are missing, by default those of abandoned shards."""
    lost = np.concatenate([shard.ids for shard in finished.lost]) if finished.lost else np.zeros(0, int)
    missing = lost if missing is None else missing
    lines = [f"`{caller()}` returns without {members_text(missing)}: their workers died."] if len(missing) else []
    if finished.interrupted:
        lines.append(f"`{caller()}` was interrupted: members of shards that were not done are missing.")
    if finished.lost and (len(missing) or finished.interrupted):
        error = finished.lost[-1].error
        lines.append(f"The last error was {type(error).__name__}: {error}")
    if finished.lost and not finished.results:
        lines.append(
            "No shard was completed: workers may have run out of memory, or did not start. A script whose executor "
            "spawns processes needs `if __name__ == '__main__':`."
        )
    return "\n".join(lines)


def check_some_done(finished: Finished, done: Any) -> None:
    """Raises the error of the last abandoned shard, or `KeyboardInterrupt`, if there is no result."""
    if len(done):
        return
    error = finished.lost[-1].error if finished.lost else None
    if error is None:
        raise KeyboardInterrupt
    error.add_note(lost_message(finished))
    raise error
