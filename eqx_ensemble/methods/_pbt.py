import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, Generic

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int, Key

from .._ensemble import Ensemble, M
from .._pytree import PyTree
from ..distributed import to_host
from ..train import Validation, every, perturb
from ..train._fit import fit
from ..train._optimiser import Optimiser
from ..train._options import callbacks_of
from ..train._program import hyper_arrays
from ..train._run import Run
from . import population
from ._check import check_options
from .population import decision_keys, donors_of, explore_copies


class Population(eqx.Module, Generic[M]):
    """The result of [`eqx_ensemble.methods.population_based_training`][].

    **Attributes:**

    - `run`: the run; `run.ensemble` has each member's best weights since it was last replaced.
    - `scores`: `(rounds, members)`, the validation scores at the end of each round.
    - `lineage`: `(rounds, members)`, the position of each member's donor after each round; its own if not replaced.
    - `hyper`: the hyper-parameters during each round, each array `(rounds, members, ...)`.
    """

    run: Run[M]
    scores: Float[np.ndarray, "rounds members"]
    lineage: Int[np.ndarray, "rounds members"]
    hyper: PyTree

    def __repr__(self) -> str:
        return f"{len(self.scores)} rounds of population-based training\n{self.run!r}"

    def ancestors(self, index: int) -> Int[np.ndarray, " rounds"]:
        """The members whose weights the member at `index` descends from, one per round, `(rounds,)`.

        Their hyper-parameters in these rounds are the schedule that it was trained with.
        """
        found = [index]
        for row in self.lineage[-2::-1]:
            found.append(int(row[found[-1]]))
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
    epochs: int,
    fraction: float | int = 0.2,
    explore: Callable[[PyTree, Key[Any, ""]], PyTree] | None = perturb,
    callbacks: Any = None,
    key: Any,
    **options: Any,
) -> Population[M]:
    """Population-based training: replaces the worst members by copies of the best, with perturbed hyper-parameters.

    It is one [`eqx_ensemble.fit`][] with [`eqx_ensemble.methods.population.exploit`][] after each round but the last.

    **Arguments:**

    - `ensemble`, `loss`, `optimiser`, `data`, `hyper`, `validation`, `callbacks`, `key`, `options`: as for
        [`eqx_ensemble.fit`][], without `patience` and `stop`.
    - `rounds`: the number of rounds.
    - `epochs`: the length of one round.
    - `fraction`, `explore`: as for [`eqx_ensemble.methods.population.exploit`][]; functions of their arguments alone.

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
    check_options(options, ("patience", "stop"), "all members train in every round")
    hyper = hyper_arrays(hyper, ensemble.num_members)
    choice = {"fraction": fraction, "mode": validation.mode if isinstance(validation, Validation) else "min"}
    exploit = every(epochs, ft.partial(population.exploit, explore=explore, **choice), at_end=False)
    options |= {"hyper": hyper, "validation": validation, "epochs": rounds * epochs, "key": key}
    run = fit(ensemble, loss, optimiser, data, callbacks=[exploit, *callbacks_of(callbacks)], **options)
    # Decisions are functions of scores and keys: repeated here, they tell the lineage of a run that was resumed, too.
    ends = slice(epochs - 1, None, epochs)
    assert run.history.validation is not None
    scores, lineage, past = run.history.validation[:, ends].T, [], []
    for row, step in zip(scores, run.history.validation_step[ends], strict=True):
        keys, donors = decision_keys(run.train_state.keys, step), np.arange(len(row))
        if len(lineage) < len(scores) - 1:
            donors = donors_of(row, ~np.isnan(row), keys, **choice)
        lineage.append(donors)
        past.append(to_host(hyper))
        hyper = explore_copies(jax.tree.map(lambda x, at=donors: x[at], hyper), donors, explore, keys)
    run = dataclasses.replace(run, rows=None)  # a copy was trained on the rows of its donor too
    lineage = np.array(lineage, np.int64).reshape(scores.shape)
    return Population(
        run, scores, lineage, jax.tree.map(lambda x, *xs: np.array(xs).reshape(-1, *x.shape), hyper, *past)
    )
