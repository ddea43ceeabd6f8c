import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any, Generic

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int, Key

from .._caller import caller
from .._check import check_function, check_key, check_positive_int
from .._ensemble import Ensemble, M, check_ensemble
from .._pytree import PyTree
from .._warnings import ignore_warnings, warn
from ..distributed import to_host
from ..train import perturb
from ..train._engine import (
    Checkpoint,
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
from ._rounds import begin, check_some_score, last_scores, round_in


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


# Rounds of training; after each, the worst members are replaced by copies of the best.

_STOPS = ("patience", "stop")


def check_explore(explore: Callable[..., Any], one: PyTree, key: Any) -> None:
    """Raises unless `explore` returns hyper-parameters like those it is given."""
    check_same_hyper(one, explore(one, key))


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
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
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
    - `explore`: `explore(hyper, key) -> hyper`, a function of these alone, perturbs one copy, such as
        [`eqx_ensemble.methods.population.perturb_hyper`][], which respects ranges.
    - `checkpoint`: a folder with a file for each round, as for [`eqx_ensemble.methods.successive_halving`][].
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
    keys = jax.random.split(key, rounds)
    one = jax.tree.map(lambda x: x[0], hyper)
    check_explore(explore, one, keys[0])
    own = {"epochs": epochs, "steps": steps, "fraction": fraction}
    folder = begin(checkpoint, data, method="population_based_training", **own)
    first = {"hyper": hyper} | {word: options.pop(word) for word in ("state", "trainable") if word in options}
    options |= {"validation": validation, "epochs": epochs, "steps": steps, "key": key}
    begun, scores, lineage, past = ensemble, [], [], []
    while True:
        index = len(scores)
        is_last = index == rounds - 1
        with contextlib.nullcontext() if is_last else ignore_warnings(".*diverged"):  # they are replaced
            run = fit(begun, loss, optimiser, data, **first, **options, checkpoint=round_in(folder, index))
        first, state = {}, run.train_state
        ids, training = np.asarray(state.ids), to_host(state.status) == Status.OK
        scores.append(last_scores(run))
        past.append(to_host(state.hyper))
        donors = np.arange(len(ids))
        is_over = is_last or run.interrupted or not training.any()
        if not is_over:
            check_some_score(scores[-1], training)
            donors = population.truncation(scores[-1], training, fraction=fraction, mode=run.mode, key=keys[index + 1])
            begun = replace_members(run, donors, explore, key=key)
        lineage.append(ids[donors])
        if is_over:
            break
    if not is_last and not training.any():
        warn(diverged_message(ids, run.stopped_at, run.fault))
    run = dataclasses.replace(run, rows=None)  # a copy was trained on the rows of its donor too
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *past)
    return Population(run=run, scores=np.stack(scores), lineage=np.stack(lineage), hyper=stacked)
