"""The rounds that shards of a population have ended, and who descends from whom."""

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
from ._cut import cut_start
from ._join import join_runs, pad_columns
from ._rung import in_order, with_status


class Round(NamedTuple):
    """A round that a shard has ended.

    **Attributes:**

    - `run`: its run; `None` once the shard has ended a later one.
    - `scores`, `hyper`: of its members.
    - `donors`: their donors after it, by position.
    """

    run: Any
    scores: np.ndarray
    hyper: Any
    donors: np.ndarray


class ShardRounds(NamedTuple):
    """All shards.

    **Attributes:**

    - `ids`: the ids of all members.
    - `members`: the positions of the members of each shard.
    - `rounds`: the rounds that each shard has ended.
    - `given_up`: the shards whose workers died too often: their members are neither donors nor replaced.
    """

    ids: np.ndarray
    members: list[np.ndarray]
    rounds: list[list[Round]]
    given_up: set[int]

    @property
    def shards(self) -> list[int]:
        """The shards that have ended a round."""
        return [index for index, rounds in enumerate(self.rounds) if rounds]


def choose_donors(past: ShardRounds, index: int, evolution: Evolution) -> np.ndarray:
    """The positions of the donors of a shard's members, chosen among all that have ended a round and go on."""
    begun = [(past.members[i], past.rounds[i][-1]) for i in past.shards if i not in past.given_up]
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
    """The last run of a shard, with copies of donors, which may be of other shards and at other steps."""
    own, members = _at_end(past, index, donors, windows), past.members[index]
    others = np.setdiff1d(donors, members)
    together = join_runs([own, *_runs_of(past, others)], interrupted=False, seconds=0.0)
    state = together.train_state
    state = TrainState(state.moving, state.fixed, own.train_state.shared, state.ids, own.train_state.step)
    place = {position: i for i, position in enumerate([*members.tolist(), *others.tolist()])}
    index_of = np.array([place[position] for position in [*donors.tolist(), *others.tolist()]])
    found = replace_members(dataclasses.replace(together, train_state=state), index_of, explore, key=key)
    found = cut_start(found, np.arange(len(members)))
    return with_status(dataclasses.replace(own, train_state=found.train_state, selection=found.selection))


def _at_end(past: ShardRounds, index: int, donors: np.ndarray, windows: Windows) -> Run[Any]:
    """The last run of a shard at the end of its round, which comes earlier where all its members diverge."""
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
    """The last runs of some members, in their order."""
    found = []
    for members, rounds in zip(past.members, past.rounds, strict=True):
        index = np.flatnonzero(np.isin(members, positions))
        found += [cut_start(rounds[-1].run, index)] if len(index) else []
    return found


def population_of(past: ShardRounds, *, interrupted: bool, seconds: float) -> Population[Any]:
    """All members that have ended a round; NaN where one has not ended others."""
    begun = past.shards
    ids = past.ids[np.concatenate([past.members[i] for i in begun])]
    run = in_order([past.rounds[i][-1].run for i in begun], ids)
    run = dataclasses.replace(run, rows=None, interrupted=interrupted, seconds=seconds)
    count = max(len(past.rounds[i]) for i in begun)
    rows = [_rows(past, i, count) for i in begun]
    scores, lineage, hyper = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *rows)
    return Population(run=run, scores=scores, lineage=lineage, hyper=hyper)


def _rows(past: ShardRounds, index: int, count: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """Scores, lineage and hyper-parameters of a shard, each `(rounds, members, ...)`."""
    rounds, own = past.rounds[index], past.members[index]
    missing, unknown = count - len(rounds), np.full_like(rounds[0].scores, np.nan)
    scores = np.stack([one.scores for one in rounds] + [unknown] * missing)
    lineage = past.ids[np.stack([one.donors for one in rounds] + [own] * missing)]
    hypers = [one.hyper for one in rounds] + [rounds[-1].hyper] * missing
    return scores, lineage, jax.tree.map(lambda *parts: np.stack(parts), *hypers)
