import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import PyTree

from .. import _check
from .._build import build
from .._ensemble import Ensemble, M
from ..distributed import to_host
from ..sweep import draw
from ..sweep._draw import AbstractRange
from ..train import Run, fit
from ..train._state import OK
from ..train.compiled._optimiser import Optimiser
from ..train.data._data import is_batches
from . import population
from ._scores import last_scores


def successive_halving(
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    validation: PyTree,
    epochs: int | None = None,
    steps: int | None = None,
    factor: float | int = 3,
    rungs: int | None = None,
    key: Any,
    **options: Any,
) -> Run[M]:
    """Trains all members a little, the best of them longer, the best of those longer still.

    At each rung the best `1 / factor` of the members that are left, rounded down, go on until they have trained
    `factor` times as long; the others stop, and leave the compiled arrays when that pays.

    ??? cite

        Jamieson and Talwalkar, *Non-stochastic Best Arm Identification and Hyperparameter Optimization*, AISTATS 2016.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    hyper = ee.grid({"lr": jnp.logspace(-4, -1, 9)})
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 9, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    run = ee.methods.successive_halving(
        ensemble, loss, lambda hyper: optax.adam(hyper["lr"]), data, hyper=hyper, validation=data, epochs=1, key=key
    )
    run.left  # (9,): six members left after two steps, two after six, and -1 for the one that was never dropped
    ```

    **Arguments:**

    - `ensemble`, `loss`, `optimiser`, `data`, `validation`, `options`: as for [`eqx_ensemble.fit`][].
    - `epochs` or `steps`: the length of the first rung; rung `i`, counted from 0, ends when members have trained
        `factor ** i` times as long, rounded up.
    - `factor`: 2 halves the members at each rung.
    - `rungs`: how many; as many as it takes to have one member left, if not given.
    - `key`: the root key.

    **Returns:** the run: members that were dropped are `"stopped"`, at the step in `left`, each at its best weights.
    """
    _check.judged((), validation, name="successive_halving")
    _check.no_saving(options, name="successive_halving")
    factor = _check.halving(factor, rungs, name="successive_halving")
    _check.check_ensemble(ensemble, Ensemble, name="successive_halving")
    unit, shortest = _check.one_length_of("successive_halving", epochs=epochs, steps=steps)
    _check.whole_epochs(steps, is_batches=is_batches(data), name="successive_halving")
    rungs = _rungs(ensemble.num_members, factor) if rungs is None else rungs
    totals = [math.ceil(shortest * factor**i - 1e-9) for i in range(rungs)]
    return _halved(
        ensemble, loss, optimiser, data, unit, sorted(set(totals)), factor, **options, validation=validation, key=key
    )


def _rungs(count: int, factor: float | int) -> int:
    """How many rungs it takes to have one member left."""
    rungs = 1
    while count > 1:
        count, rungs = _fewer(count, factor), rungs + 1
    return rungs


def _fewer(count: int, factor: float | int) -> int:
    return max(1, math.floor(count / factor + 1e-9))


def _halved(
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    unit: str,
    totals: list[int],
    factor: float | int,
    **options: Any,
) -> Run[M]:
    """Successive halving with rungs that end at the given totals."""
    first = {word: options.pop(word) for word in ("hyper", "state", "trainable") if word in options}
    lengths: list[dict[str, Any]] = [{unit: more} for more in np.diff(totals, prepend=0).tolist()]
    run = fit(ensemble, loss, optimiser, data, **options, **first, **lengths[0])
    for length in lengths[1:]:
        left = to_host(run.train_state.moving.status) == OK
        if run.interrupted or not left.any():
            break
        order = population.rank(last_scores(run), healthy=left, mode=run.mode)
        dropped = order[left[order]][_fewer(int(left.sum()), factor) :]
        if len(dropped):
            run = dataclasses.replace(run, train_state=population.stop(run.train_state, dropped))
        run = fit(run, loss, optimiser, data, **options, **length)
    return run


def hyperband(
    make: Callable[..., M],
    ranges: Mapping[str, AbstractRange],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    validation: PyTree,
    epochs: int,
    factor: float | int = 3,
    key: Any,
    **options: Any,
) -> list[Run[M]]:
    """Successive halving several times, from many members trained shortly to a few trained in full.

    Nobody knows beforehand how early bad hyper-parameters show: each bracket stakes as much time on another answer.

    ??? cite

        Li et al., *Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization*, JMLR 18, 2018.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    make = lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key)
    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1)}
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    runs = ee.methods.hyperband(
        make, ranges, loss, lambda hyper: optax.adam(hyper["lr"]), data, validation=data, epochs=9, key=key
    )
    winners = ee.concatenate([run.best() for run in runs])  # one of each bracket
    ```

    **Arguments:**

    - `make`: the constructor of one member, as for [`eqx_ensemble.build`][].
    - `ranges`: what to draw hyper-parameters from, as for [`eqx_ensemble.sweep.draw`][].
    - `loss`, `optimiser`, `data`, `validation`, `options`: as for [`eqx_ensemble.fit`][].
    - `epochs`: the most that any member trains.
    - `factor`: of members dropped at each rung, and of time added.
    - `key`: the root key.

    **Returns:** a run for each bracket, the one of most members first; ids are unique among all.
    """
    _check.check_positive_int(epochs, "epochs", name="hyperband")
    _check.judged((), validation, name="hyperband")
    refused = ("steps", "hyper", "state", "rungs")
    _check.no_options(options, refused, "it decides about these itself", name="hyperband")
    _check.no_saving(options, name="hyperband")
    factor = _check.halving(factor, None, name="hyperband")
    most = math.floor(math.log(epochs, factor) + 1e-9)
    sizes = [math.ceil((most + 1) / (s + 1) * factor**s - 1e-9) for s in range(most, -1, -1)]
    ends = np.cumsum(sizes).tolist()
    hyper = draw(ranges, ends[-1], key=key)
    runs = []
    for s, size, end in zip(range(most, -1, -1), sizes, ends, strict=True):
        places = np.arange(end - size, end)
        made = build(make, ids=places, key=key)
        ensemble, state = made if isinstance(made, tuple) else (made, None)
        totals = [max(1, math.floor(epochs * factor ** (i - s) + 1e-9)) for i in range(s + 1)]
        runs.append(
            _halved(
                ensemble,
                loss,
                optimiser,
                data,
                "epochs",
                sorted(set(totals)),
                factor,
                validation=validation,
                hyper={name: x[places] for name, x in hyper.items()},
                state=state,
                key=key,
                **options,
            )  # fmt: skip
        )
        if runs[-1].interrupted:
            break
    return runs
