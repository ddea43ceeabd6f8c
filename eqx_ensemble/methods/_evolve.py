"""Rounds of training; after each, the worst members are replaced by copies of the best."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key

from .._check import check_function, check_key, check_positive_int
from .._ensemble import Ensemble, M
from .._ensemble._check import check_ensemble
from .._pytree import PyTree
from .._warnings import ignore_warnings
from ..distributed import to_host
from ..train._check_member import check_same_hyper
from ..train._hyper import hyper_arrays
from ..train._run import Run
from ..train.compiled._optimiser import Optimiser
from ..train.compiled._selection import reset_best
from ..train.data._data import is_batches
from . import population
from ._check import (
    check_fraction,
    check_hyper_given,
    check_on_diverge,
    check_options,
    check_validation_given,
    check_whole_epochs,
)
from ._past import Past
from ._population import Population
from ._rounds import Rounds
from ._scores import check_some_score

_STOPS = ("patience", "target", "max_steps", "max_seconds")


class Evolution(NamedTuple):
    """The rounds of a population.

    **Attributes:**

    - `hyper`: the initial hyper-parameters of all members.
    - `length`: the length of a round, as options of `fit`.
    - `keys`: one per round.
    - `fraction`, `explore`: the fraction of members replaced after a round, and the perturbation of hyper-parameters.
    """

    hyper: PyTree
    length: dict[str, Any]
    keys: Key[Array, " rounds"]
    fraction: float | int
    explore: Callable[..., Any]

    @property
    def one(self) -> PyTree:
        """The hyper-parameters of one member."""
        return jax.tree.map(lambda x: x[0], self.hyper)


def check_evolution(
    ensemble: Any,
    data: Any,
    options: dict[str, Any],
    *,
    hyper: Any,
    validation: Any,
    rounds: Any,
    epochs: Any,
    steps: Any,
    fraction: Any,
    explore: Any,
    key: Any,
    name: str,
) -> Evolution:
    """Checks the arguments of a call. Returns its rounds."""
    check_positive_int(rounds, "rounds", name=name)
    check_hyper_given(hyper, name=name)
    check_validation_given(validation, name=name)
    check_fraction(fraction, name=name)
    check_options(options, _STOPS, "all members train in every round", name=name)
    check_on_diverge(options.get("on_diverge"))
    check_whole_epochs(steps, is_batches=is_batches(data), name=name)
    check_ensemble(ensemble, name=name)
    check_function(explore, "explore", name=name, example="train.perturb")
    check_key(key, name=name)
    hyper = hyper_arrays(hyper, ensemble.num_members, name=name)
    plan = Evolution(hyper, {"epochs": epochs, "steps": steps}, jax.random.split(key, rounds), fraction, explore)
    check_same_hyper(plan.one, explore(plan.one, plan.keys[0]), name="explore")
    return plan


def evolve(
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    evolution: Evolution,
    saved: Rounds,
    *,
    key: Any,
    **options: Any,
) -> Population[M]:
    """Runs all rounds. Saved rounds are not trained again."""
    first = {
        "hyper": evolution.hyper,
        **{word: options.pop(word) for word in ("state", "trainable") if word in options},
    }

    def train_round(index: int, begun: Ensemble[M] | Run[M] = ensemble, **more: Any) -> Run[M]:
        more = more | (first if begun is ensemble else {})
        replaced = index < len(evolution.keys) - 1  # diverged members
        with ignore_warnings(".*diverged") if replaced else contextlib.nullcontext():
            return saved.fit(begun, loss, optimiser, data, key=key, **evolution.length, **options, **more)

    def resume(index: int, **saving: Any) -> tuple[Run[M], Past]:
        run = train_round(index, **saving)
        return run, Past() if index == 0 else Past.of(saved.decisions(index, Past().add(run).decisions()))

    index, (run, past) = saved.resume(resume)
    while True:
        past = past.add(run)
        ended = index == len(evolution.keys) - 1
        if ended or run.interrupted or not past.training.any():
            return past.population(run, ended=ended)
        check_some_score(past.scores[-1], past.training, name="methods.population_based_training")
        index += 1
        donors = population.truncation(
            past.scores[-1], past.training, fraction=evolution.fraction, mode=run.mode, key=evolution.keys[index]
        )
        ended_run, ended_past, past = run, past, past.descend(donors)
        saved.decide(index - 1, run, past.decisions)
        run = train_round(index, replace_members(run, donors, evolution.explore, key=key), **saved.saving(index))
        if run.interrupted and int(run.train_state.step) == int(ended_run.train_state.step):  # before its first step
            return ended_past.population(dataclasses.replace(ended_run, interrupted=True), ended=False)


def replace_members(run: Run, donors: np.ndarray, explore: Callable[..., Any], *, key: Any) -> Run:
    """Makes members copies of their donors, perturbs their hyper-parameters and resets their best weights."""
    replaced = np.flatnonzero(donors != np.arange(len(donors)))
    if len(replaced) == 0:
        return run
    state = population.set_hyper(population.clone(run.train_state, donors), replaced, explore, key=key)
    selection = reset_best(run.selection, state.moving, replaced)
    status, stopped_at = to_host(state.moving.status), to_host(state.moving.stopped_at)
    return dataclasses.replace(run, train_state=state, selection=selection, status=status, stopped_at=stopped_at)
