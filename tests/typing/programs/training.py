"""Runs, callbacks and descriptions; `test_programs.py` compares this with two type checkers."""
# pyright: strict
# ruff: noqa: F821

from typing import Any

import equinox as eqx
import jax

import eqx_ensemble as ee

MLP = eqx.nn.MLP


def make(key: jax.Array) -> MLP:
    return MLP(2, 1, 8, 1, key=key)


def halve(state: ee.train.TrainState[Any]) -> ee.train.TrainState[Any] | None:
    reveal_type(state.step)  # is Array
    reveal_type(state.loss)  # is Array
    reveal_type(state.ensemble)  # is Ensemble[Any]
    print(state.losses)  # error
    return state.stop(state.loss < 0.1) if state.loss.max() < 1 else None


def training(ensemble: ee.Ensemble[MLP], optimiser: Any, x: jax.Array, key: jax.Array) -> None:
    def loss(model: MLP, batch: jax.Array, key: jax.Array) -> jax.Array:
        return model(batch).sum()

    run = ee.fit(ensemble, loss, optimiser, x, epochs=3, callbacks=[ee.train.every(10, halve), halve], key=key)
    run = ee.fit(run, loss, optimiser, x, steps=3, callbacks=halve)
    reveal_type(run)  # is Run[MLP]
    reveal_type(run.history.validation)  # is ndarray[tuple[Any, ...], dtype[Any]] | None
    reveal_type(run.best(3))  # is Ensemble[MLP]
    reveal_type(run.healthy[0])  # is MLP
    reveal_type(run.out_of_bag(x).mean)  # is Any
    ee.fit(run.train_state, loss, optimiser, x, steps=3, callbacks=ee.train.revive(make, optimiser=optimiser))

    ee.fit(ensemble, loss, optimiser, x, epochs=3, on_diverge="ignore", key=key)  # error
    run.best("validation")  # error


def joint_ensembles(model: MLP, ensemble: ee.Ensemble[MLP], key: jax.Array) -> None:
    joint = ee.methods.efficient.tabm(model, 4, key=key)
    reveal_type(joint)  # is JointEnsemble[MLP]
    reveal_type(ee.methods.efficient.members(joint))  # is Ensemble[MLP]
    reveal_type(ee.methods.efficient.members(ee.stack([joint])))  # is Ensemble[MLP]
    ee.methods.efficient.members(ensemble)  # error
    ee.methods.efficient.batch_ensemble(model, key=key)  # error
