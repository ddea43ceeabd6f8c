import dataclasses
import functools as ft
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Generic

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int, Key

from .._build import build
from .._ensemble import Ensemble, M
from .._keys import member_keys
from .._pytree import PyTree
from ..distributed import to_host
from ..sweep import AbstractRange, draw
from ..train import Validation, every, perturb
from ..train._fit import fit
from ..train._meeting import Optimiser
from ..train._options import callbacks_of
from ..train._program import hyper_arrays
from ..train._run import Run
from . import population
from .population import decision_keys, donors_of, explore_copies

_ROUNDING = 1e-9  # logarithms and powers may miss an integer by less


def successive_halving(
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    validation: PyTree,
    epochs: int,
    factor: float | int = 3,
    rungs: int | None = None,
    callbacks: Any = None,
    key: Any,
    **options: Any,
) -> Run[M]:
    """Successive halving: trains all members briefly, then repeatedly continues only the best of them for longer.

    Of `n` members, after `epochs * factor**i` epochs, the best `n / factor**(i + 1)`, rounded down, continue. The
    others are stopped ([`eqx_ensemble.methods.population.keep_best`][]).

    **Arguments:**

    - `ensemble`, `loss`, `optimiser`, `data`, `validation`, `callbacks`, `key`, `options`: as for
        [`eqx_ensemble.fit`][].
    - `epochs`: the length of the first rung.
    - `factor`: the ratio of members, and of training lengths, between two rungs.
    - `rungs`: the number of rungs. By default, enough to leave one member.

    **Returns:** the run. Dropped members have the status `STOPPED` and their best weights.

    ```python
    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    run = ee.methods.successive_halving(
        ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 9, key=key),
        loss,
        lambda hyper: optax.adam(hyper["lr"]),
        jnp.ones((64, 3)),
        hyper={"lr": jnp.logspace(-4, -1, 9)},
        validation=jnp.ones((16, 3)),
        epochs=1,
        key=key,
    )
    run.stopped_at  # (9,): six members after two steps, two after six, -1 for the last
    ```

    ??? cite
        [Jamieson and Talwalkar 2016](https://arxiv.org/abs/1502.07943)
    """
    if rungs is None:
        rungs = 1 + math.ceil(math.log(ensemble.num_members, factor) - _ROUNDING)
    ends = [math.ceil(epochs * factor**i - _ROUNDING) for i in range(rungs)]
    options |= {"validation": validation, "callbacks": callbacks, "key": key}
    return _halve(ensemble, loss, optimiser, data, ends, factor, **options)


def _halve(
    ensemble: Ensemble[M], loss: Any, optimiser: Any, data: Any, ends: list[int], factor: float | int, **options: Any
) -> Run[M]:
    """One `fit` until the last of the rungs' ends, in epochs."""
    validation = options["validation"]
    mode = validation.mode if isinstance(validation, Validation) else "min"
    count = lambda i: max(1, math.floor(ensemble.num_members / factor**i + _ROUNDING))
    # Also called at later multiples of its epochs, where no more members train than it keeps.
    rungs = [
        every(end, ft.partial(population.keep_best, count=count(i + 1), mode=mode), at_end=False)
        for i, end in enumerate(ends[:-1])
    ]
    options["callbacks"] = [*rungs, *callbacks_of(options.get("callbacks"))]
    return fit(ensemble, loss, optimiser, data, epochs=ends[-1], **options)


def hyperband(
    make: Callable[..., Any],
    ranges: Mapping[str, AbstractRange],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    validation: PyTree,
    epochs: int,
    factor: float | int = 3,
    checkpoint: str | os.PathLike[str] | None = None,
    key: Any,
    **options: Any,
) -> list[Run[Any]]:
    """Hyperband: brackets of successive halving, from many members trained briefly to a few trained in full.

    **Arguments:**

    - `make`: the constructor of one member, as for [`eqx_ensemble.build`][].
    - `ranges`: the ranges of the hyperparameters, as for [`eqx_ensemble.sweep.draw`][].
    - `epochs`: the longest training of a member.
    - `checkpoint`: a folder for the file of each bracket.
    - `key`: one key.
    - others: as for [`eqx_ensemble.methods.successive_halving`][].

    **Returns:** one run per bracket, the largest first; fewer after Ctrl-C.

    ```python
    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    runs = ee.methods.hyperband(
        lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key),
        {"lr": ee.sweep.LogUniform(1e-4, 1e-1)},
        loss,
        lambda hyper: optax.adam(hyper["lr"]),
        jnp.ones((64, 3)),
        validation=jnp.ones((16, 3)),
        epochs=9,
        key=key,
    )
    winners = ee.concatenate([run.best() for run in runs])  # one of each bracket
    ```

    ??? cite
        [Li et al. 2018](https://arxiv.org/abs/1603.06560)
    """
    most = math.floor(math.log(epochs, factor) + _ROUNDING)
    sizes = [math.ceil((most + 1) / (s + 1) * factor**s - _ROUNDING) for s in range(most, -1, -1)]
    build_keys, fit_keys = (member_keys(key, sum(sizes), purpose=purpose) for purpose in ("build", "fit"))
    hyper, runs = draw(ranges, sum(sizes), key=key), []
    for s, end in zip(range(most, -1, -1), np.cumsum(sizes).tolist(), strict=True):
        own = slice(end - sizes[most - s], end)
        made = build(make, key=build_keys[own])
        ensemble, state = made if isinstance(made, tuple) else (made, None)
        ends = [max(1, math.floor(epochs * factor ** (i - s) + _ROUNDING)) for i in range(s + 1)]
        start = {"state": state, "hyper": jax.tree.map(lambda x, own=own: x[own], hyper), "key": fit_keys[own]}
        start["checkpoint"] = None if checkpoint is None else os.path.join(checkpoint, f"bracket-{most - s}.eqx")
        runs.append(_halve(ensemble, loss, optimiser, data, ends, factor, validation=validation, **start, **options))
        if runs[-1].interrupted:
            break
    return runs


class Population(eqx.Module, Generic[M]):
    """The result of [`eqx_ensemble.methods.population_based_training`][].

    **Attributes:**

    - `run`: the run; `run.ensemble` has each member's best weights since it was last replaced.
    - `scores`: `(rounds, members)`, the validation scores at the end of each round.
    - `lineage`: `(rounds, members)`, the position of each member's donor after each round; its own if not replaced.
    - `hyper`: the hyperparameters during each round, each array `(rounds, members, ...)`.
    """

    run: Run[M]
    scores: Float[np.ndarray, "rounds members"]
    lineage: Int[np.ndarray, "rounds members"]
    hyper: PyTree

    def __repr__(self) -> str:
        return f"{len(self.scores)} rounds of population-based training\n{self.run!r}"

    def ancestors(self, index: int) -> Int[np.ndarray, " rounds"]:
        """The members whose weights the member at `index` descends from, one per round, `(rounds,)`.

        Their hyperparameters in these rounds are the schedule that it was trained with.
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
    """Population-based training: replaces the worst members by copies of the best, with perturbed hyperparameters.

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
    if options.get("patience") is not None or options.get("stop") is not None:
        raise TypeError(
            "`population_based_training` takes no `patience` and no `stop`: all members train in every round."
        )
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
