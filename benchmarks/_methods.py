"""Ways to spend compute on several predictions: seeds, bootstraps, heads on a trunk, passes of dropout.

All train by the same rows and stop by the same validation rows, which also choose the dropout rate. Test rows are only
predicted.
"""

import dataclasses
import functools as ft
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from _members import Heads, Net, as_gaussian, loss
from _tables import Split

import eqx_ensemble as ee

ADAM = optax.adam(3e-3)


@dataclasses.dataclass(frozen=True)
class Amount:
    """How much is compared. There are `networks` with dropout for each of the `rates`; `timed` folds train twice."""

    folds: int = 5
    timed: int = 3
    epochs: int = 200
    members: int = 10
    passes: int = 50
    networks: int = 3
    rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5)


@dataclasses.dataclass(frozen=True)
class Task:
    """One split, and the sizes of the layers that are trained on it."""

    split: Split
    sizes: tuple[int, ...]
    amount: Amount
    fold: int

    @property
    def key(self) -> Any:
        """Every fold has its own."""
        return jax.random.key(self.fold)

    @property
    def inputs(self) -> np.ndarray:
        """All rows to predict: those of the test, and unknown ones."""
        return np.concatenate([self.split.test[0], self.split.unknown])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outputs `(repeats, members, rows, outputs)`, the score being that of a repeat on average; seconds of training."""

    outputs: np.ndarray
    wall: float = np.nan
    cpu: float = np.nan


@ft.cache
def _plain(sizes: tuple[int, ...]) -> Callable[[Any], eqx.Module]:
    return lambda key: Net(sizes, 0.0, key=key)


@ft.cache
def _with_dropout(sizes: tuple[int, ...], rate: float) -> Callable[[Any], eqx.Module]:
    return lambda key: Net(sizes, rate, key=key)


@ft.cache
def _with_heads(sizes: tuple[int, ...], num_heads: int) -> Callable[[Any], eqx.Module]:
    return lambda key: Heads(sizes, num_heads, key=key)


def outcomes(task: Task) -> tuple[dict[str, Outcome], float]:
    """All methods on one split, and the dropout rate with the best likelihood of the validation rows."""
    count, few = task.amount.members, task.amount.members // 2
    predict = lambda ensemble: np.asarray(ee.predict(ensemble, task.inputs))
    _, *single = _train(task, ee.build(_plain(task.sizes), key=ee.member_keys(task.key, task.fold + 1)[task.fold :]))
    num_rows = len(task.split.train[0])
    each_once = np.tile(np.arange(num_rows), (count, 1))  # as no `rows`, but with the program of the bootstraps
    members, *seconds = _train(task, ee.build(_plain(task.sizes), count, key=task.key), rows=each_once)
    outputs = predict(members)
    found = {
        "one member": Outcome(outputs[:, None], *single),
        f"{few} members": Outcome(np.stack([outputs[:few], outputs[few : 2 * few]])),
        f"{count} members": Outcome(outputs[None], *seconds),
    }
    rows = ee.resample.bootstrap(num_rows, count, key=task.key)
    members, *seconds = _train(task, ee.build(_plain(task.sizes), count, key=task.key), rows=rows)
    found[f"{count} bootstraps"] = Outcome(predict(members)[None], *seconds)

    heads = ee.build(_with_heads(task.sizes, count), 1, key=task.key)
    heads, *seconds = _train(task, heads)
    found[f"{count} heads on one trunk"] = Outcome(np.moveaxis(predict(heads), 2, 1), *seconds)
    return _monte_carlo_dropout(task, found)


def _monte_carlo_dropout(task: Task, found: dict[str, Outcome]) -> tuple[dict[str, Outcome], float]:
    """Adds networks of the best rate, with dropout on and off in prediction. The time is that of all rates."""
    amount = task.amount
    keys = ee.member_keys(task.key, len(amount.rates) * amount.networks).reshape(len(amount.rates), -1)
    trained = [
        _train(task, ee.build(_with_dropout(task.sizes, rate), key=own))
        for rate, own in zip(amount.rates, keys, strict=True)
    ]
    seconds = np.sum([own for _, *own in trained], axis=0)
    x, y = task.split.validation
    score = ee.scores.nll if y.dtype.kind == "i" else _nll
    passes = [_passes(networks, x, amount.passes, task.key) for networks, *_ in trained]
    best = int(np.argmin([np.mean([float(score(outputs, y)) for outputs in own]) for own in passes]))
    networks = trained[best][0]

    off = np.asarray(ee.predict(networks, task.inputs))[:, None]
    on = _passes(networks, task.inputs, amount.passes, task.key)
    found["one member with dropout"] = Outcome(off)
    found[f"MC dropout, {amount.passes} passes"] = Outcome(on, *seconds)
    return found, amount.rates[best]


def _nll(outputs: np.ndarray, y: np.ndarray) -> Any:
    return ee.scores.nll_gaussian_mixture(*as_gaussian(outputs), y)


def _train(task: Task, ensemble: ee.Ensemble, *, rows: Any = None) -> tuple[ee.Ensemble, float, float]:
    """The trained members, each with its best weights, and the wall and CPU seconds of training them once more.

    The first call compiles, and compiles again whenever members stop; the second finds all programs.
    """
    fit = lambda: ee.fit(
        ensemble,
        loss,
        ADAM,
        task.split.train,
        validation=task.split.validation,
        rows=rows,
        epochs=task.amount.epochs,
        patience=10,
        batch_size=32 if len(task.split.train[0]) < 2000 else 128,
        key=task.key,
        progress=False,
    )
    run = fit()
    if task.fold >= task.amount.timed:
        return run.ensemble, np.nan, np.nan
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(fit().ensemble.stacked)
    return run.ensemble, time.perf_counter() - wall, time.process_time() - cpu


def _passes(networks: ee.Ensemble, x: np.ndarray, count: int, key: Any) -> np.ndarray:
    """Predictions with dropout switched on `(networks, passes, rows, outputs)`."""
    one_pass = lambda key: ee.predict(networks, x, inference=False, key=key)
    passes = [np.asarray(one_pass(key)) for key in jax.random.split(key, count)]
    return np.stack(passes, axis=1)
