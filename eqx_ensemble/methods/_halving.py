import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, overload

import equinox as eqx
import numpy as np

from .._build import build
from .._check import check_positive_int
from .._ensemble import Ensemble, M
from .._ensemble._check import check_ensemble
from .._pytree import PyTree
from ..distributed import to_host
from ..sweep import AbstractRange, draw
from ..train._fit import fit
from ..train._run import Run
from ..train._status import Status
from ..train.compiled._optimiser import Optimiser
from ..train.data._data import is_batches
from . import population
from ._check import (
    check_factor,
    check_length,
    check_no_checkpoint,
    check_options,
    check_validation_given,
    check_whole_epochs,
)
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
    """Trains all members briefly, the best of them for longer, and the best of those for longer still.

    At each rung the best `1 / factor` of the remaining members, rounded down, continue until they have trained
    `factor` times as long. The others stop and are removed from the compiled arrays when that saves time.

    **Arguments:**

    - `ensemble`, `loss`, `optimiser`, `data`, `validation`, `options`: as for [`eqx_ensemble.fit`][].
    - `epochs` or `steps`: the length of the first rung; rung `i`, counted from 0, ends when members have trained
        `factor ** i` times as long, rounded up.
    - `factor`: the ratio of members, and of training lengths, between two rungs; 2 halves the members.
    - `rungs`: the number of rungs. By default, as many as it takes until one member remains.
    - `key`: the root key.

    **Returns:** the run. Dropped members have the status `STOPPED` and their best weights.

    **Raises:** `TypeError` without validation data, and for `checkpoint`; `ValueError` for a factor of at most 1.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    hyper = ee.sweep.grid({"lr": jnp.logspace(-4, -1, 9)})
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 9, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    run = ee.methods.successive_halving(
        ensemble,
        loss,
        lambda hyper: optax.adam(hyper["lr"]),
        data,
        hyper=hyper,
        validation=data,
        epochs=1,
        key=key,
    )
    run.stopped_at
    # (9,): six members stopped after two steps, two after six; -1 for the one that was
    # never dropped
    ```

    ??? cite

        Jamieson and Talwalkar, *Non-stochastic Best Arm Identification and Hyperparameter Optimization*, AISTATS 2016.
    """
    name = "methods.successive_halving"
    check_validation_given(validation, name=name)
    check_no_checkpoint(options, name=name)
    factor = check_factor(factor, name=name)
    if rungs is not None:
        check_positive_int(rungs, "rungs", name=name)
    check_ensemble(ensemble, name=name)
    unit, shortest = check_length(name, epochs=epochs, steps=steps)
    check_whole_epochs(steps, is_batches=is_batches(data), name=name)
    rungs = _rungs(ensemble.num_members, factor) if rungs is None else rungs
    totals = [math.ceil(shortest * factor**i - 1e-9) for i in range(rungs)]
    return _halve(
        ensemble, loss, optimiser, data, unit, sorted(set(totals)), factor, **options, validation=validation, key=key
    )


def _rungs(count: int, factor: float | int) -> int:
    """The number of rungs until one member remains."""
    rungs = 1
    while count > 1:
        count, rungs = _num_kept(count, factor), rungs + 1
    return rungs


def _num_kept(count: int, factor: float | int) -> int:
    return max(1, math.floor(count / factor + 1e-9))


def _halve(
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    unit: str,
    totals: list[int],
    factor: float | int,
    **options: Any,
) -> Run[M]:
    """Successive halving with rungs that end at `totals`, in `unit`."""
    first = {word: options.pop(word) for word in ("hyper", "state", "trainable") if word in options}
    lengths: list[dict[str, Any]] = [{unit: more} for more in np.diff(totals, prepend=0).tolist()]
    run = fit(ensemble, loss, optimiser, data, **options, **first, **lengths[0])
    for length in lengths[1:]:
        training = to_host(run.train_state.status) == Status.OK
        if run.interrupted or not training.any():
            break
        order = population.rank(last_scores(run), healthy=training, mode=run.mode)
        dropped = order[training[order]][_num_kept(int(training.sum()), factor) :]
        if len(dropped):
            run = dataclasses.replace(run, train_state=population.stop(run.train_state, dropped))
        run = fit(run, loss, optimiser, data, **options, **length)
    return run


@overload
def hyperband(
    make: Callable[..., tuple[M, eqx.nn.State]],
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
) -> list[Run[M]]: ...
@overload
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
) -> list[Run[M]]: ...
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
    key: Any,
    **options: Any,
) -> list[Run[Any]]:
    """Runs successive halving several times, from many members trained briefly to a few trained in full.

    How early bad hyper-parameters can be recognised is not known in advance: each bracket assumes another answer, and
    all brackets take the same time.

    **Arguments:**

    - `make`: the constructor of one member, as for [`eqx_ensemble.build`][].
    - `ranges`: the ranges of the hyper-parameters, as for [`eqx_ensemble.sweep.draw`][].
    - `loss`, `optimiser`, `data`, `validation`, `options`: as for [`eqx_ensemble.fit`][].
    - `epochs`: the longest training of a member.
    - `factor`: the ratio of members, and of training lengths, between two rungs.
    - `key`: the root key.

    **Returns:** one run per bracket, the largest first. Ids are unique across brackets.

    **Raises:** `TypeError` for options of [`eqx_ensemble.fit`][] that the method sets itself.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    make = lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key)
    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1)}
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    runs = ee.methods.hyperband(
        make,
        ranges,
        loss,
        lambda hyper: optax.adam(hyper["lr"]),
        data,
        validation=data,
        epochs=9,
        key=key,
    )
    winners = ee.concatenate([run.best() for run in runs])  # one of each bracket
    ```

    ??? cite

        Li et al., *Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization*, JMLR 18, 2018.
    """
    name = "methods.hyperband"
    check_positive_int(epochs, "epochs", name=name)
    check_validation_given(validation, name=name)
    check_options(options, ("steps", "hyper", "state", "rungs"), "it sets these itself", name=name)
    check_no_checkpoint(options, name=name)
    factor = check_factor(factor, name=name)
    most = math.floor(math.log(epochs, factor) + 1e-9)
    sizes = [math.ceil((most + 1) / (s + 1) * factor**s - 1e-9) for s in range(most, -1, -1)]
    ends = np.cumsum(sizes).tolist()
    hyper = draw(ranges, ends[-1], key=key)
    runs = []
    for s, size, end in zip(range(most, -1, -1), sizes, ends, strict=True):
        indices = np.arange(end - size, end)
        made = build(make, ids=indices, key=key)
        ensemble, state = made if isinstance(made, tuple) else (made, None)
        totals = [max(1, math.floor(epochs * factor ** (i - s) + 1e-9)) for i in range(s + 1)]
        runs.append(
            _halve(
                ensemble,
                loss,
                optimiser,
                data,
                "epochs",
                sorted(set(totals)),
                factor,
                validation=validation,
                hyper={name: x[indices] for name, x in hyper.items()},
                state=state,
                key=key,
                **options,
            )  # fmt: skip
        )
        if runs[-1].interrupted:
            break
    return runs
