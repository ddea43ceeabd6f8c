"""Runs, callbacks and descriptions; `test_programs.py` compares this with two type checkers."""
# pyright: strict
# ruff: noqa: F821

from typing import Any

import equinox as eqx
import jax
import numpy as np

import eqx_ensemble as ee

MLP = eqx.nn.MLP


def make(key: jax.Array) -> MLP:
    return MLP(2, 1, 8, 1, key=key)


class Recorder:
    """A callback that keeps the losses, and stops members below a threshold."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.rows: list[tuple[int, float]] = []

    def __call__(self, progress: ee.train.Progress) -> np.ndarray[Any, Any]:
        self.rows.append((progress.step, float(progress.loss.mean())))
        return progress.loss < self.threshold


def stop_early(progress: ee.train.Progress) -> bool:
    reveal_type(progress.step)  # is int
    reveal_type(progress.last_step)  # is int | None
    reveal_type(progress.loss)  # is ndarray[tuple[Any, ...], dtype[Any]]
    reveal_type(progress.score)  # is ndarray[tuple[Any, ...], dtype[Any]] | None
    reveal_type(progress.history.loss)  # is ndarray[tuple[Any, ...], dtype[Any]]
    reveal_type(progress.ensemble)  # is Ensemble[Any]
    reveal_type(progress.train_state.step)  # is Array
    print(progress.losses)  # error
    progress.step = 3  # error
    return progress.seconds > 60


def needs_two(progress: ee.train.Progress, path: str) -> None:
    print(progress, path)


def needs_metrics(metrics: ee.train.Metrics) -> None:
    print(metrics.loss)


def training(ensemble: ee.Ensemble[MLP], optimiser: Any, x: jax.Array, key: jax.Array) -> None:
    def loss(model: MLP, batch: jax.Array, key: jax.Array) -> jax.Array:
        return model(batch).sum()

    recorder = Recorder(0.1)
    callback: ee.train.Callback = recorder
    run = ee.fit(ensemble, loss, optimiser, x, epochs=3, callbacks=recorder, key=key)
    run = ee.fit(
        run,
        loss,
        optimiser,
        x,
        epochs=3,
        callbacks=[ee.train.every(10, callback), ee.train.every(10, stop_early)],
        key=key,
    )
    run = ee.fit(run, loss, optimiser, x, steps=3, callbacks=lambda progress: progress.step > 3, key=key)
    reveal_type(run)  # is Run[MLP]
    reveal_type(run.history.validation)  # is ndarray[tuple[Any, ...], dtype[Any]] | None
    reveal_type(run.best(3))  # is Ensemble[MLP]
    reveal_type(run.healthy[0])  # is MLP
    reveal_type(run.out_of_bag(x).mean)  # is Array
    on_diverge = ee.train.Revive(make, most=3)
    ee.fit(run.train_state, loss, optimiser, x, steps=3, on_diverge=on_diverge, key=key)

    ee.fit(ensemble, loss, optimiser, x, epochs=3, callbacks=needs_two, key=key)  # error
    ee.fit(ensemble, loss, optimiser, x, epochs=3, callbacks=[needs_metrics], key=key)  # error
    ee.fit(ensemble, loss, optimiser, x, epochs=3, callbacks=Recorder, key=key)  # error
    ee.fit(ensemble, loss, optimiser, x, epochs=3, callback=recorder, key=key)  # error
    ee.fit(ensemble, loss, optimiser, x, epochs=3, on_diverge="ignore", key=key)  # error
    run.best("validation")  # error


def joint_ensembles(model: MLP, ensemble: ee.Ensemble[MLP], key: jax.Array) -> None:
    joint = ee.methods.efficient.tabm(model, 4, key=key)
    reveal_type(joint)  # is JointEnsemble[MLP]
    reveal_type(ee.methods.efficient.members(joint))  # is Ensemble[MLP]
    reveal_type(ee.methods.efficient.members(ee.stack([joint])))  # is Ensemble[MLP]
    ee.methods.efficient.members(ensemble)  # error
    ee.methods.efficient.batch_ensemble(model, key=key)  # error
