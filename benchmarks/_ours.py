"""The same training by this library."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax
from _by_hand import Train
from _problems import Problem

import eqx_ensemble as ee


def fit(
    problem: Problem,
    optimiser: optax.GradientTransformation,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    shuffle: bool = True,
    plan: Any = None,
    mesh: Any = None,
    **more: Any,
) -> Callable[[], ee.Run]:
    """A whole `fit`; with `shuffle=False` every member still has its own rows, but none are drawn."""
    ensemble, key = problem.ensemble(mesh), jax.random.key(0)
    rows = np.concatenate(list(next(problem.own_rows(1))), axis=1) if not shuffle else None

    def run() -> ee.Run:
        return ee.fit(
            ensemble,
            problem.loss,
            optimiser,
            (problem.x, problem.y),
            epochs=epochs,
            steps=steps,
            batch_size=problem.batch_size,
            shuffle=shuffle,
            rows=rows,
            plan=plan,
            mesh=mesh,
            progress=False,
            key=key,
            **more,
        )

    return run


def own_loop(problem: Problem, optimiser: optax.GradientTransformation, *, mesh: Any = None) -> Train:
    """The user's own loop around `make_step`, with batches made on the host."""
    ensemble, key = problem.ensemble(mesh), jax.random.key(0)
    step = ee.train.make_step(problem.loss, optimiser, mesh=mesh)

    def train(rows_of_epochs: Iterable[np.ndarray]) -> Any:
        state, losses = ee.train.init(ensemble, optimiser, key=key), []
        for rows in rows_of_epochs:
            for own in rows:
                state, metrics = step(state, (ee.Each(problem.x[own]), ee.Each(problem.y[own])))
                losses.append(metrics.loss)
        return losses

    return train


def fit_of_batches(problem: Problem, optimiser: optax.GradientTransformation) -> Train:
    """A `fit` of an iterable of the same batches."""
    ensemble, key = problem.ensemble(), jax.random.key(0)

    def train(rows_of_epochs: Iterable[np.ndarray]) -> Any:
        all_rows = (own for rows in rows_of_epochs for own in rows)
        batches = ((ee.Each(problem.x[own]), ee.Each(problem.y[own])) for own in all_rows)
        return ee.fit(ensemble, problem.loss, optimiser, batches, epochs=1, progress=False, key=key).history.loss.T

    return train
