import functools as ft
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from .._build import build
from .._ensemble import Ensemble, M
from .._keys import member_keys
from .._pytree import PyTree
from ..sweep import AbstractRange, draw
from ..train import Validation, every
from ..train._fit import fit
from ..train._optimiser import Optimiser
from ..train._options import callbacks_of
from ..train._run import Run
from . import population


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
        rungs = 1 + math.ceil(math.log(ensemble.num_members, factor) - 1e-9)
    ends = [math.ceil(epochs * factor**i - 1e-9) for i in range(rungs)]
    options |= {"validation": validation, "callbacks": callbacks, "key": key}
    return _halve(ensemble, loss, optimiser, data, ends, factor, **options)


def _halve(
    ensemble: Ensemble[M], loss: Any, optimiser: Any, data: Any, ends: list[int], factor: float | int, **options: Any
) -> Run[M]:
    """One `fit` until the last of the rungs' ends, in epochs."""
    validation = options["validation"]
    mode = validation.mode if isinstance(validation, Validation) else "min"
    count = lambda i: max(1, math.floor(ensemble.num_members / factor**i + 1e-9))
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
    - `ranges`: the ranges of the hyper-parameters, as for [`eqx_ensemble.sweep.draw`][].
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
    most = math.floor(math.log(epochs, factor) + 1e-9)
    sizes = [math.ceil((most + 1) / (s + 1) * factor**s - 1e-9) for s in range(most, -1, -1)]
    build_keys, fit_keys = (member_keys(key, sum(sizes), purpose=purpose) for purpose in ("build", "fit"))
    hyper, runs = draw(ranges, sum(sizes), key=key), []
    for s, end in zip(range(most, -1, -1), np.cumsum(sizes).tolist(), strict=True):
        own = slice(end - sizes[most - s], end)
        made = build(make, key=build_keys[own])
        ensemble, state = made if isinstance(made, tuple) else (made, None)
        ends = [max(1, math.floor(epochs * factor ** (i - s) + 1e-9)) for i in range(s + 1)]
        start = {"state": state, "hyper": jax.tree.map(lambda x, own=own: x[own], hyper), "key": fit_keys[own]}
        start["checkpoint"] = None if checkpoint is None else os.path.join(checkpoint, f"bracket-{most - s}.eqx")
        runs.append(_halve(ensemble, loss, optimiser, data, ends, factor, validation=validation, **start, **options))
        if runs[-1].interrupted:
            break
    return runs
