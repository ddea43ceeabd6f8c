"""The finished rounds of each shard of a population: runs, scores, hyper-parameters and donors of its members."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..distributed import to_host
from ..methods import population
from ..methods._evolve import Evolution, replace_members
from ..methods._population import Population
from ..train._run import Run
from ..train._state import TrainState
from ..train._status import Status
from ..train.compiled._windows import Windows
from ..train.host._record import History
from ._divide import take_members
from ._join import join_runs, pad_columns
from ._rung import in_order
from ._stop_members import with_status


class Round(NamedTuple):
    """A finished round of a shard.

    **Attributes:**

    - `run`: the run at its end, for the last finished round; `None` for earlier rounds.
    - `scores`: `(members,)`, the validation scores at its end.
    - `hyper`: the hyper-parameters during it.
    - `donors`: `(members,)`, the positions of the donors after it.
    """

    run: Any
    scores: np.ndarray
    hyper: Any
    donors: np.ndarray


class ShardRounds(NamedTuple):
    """The finished rounds of all shards.

    **Attributes:**

    - `ids`: the ids of all members.
    - `members`: the positions of the members of each shard.
    - `rounds`: the finished rounds of each shard.
    - `abandoned`: the shards that failed after all retries; their members are neither donors nor replaced.
    """

    ids: np.ndarray
    members: list[np.ndarray]
    rounds: list[list[Round]]
    abandoned: set[int]

    @property
    def shards(self) -> list[int]:
        """The indices of shards with at least one finished round."""
        return [index for index, rounds in enumerate(self.rounds) if rounds]


def choose_donors(past: ShardRounds, index: int, evolution: Evolution) -> np.ndarray:
    """The positions of the donors of a shard's members, by truncation selection among the members of all shards."""
    begun = [(past.members[i], past.rounds[i][-1]) for i in past.shards if i not in past.abandoned]
    known = np.concatenate([members for members, _ in begun])
    training = np.concatenate([to_host(last.run.train_state.status) == Status.OK for _, last in begun])
    chosen = population.truncation(
        np.concatenate([last.scores for _, last in begun]),
        training,
        fraction=evolution.fraction,
        mode=begun[0][1].run.mode,
        key=evolution.keys[len(past.rounds[index])],
    )
    return known[chosen[np.isin(known, past.members[index])]]


def copy_donors(
    past: ShardRounds, index: int, donors: np.ndarray, explore: Callable[..., Any], *, windows: Windows, key: Any
) -> Run[Any]:
    """The last run of a shard, with members replaced by their donors, which may be in other shards and rounds."""
    own, members = _extend_to_end(past, index, donors, windows), past.members[index]
    others = np.setdiff1d(donors, members)
    together = join_runs([own, *_runs_of(past, others)], interrupted=False, seconds=0.0)
    state = together.train_state
    state = TrainState(state.moving, state.fixed, own.train_state.shared, state.ids, own.train_state.step)
    index_at = {position: i for i, position in enumerate([*members.tolist(), *others.tolist()])}
    index_of = np.array([index_at[position] for position in [*donors.tolist(), *others.tolist()]])
    found = replace_members(dataclasses.replace(together, train_state=state), index_of, explore, key=key)
    found = take_members(found, np.arange(len(members)))
    return with_status(dataclasses.replace(own, train_state=found.train_state, selection=found.selection))


def _extend_to_end(past: ShardRounds, index: int, donors: np.ndarray, windows: Windows) -> Run[Any]:
    """The last run of a shard, extended to the end of its round: it is shorter where all members diverged."""
    run, count = past.rounds[index][-1].run, len(past.rounds[index])
    others = [i for i, members in enumerate(past.members) if i != index and np.isin(members, donors).any()]
    if (to_host(run.train_state.status) == Status.OK).any() or not others:
        return run
    rounds = past.rounds[others[0]]
    length = int(rounds[-1].run.train_state.step) // len(rounds)
    step = np.concatenate([windows.ends(length * i, length) for i in range(count)])
    history = dataclasses.replace(run.history, **_with_columns(run.history, len(step)), step=step)
    state = run.train_state
    state = TrainState(state.moving, state.fixed, state.shared, state.ids, jnp.int32(length * count))
    return dataclasses.replace(run, train_state=state, history=history, data_state=None)


def _with_columns(history: History, count: int) -> dict[str, Any]:
    loss, aux = jax.tree.map(lambda curves: pad_columns(curves, count), (history.loss, history.aux))
    return {"loss": loss, "aux": aux}


def _runs_of(past: ShardRounds, positions: np.ndarray) -> list[Run[Any]]:
    """The last runs of the members at some positions, in order."""
    found = []
    for members, rounds in zip(past.members, past.rounds, strict=True):
        index = np.flatnonzero(np.isin(members, positions))
        found += [take_members(rounds[-1].run, index)] if len(index) else []
    return found


def population_of(past: ShardRounds, *, interrupted: bool, seconds: float) -> Population[Any]:
    """The members with at least one finished round; NaN scores for rounds that they have not finished."""
    begun = past.shards
    ids = past.ids[np.concatenate([past.members[i] for i in begun])]
    run = in_order([past.rounds[i][-1].run for i in begun], ids)
    run = dataclasses.replace(run, rows=None, interrupted=interrupted, seconds=seconds)
    count = max(len(past.rounds[i]) for i in begun)
    rows = [_rows(past, i, count) for i in begun]
    scores, lineage, hyper = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *rows)
    return Population(run=run, scores=scores, lineage=lineage, hyper=hyper)


def _rows(past: ShardRounds, index: int, count: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """The scores, lineage and hyper-parameters of a shard, each `(rounds, members, ...)`."""
    rounds, own = past.rounds[index], past.members[index]
    missing, unknown = count - len(rounds), np.full_like(rounds[0].scores, np.nan)
    scores = np.stack([one.scores for one in rounds] + [unknown] * missing)
    lineage = past.ids[np.stack([one.donors for one in rounds] + [own] * missing)]
    hypers = [one.hyper for one in rounds] + [rounds[-1].hyper] * missing
    return scores, lineage, jax.tree.map(lambda *parts: np.stack(parts), *hypers)
