import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, overload

import equinox as eqx
import numpy as np

from .._build import build
from .._check import check_positive_int
from .._ensemble import Ensemble, M, check_ensemble
from .._pytree import PyTree
from ..distributed import to_host
from ..sweep import AbstractRange, draw
from ..train._engine import Checkpoint, Optimiser, Run, Status, fit, is_batches
from . import population
from ._check import check_factor, check_length, check_options, check_validation_given, check_whole_epochs
from ._rounds import begin, check_some_score, last_scores, round_in


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
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    key: Any,
    **options: Any,
) -> Run[M]:
    """Successive halving: trains all members briefly, then repeatedly continues only the best of them for longer.

    At each rung the best `1 / factor` of the members, rounded down, continue until they have trained `factor` times as
    long. The others are stopped.

    **Arguments:**

    - `ensemble`, `loss`, `optimiser`, `data`, `validation`, `options`: as for [`eqx_ensemble.fit`][].
    - `epochs` or `steps`: the length of the first rung.
    - `factor`: the ratio of members, and of training lengths, between two rungs.
    - `rungs`: the number of rungs. By default, enough to leave one member.
    - `checkpoint`: a folder, or [`eqx_ensemble.train.Checkpoint`][] of one. Each rung is a file in it. The same call
        resumes bit for bit, and only reads finished rungs.
    - `key`: the root key.

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
    check_validation_given(validation)
    factor = check_factor(factor)
    if rungs is not None:
        check_positive_int(rungs, "rungs")
    check_ensemble(ensemble)
    unit, shortest = check_length(epochs=epochs, steps=steps)
    check_whole_epochs(steps, is_batches=is_batches(data))
    rungs = _rungs(ensemble.num_members, factor) if rungs is None else rungs
    totals = [math.ceil(shortest * factor**i - 1e-9) for i in range(rungs)]
    ladder = Rungs(unit, sorted(set(totals)), factor, rungs)
    own = {unit: shortest, "factor": factor, "rungs": rungs}
    folder = begin(checkpoint, data, method="successive_halving", **own)
    options |= {"validation": validation, "key": key}
    return halve(ensemble, loss, optimiser, data, ladder, folder, **options)


class Rungs(NamedTuple):
    """Rungs that end at `totals`, in `unit` since the start; `1 / factor` of the members continue after each."""

    unit: str
    totals: list[int]
    factor: float | int
    rungs: int

    def lengths(self) -> list[dict[str, Any]]:
        """The length of each rung, as an option of `fit`."""
        return [{self.unit: more} for more in np.diff(self.totals, prepend=0).tolist()]


def _rungs(count: int, factor: float | int) -> int:
    """The number of rungs that leaves one member."""
    rungs = 1
    while count > 1:
        count, rungs = max(1, share(count, factor)), rungs + 1
    return rungs


def share(count: int, factor: float | int) -> int:
    """`count / factor`, rounded down."""
    return math.floor(count / factor + 1e-9)


def halve(
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    ladder: Rungs,
    folder: Checkpoint | None,
    **options: Any,
) -> Run[M]:
    """Runs all rungs."""
    first = {word: options.pop(word) for word in ("hyper", "state", "trainable") if word in options}
    lengths = ladder.lengths()
    run = fit(ensemble, loss, optimiser, data, **first, **options, **lengths[0], checkpoint=round_in(folder, 0))
    for index in range(1, len(lengths)):
        training = to_host(run.train_state.status) == Status.OK
        if run.interrupted or not training.any():
            break
        scores = last_scores(run)
        check_some_score(scores, training)
        order = population.rank(scores, healthy=training, mode=run.mode)
        dropped = order[training[order]][max(1, share(int(training.sum()), ladder.factor)) :]
        if len(dropped):
            run = dataclasses.replace(run, train_state=population.stop(run.train_state, dropped))
        run = fit(run, loss, optimiser, data, **options, **lengths[index], checkpoint=round_in(folder, index))
    return run


SETS = ("steps", "hyper", "state", "rungs")  # options that are set by the method


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
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
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
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
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
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    key: Any,
    **options: Any,
) -> list[Run[Any]]:
    """Hyperband: brackets of successive halving, from many members trained briefly to a few trained in full.

    **Arguments:**

    - `make`: the constructor of one member, as for [`eqx_ensemble.build`][].
    - `ranges`: the ranges of the hyper-parameters, as for [`eqx_ensemble.sweep.draw`][].
    - `epochs`: the longest training of a member.
    - others: as for [`eqx_ensemble.methods.successive_halving`][].

    **Returns:** one run per bracket, the largest first; fewer after Ctrl-C. Ids are unique across brackets.

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
    check_positive_int(epochs, "epochs")
    check_validation_given(validation)
    check_options(options, SETS, "it sets these itself")
    factor = check_factor(factor)
    folder = begin(checkpoint, data, method="hyperband", epochs=epochs, factor=factor)
    options |= {"validation": validation, "key": key}
    runs = []
    for number, bracket in enumerate(brackets(make, ranges, epochs, factor, key=key)):
        inside = None if folder is None else folder._replace(path=Path(folder.path) / f"bracket-{number:03d}")
        start = {"hyper": bracket.hyper, "state": bracket.state}
        runs.append(halve(bracket.ensemble, loss, optimiser, data, bracket.ladder, inside, **options, **start))
        if runs[-1].interrupted:
            break
    return runs


class Bracket(NamedTuple):
    """The members of one bracket and its rungs."""

    ensemble: Ensemble[Any]
    state: eqx.nn.State | None
    hyper: dict[str, Any]
    ladder: Rungs


def brackets(
    make: Callable[..., Any], ranges: Mapping[str, AbstractRange], epochs: int, factor: float | int, *, key: Any
) -> Iterator[Bracket]:
    """Yields the brackets; members are built lazily."""
    most = math.floor(math.log(epochs, factor) + 1e-9)
    sizes = [math.ceil((most + 1) / (s + 1) * factor**s - 1e-9) for s in range(most, -1, -1)]
    ends = np.cumsum(sizes).tolist()
    hyper = draw(ranges, ends[-1], key=key)
    for s, size, end in zip(range(most, -1, -1), sizes, ends, strict=True):
        indices = np.arange(end - size, end)
        made = build(make, ids=indices, key=key)
        ensemble, state = made if isinstance(made, tuple) else (made, None)
        totals = [max(1, math.floor(epochs * factor ** (i - s) + 1e-9)) for i in range(s + 1)]
        ladder = Rungs("epochs", sorted(set(totals)), factor, s + 1)
        yield Bracket(ensemble, state, {name: x[indices] for name, x in hyper.items()}, ladder)
