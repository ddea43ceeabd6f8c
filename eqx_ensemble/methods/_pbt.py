import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key

from .._caller import caller
from .._check import check_function, check_key, check_positive_int
from .._ensemble import Ensemble, M, check_ensemble
from .._pytree import PyTree
from .._warnings import ignore_warnings, warn
from ..checkpoint import Checkpoints
from ..checkpoint._engine import lock_folder
from ..distributed import to_host
from ..train import perturb
from ..train._engine import (
    Optimiser,
    Run,
    Status,
    check_same_hyper,
    diverged_message,
    fit,
    hyper_arrays,
    is_batches,
    reset_best,
)
from . import population
from ._check import check_fraction, check_indices, check_options, check_validation_given, check_whole_epochs
from ._rounds import Rounds, check_saving, check_some_score, last_scores


class Population(eqx.Module, Generic[M]):
    """The result of [`eqx_ensemble.methods.population_based_training`][].

    **Attributes:**

    - `run`: the run of all rounds; `run.ensemble` has each member's best weights since it was last replaced.
    - `scores`: `(rounds, members)`, the validation scores at the end of each round.
    - `lineage`: `(rounds, members)`, the id of each member's donor after each round; its own id if not replaced.
    - `hyper`: the hyper-parameters during each round, each array `(rounds, members, ...)`.
    """

    run: Run[M]
    scores: Float[np.ndarray, "rounds members"]
    lineage: Int[np.ndarray, "rounds members"]
    hyper: PyTree

    def __repr__(self) -> str:
        return f"{len(self.scores)} rounds of population-based training\n{self.run!r}"

    def ancestors(self, index: int) -> Int[np.ndarray, " rounds"]:
        """The ids of the members whose weights the member at `index` descends from, one per round, `(rounds,)`.

        Their hyper-parameters in these rounds are the schedule that it was trained with.
        """
        ids = np.asarray(self.run.train_state.ids).tolist()
        check_indices([index], len(ids))
        found = [ids[index]]
        for row in self.lineage[-2::-1]:
            found.append(int(row[ids.index(found[-1])]))
        return np.array(found[::-1])


class Past(NamedTuple):
    """The completed rounds of a population: scores, ids of donors and hyper-parameters, one entry per round.

    `training` marks the members that are still training at the end of the last round.
    """

    scores: tuple[np.ndarray, ...] = ()
    lineage: tuple[np.ndarray, ...] = ()
    hyper: tuple[PyTree, ...] = ()
    training: np.ndarray = np.ones(0, bool)

    @classmethod
    def of(cls, decisions: dict[str, Any]) -> "Past":
        """The rounds saved as `decisions`."""
        count = len(decisions["scores"])
        hyper = tuple(jax.tree.map(lambda x: x[i], decisions["hyper"]) for i in range(count))  # noqa: B023
        return cls(tuple(decisions["scores"]), tuple(decisions["lineage"]), hyper)

    def add(self, run: Run[Any]) -> "Past":
        """Adds a completed round, before members are replaced."""
        state = run.train_state
        return Past(
            (*self.scores, last_scores(run)),
            (*self.lineage, np.asarray(state.ids)),
            (*self.hyper, to_host(state.hyper)),
            to_host(state.status) == Status.OK,
        )

    def descend(self, donors: np.ndarray) -> "Past":
        """Adds the donors after the last round, one index per member."""
        return self._replace(lineage=(*self.lineage[:-1], self.lineage[-1][donors]))

    def decisions(self) -> dict[str, Any]:
        """All rounds as arrays `(rounds, members, ...)`."""
        hyper = jax.tree.map(lambda *parts: np.stack(parts), *self.hyper)
        return {"scores": np.stack(self.scores), "lineage": np.stack(self.lineage), "hyper": hyper}

    def population(self, run: Run[Any], *, ended: bool) -> Population[Any]:
        """The result; warns if all members had diverged before the last round."""
        if not ended and not self.training.any():
            warn(diverged_message(self.lineage[-1], run.stopped_at, run.fault))
        run = dataclasses.replace(run, rows=None)  # a copy was trained on the rows of its donor too
        return Population(run=run, **self.decisions())


# Rounds of training; after each, the worst members are replaced by copies of the best.

_STOPS = ("patience", "stop")


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


def check_explore(plan: Evolution) -> None:
    """Raises unless `explore` returns hyper-parameters like those it is given."""
    check_same_hyper(plan.one, plan.explore(plan.one, plan.keys[0]))


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
        check_some_score(past.scores[-1], past.training)
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


def population_based_training(
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    hyper: PyTree,
    validation: PyTree,
    rounds: int,
    epochs: int | None = None,
    steps: int | None = None,
    fraction: float | int = 0.2,
    explore: Callable[[PyTree, Key[Any, ""]], PyTree] = perturb,
    checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
    fit: Callable[..., Run[Any]] = fit,
    key: Any,
    **options: Any,
) -> Population[M]:
    """Population-based training: replaces the worst members by copies of the best, with perturbed hyper-parameters.

    After each round but the last, each of the worst members, and each that diverged, copies one of the best
    ([`eqx_ensemble.methods.population.truncation`][]).

    **Arguments:**

    - `ensemble`, `loss`, `optimiser`, `data`, `hyper`, `validation`, `options`: as for [`eqx_ensemble.fit`][], without
        options that stop or revive members.
    - `rounds`: the number of rounds.
    - `epochs` or `steps`: the length of one round.
    - `fraction`: the fraction of members that are replaced after a round, rounded up.
    - `explore`: `explore(hyper, key) -> hyper` perturbs one copy, such as
        [`eqx_ensemble.methods.population.perturb_hyper`][], which respects ranges.
    - `checkpoint`, `fit`: as for [`eqx_ensemble.methods.successive_halving`][].
    - `key`: the root key.

    **Returns:** [`eqx_ensemble.methods.Population`][]; after Ctrl-C, of the rounds so far.

    ```python
    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1)}
    found = ee.methods.population_based_training(
        ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 8, key=key),
        loss,
        lambda hyper: optax.adam(hyper["lr"]),
        jnp.ones((64, 3)),
        hyper=ee.sweep.draw(ranges, 8, key=key),
        validation=jnp.ones((16, 3)),
        rounds=3,
        epochs=2,
        explore=ee.methods.population.perturb_hyper(ranges),
        key=key,
    )
    found.run.best()
    found.lineage  # (3, 8)
    ```

    ??? cite
        [Jaderberg et al. 2017](https://arxiv.org/abs/1711.09846)
    """
    check_saving(checkpoint, data)
    check_positive_int(rounds, "rounds")
    if hyper is None:
        raise TypeError(f"`{caller()}` needs `hyper`, the hyper-parameters to search.")
    check_validation_given(validation)
    check_fraction(fraction)
    check_options(options, _STOPS, "all members train in every round")
    if options.get("on_diverge") not in (None, "freeze", "raise"):
        raise TypeError(
            f"`{caller()}` does not take `on_diverge` to revive members: it replaces diverged members after each round."
        )
    check_whole_epochs(steps, is_batches=is_batches(data))
    check_ensemble(ensemble)
    check_function(explore, "explore", example="train.perturb")
    check_key(key)
    hyper = hyper_arrays(hyper, ensemble.num_members)
    plan = Evolution(hyper, {"epochs": epochs, "steps": steps}, jax.random.split(key, rounds), fraction, explore)
    check_explore(plan)
    own = {"rounds": rounds, **plan.length, "fraction": fraction}
    saved = Rounds(checkpoint, own=own, name="methods.population_based_training", fit=fit)
    saved.add_function("explore", explore, plan.one, plan.keys[0])
    with lock_folder(saved.folder):
        return evolve(ensemble, loss, optimiser, data, plan, saved, **options, validation=validation, key=key)
