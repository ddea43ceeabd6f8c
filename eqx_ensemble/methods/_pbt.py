import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Key

from .._check import check_function, check_key, check_positive_int
from .._ensemble import Ensemble, M
from .._ensemble._check import check_ensemble
from .._pytree import PyTree
from .._warnings import ignore_warnings
from ..train import perturb
from ..train._check_member import check_same_hyper
from ..train._fit import fit
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
from ._check_rounds import check_saving
from ._past import Past
from ._population import Population
from ._rounds import Rounds

_STOPS = ("patience", "target", "max_steps", "max_seconds")


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
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: Literal["auto", "must", "never"] = "auto",
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
        those that stop members. The hyper-parameters may be used by the optimiser, the loss, or both.
    - `rounds`: the number of rounds.
    - `epochs` or `steps`: the length of one round.
    - `fraction`: the fraction of members that are replaced after a round, rounded up.
    - `explore`: `explore(hyper, key) -> hyper` perturbs the hyper-parameters of one copy: by default
        [`eqx_ensemble.train.perturb`][]; [`eqx_ensemble.methods.population.perturb_hyper`][] respects ranges.
    - `checkpoint`: a folder to save all rounds in, for data in arrays. Rerunning the same call resumes bit for bit
        wherever it was killed, or returns the result; a different call raises an error that lists the differences. Only
        one process at a time can use a folder. Its size is that of two rounds.
    - `checkpoint_every`, `resume`: as for [`eqx_ensemble.fit`][].
    - `key`: the root key.

    **Returns:** [`eqx_ensemble.methods.Population`][]. Ctrl-C ends it at the next boundary.

    **Raises:** `TypeError` without `hyper` or validation data, and for options that stop members;
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
    check_saving(checkpoint, checkpoint_every, resume, data, name=name)
    check_on_diverge(options.get("on_diverge"))
    check_whole_epochs(steps, is_batches=is_batches(data), name=name)
    check_ensemble(ensemble, name=name)
    check_function(explore, "explore", name=name, example="train.perturb")
    check_key(key, name=name)
    hyper = hyper_arrays(hyper, ensemble.num_members, name=name)
    one = jax.tree.map(lambda x: x[0], hyper)
    keys = jax.random.split(key, rounds)
    check_same_hyper(one, explore(one, keys[0]), name="explore")
    first = {"hyper": hyper, **{name: options.pop(name) for name in ("state", "trainable") if name in options}}
    length = {"epochs": epochs, "steps": steps}

    def train(index: int, begun: Ensemble[M] | Run[M] = ensemble, **more: Any) -> Run[M]:
        replaced = index < rounds - 1  # those that diverge
        with ignore_warnings(".*diverged") if replaced else contextlib.nullcontext():
            return fit(
                begun, loss, optimiser, data, validation=validation, key=key, **length, **options, **more,
                **(first if begun is ensemble else {}),
            )  # fmt: skip

    own = {"rounds": rounds, **length, "fraction": fraction}
    saved = Rounds(checkpoint, own=own, every=checkpoint_every, resume=resume, name=name)
    saved.add_function("explore", explore, one, keys[0])
    with saved.lock():
        return _evolve(train, saved, keys, fraction=fraction, explore=explore, key=key)


def _evolve(
    train: Callable[..., Run[M]], saved: Rounds, keys: Key[Array, " rounds"], *, fraction: Any, explore: Any, key: Any
) -> Population[M]:
    """All rounds, where `train(index, begun, **saving)` is one of them; those that are saved are not trained again."""

    def resume(index: int, **saving: Any) -> tuple[Run[M], Past]:
        run = train(index, **saving)
        return run, Past() if index == 0 else Past.of(saved.decisions(index, Past().add(run).decisions()))

    index, (run, past) = saved.resume(resume)
    while True:
        past = past.add(run)
        ended = index == len(keys) - 1
        if ended or run.interrupted or not past.training.any():
            return past.population(run, ended=ended)
        index += 1
        donors = population.truncation(
            past.scores[-1], past.training, fraction=fraction, mode=run.mode, key=keys[index]
        )
        past = past.descend(donors)
        saved.decide(index - 1, run, past.decisions)
        run = train(index, _replace(run, donors, explore, key=key), **saved.saving(index))


def _replace(run: Run, donors: np.ndarray, explore: Callable[..., Any], *, key: Any) -> Run:
    """Makes members copies of their donors, perturbs their hyper-parameters and resets their best weights."""
    replaced = np.flatnonzero(donors != np.arange(len(donors)))
    if len(replaced) == 0:
        return run
    state = population.set_hyper(population.clone(run.train_state, donors), replaced, explore, key=key)
    selection = reset_best(run.selection, state.moving, replaced)
    return dataclasses.replace(run, train_state=state, selection=selection)
