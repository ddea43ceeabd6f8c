import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, Generic

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int, Key, PyTree

from .. import _check
from .._ensemble import Ensemble, M
from ..distributed import to_host
from ..train import Run, fit, perturb
from ..train._hyper import hyper_arrays
from ..train._state import OK
from ..train.compiled._optimiser import Optimiser
from ..train.compiled._select import forgotten
from ..train.data._data import is_batches
from . import population
from ._scores import last_scores

_STOPS = ("patience", "target", "max_steps", "max_seconds")


class Population(eqx.Module, Generic[M]):
    """What [`eqx_ensemble.methods.population_based_training`][] returns.

    **Attributes:**

    - `run`: the whole run; `run.ensemble` holds each member's best weights since it last became a copy.
    - `scores`: `(rounds, members)`, the validation scores at the end of each round.
    - `lineage`: `(rounds, members)`, the id of the member with whose weights each member went on after each round: its
        own id where it was not replaced.
    - `hyper`: the hyper-parameters during each round, each array `(rounds, members, ...)`.
    """

    run: Run[M]
    scores: Float[np.ndarray, "rounds members"]
    lineage: Int[np.ndarray, "rounds members"]
    hyper: PyTree

    def ancestors(self, place: int) -> Int[np.ndarray, " rounds"]:
        """The ids of the members that were, in each round, what the member at `place` has become.

        The schedule of hyper-parameters that made it is what these had in their rounds.
        """
        ids = np.asarray(self.run.train_state.ids).tolist()
        _check.places([place], len(ids), name="Population.ancestors")
        found = [ids[place]]
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
    """Trains a population whose worst members become copies of its best ones, with other hyper-parameters.

    After each round but the last, members are ranked by their validation scores; the worst take weights, optimiser
    state and hyper-parameters of one of the best ([`eqx_ensemble.methods.population.truncation`][]) and explore from
    there. A member that diverged is replaced too, and is never a donor. All rounds are one compiled program.

    ??? cite

        Jaderberg et al., *Population Based Training of Neural Networks*, arXiv:1711.09846, 2017.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1)}
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 8, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    found = ee.methods.population_based_training(
        ensemble, loss, lambda hyper: optax.adam(hyper["lr"]), data, hyper=ee.sweep.draw(ranges, 8, key=key),
        validation=data, rounds=3, epochs=2, explore=ee.methods.population.explore(ranges), key=key,
    )
    found.run.best()
    found.lineage  # (3, 8)
    ```

    **Arguments:**

    - `ensemble`, `loss`, `optimiser`, `data`, `hyper`, `validation`, `options`: as for [`eqx_ensemble.fit`][], but for
        `checkpoint` and what makes members stop. The hyper-parameters may be those of the optimiser, of the loss, or
        of both.
    - `rounds`: how often to train and compare.
    - `epochs` or `steps`: the length of one round.
    - `fraction`: of the members, how many are replaced after a round, rounded up.
    - `explore`: `explore(hyper, key) -> hyper` changes a copy's hyper-parameters: [`eqx_ensemble.train.perturb`][] if
        not given, or what [`eqx_ensemble.methods.population.explore`][] makes of ranges.
    - `key`: the root key.

    **Returns:** [`eqx_ensemble.methods.Population`][]. Ctrl-C ends it after the round's present chunk.
    """
    _check.check_positive_int(rounds, "rounds", name="population_based_training")
    _check.judged(hyper, validation, name="population_based_training")
    _check.part_of_members(fraction, name="population_based_training")
    _check.no_options(options, _STOPS, "a population trains as long as it lasts", name="population_based_training")
    _check.no_saving(options, name="population_based_training")
    _check.own_revival(options.get("on_diverge"))
    _check.whole_epochs(steps, is_batches=is_batches(data), name="population_based_training")
    _check.check_ensemble(ensemble, Ensemble, name="population_based_training")
    _check.check_function(explore, "explore", name="population_based_training", example="eqx_ensemble.train.perturb")
    _check.check_key(key, name="population_based_training")
    hyper = hyper_arrays(hyper, ensemble.num_members, name="population_based_training")
    one = jax.tree.map(lambda x: x[0], hyper)
    keys = jax.random.split(key, rounds)
    _check.same_hyper(one, explore(one, keys[0]), name="explore")
    run, scores, lineage, hypers = ensemble, [], [], []
    first = {"hyper": hyper, **{name: options.pop(name) for name in ("state", "trainable") if name in options}}
    while True:
        with warnings.catch_warnings():
            if len(scores) < rounds - 1:  # those who diverged will be replaced
                warnings.filterwarnings("ignore", message=".*diverged", category=UserWarning)
            run = fit(
                run, loss, optimiser, data, validation=validation, epochs=epochs, steps=steps, key=key,
                **(options if scores else options | first),
            )  # fmt: skip
        scores.append(last_scores(run))
        lineage.append(np.asarray(run.train_state.ids))
        hypers.append(to_host(run.train_state.fixed.hyper))
        able = to_host(run.train_state.moving.status) == OK
        if len(scores) == rounds or run.interrupted or not able.any():
            if len(scores) < rounds and not able.any():
                warnings.warn(_check.diverged(lineage[-1], run.left, run.fault), stacklevel=2)
            stacked = jax.tree.map(lambda *parts: np.stack(parts), *hypers)
            run = dataclasses.replace(run, rows=None)  # a copy has seen the rows of others
            return Population(run, np.stack(scores), np.stack(lineage), stacked)
        donors = population.truncation(scores[-1], able, fraction=fraction, mode=run.mode, key=keys[len(scores)])
        lineage[-1] = lineage[-1][donors]
        run = _replaced(run, donors, explore, key=key)


def _replaced(run: Run, donors: np.ndarray, explore: Callable[..., Any], *, key: Any) -> Run:
    """The run with members as copies of their donors, exploring from there; their best weights are forgotten."""
    replaced = np.flatnonzero(donors != np.arange(len(donors)))
    if len(replaced) == 0:
        return run
    state = population.change(population.clone(run.train_state, donors), replaced, explore, key=key)
    selection = forgotten(run.selection, state.moving, replaced)
    return dataclasses.replace(run, train_state=state, selection=selection)
