import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Generic

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int, Key

from .._check import check_function, check_key, check_positive_int
from .._ensemble import Ensemble, M
from .._ensemble._check import check_ensemble
from .._pytree import PyTree
from .._warnings import ignore_warnings, warn
from ..distributed import to_host
from ..train import perturb
from ..train._check_member import check_same_hyper
from ..train._check_run import diverged_message
from ..train._fit import fit
from ..train._hyper import hyper_arrays
from ..train._run import Run
from ..train._status import Status
from ..train.compiled._optimiser import Optimiser
from ..train.compiled._selection import reset_best
from ..train.data._data import is_batches
from . import population
from ._check import (
    check_fraction,
    check_hyper_given,
    check_indices,
    check_no_checkpoint,
    check_on_diverge,
    check_options,
    check_validation_given,
    check_whole_epochs,
)
from ._scores import last_scores

_STOPS = ("patience", "target", "max_steps", "max_seconds")


class Population(eqx.Module, Generic[M]):
    """What [`eqx_ensemble.methods.population_based_training`][] returns.

    **Attributes:**

    - `run`: the run of all rounds; `run.ensemble` holds each member's best weights since it was last replaced.
    - `scores`: `(rounds, members)`, the validation scores at the end of each round.
    - `lineage`: `(rounds, members)`, the id of each member's donor after each round: its own id where it was not
        replaced.
    - `hyper`: the hyper-parameters during each round, each array `(rounds, members, ...)`.
    """

    run: Run[M]
    scores: Float[np.ndarray, "rounds members"]
    lineage: Int[np.ndarray, "rounds members"]
    hyper: PyTree

    def __repr__(self) -> str:
        return f"{len(self.scores)} rounds of population-based training\n{self.run!r}"

    def ancestors(self, index: int) -> Int[np.ndarray, " rounds"]:
        """The ids of the members whose weights the member at `index` descends from, one per round.

        Their hyper-parameters in these rounds are the schedule that it was trained with.

        **Arguments:**

        - `index`: the member's position in the ensemble.

        **Returns:** ids `(rounds,)`, the last one its own.
        """
        ids = np.asarray(self.run.train_state.ids).tolist()
        check_indices([index], len(ids), name="Population.ancestors")
        found = [ids[index]]
        for row in self.lineage[-2::-1]:
            found.append(int(row[ids.index(found[-1])]))
        return np.array(found[::-1])


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
    key: Any,
    **options: Any,
) -> Population[M]:
    """Trains a population, replacing the worst members by copies of the best with perturbed hyper-parameters.

    After each round but the last, members are ranked by their validation scores. Each of the worst copies weights,
    optimiser state and hyper-parameters of one of the best ([`eqx_ensemble.methods.population.truncation`][]), and its
    hyper-parameters are perturbed. Diverged members are replaced too and are never donors. All rounds run one compiled
    program.

    **Arguments:**

    - `ensemble`, `loss`, `optimiser`, `data`, `hyper`, `validation`, `options`: as for [`eqx_ensemble.fit`][], except
        `checkpoint` and the options that stop members. The hyper-parameters may be used by the optimiser, the loss, or
        both.
    - `rounds`: the number of rounds.
    - `epochs` or `steps`: the length of one round.
    - `fraction`: the fraction of members that are replaced after a round, rounded up.
    - `explore`: `explore(hyper, key) -> hyper` perturbs the hyper-parameters of one copy: by default
        [`eqx_ensemble.train.perturb`][]; [`eqx_ensemble.methods.population.perturb_hyper`][] respects ranges.
    - `key`: the root key.

    **Returns:** [`eqx_ensemble.methods.Population`][]. Ctrl-C ends it at the next boundary.

    **Raises:** `TypeError` without `hyper` or validation data, and for `checkpoint` and options that stop members;
    `ValueError` for a fraction outside (0, 0.5].

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1)}
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 8, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    found = ee.methods.population_based_training(
        ensemble,
        loss,
        lambda hyper: optax.adam(hyper["lr"]),
        data,
        hyper=ee.sweep.draw(ranges, 8, key=key),
        validation=data,
        rounds=3,
        epochs=2,
        explore=ee.methods.population.perturb_hyper(ranges),
        key=key,
    )
    found.run.best()
    found.lineage  # (3, 8)
    ```

    ??? cite

        Jaderberg et al., *Population Based Training of Neural Networks*, arXiv:1711.09846, 2017.
    """
    name = "methods.population_based_training"
    check_positive_int(rounds, "rounds", name=name)
    check_hyper_given(hyper, name=name)
    check_validation_given(validation, name=name)
    check_fraction(fraction, name=name)
    check_options(options, _STOPS, "all members train in every round", name=name)
    check_no_checkpoint(options, name=name)
    check_on_diverge(options.get("on_diverge"))
    check_whole_epochs(steps, is_batches=is_batches(data), name=name)
    check_ensemble(ensemble, name=name)
    check_function(explore, "explore", name=name, example="train.perturb")
    check_key(key, name=name)
    hyper = hyper_arrays(hyper, ensemble.num_members, name=name)
    one = jax.tree.map(lambda x: x[0], hyper)
    keys = jax.random.split(key, rounds)
    check_same_hyper(one, explore(one, keys[0]), name="explore")
    run, scores, lineage, hypers = ensemble, [], [], []
    first = {"hyper": hyper, **{name: options.pop(name) for name in ("state", "trainable") if name in options}}
    while True:
        replaced = len(scores) < rounds - 1  # those that diverge
        with ignore_warnings(".*diverged") if replaced else contextlib.nullcontext():
            run = fit(
                run, loss, optimiser, data, validation=validation, epochs=epochs, steps=steps, key=key,
                **(options if scores else options | first),
            )  # fmt: skip
        scores.append(last_scores(run))
        lineage.append(np.asarray(run.train_state.ids))
        hypers.append(to_host(run.train_state.hyper))
        training = to_host(run.train_state.status) == Status.OK
        if len(scores) == rounds or run.interrupted or not training.any():
            if len(scores) < rounds and not training.any():
                warn(diverged_message(lineage[-1], run.stopped_at, run.fault))
            stacked = jax.tree.map(lambda *parts: np.stack(parts), *hypers)
            run = dataclasses.replace(run, rows=None)  # a copy was trained on the rows of others
            return Population(run, np.stack(scores), np.stack(lineage), stacked)
        donors = population.truncation(scores[-1], training, fraction=fraction, mode=run.mode, key=keys[len(scores)])
        lineage[-1] = lineage[-1][donors]
        run = _replace(run, donors, explore, key=key)


def _replace(run: Run, donors: np.ndarray, explore: Callable[..., Any], *, key: Any) -> Run:
    """Makes members copies of their donors, perturbs their hyper-parameters and resets their best weights."""
    replaced = np.flatnonzero(donors != np.arange(len(donors)))
    if len(replaced) == 0:
        return run
    state = population.set_hyper(population.clone(run.train_state, donors), replaced, explore, key=key)
    selection = reset_best(run.selection, state.moving, replaced)
    return dataclasses.replace(run, train_state=state, selection=selection)
