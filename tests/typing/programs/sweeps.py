"""Hyper-parameters, methods and rows; `test_programs.py` compares this with two type checkers."""
# pyright: strict
# ruff: noqa: F821

from typing import Any

import equinox as eqx
import jax
import numpy as np

import eqx_ensemble as ee

MLP = eqx.nn.MLP


class Halves(ee.sweep.AbstractRange):
    """A range of the user's own."""

    def draw(self, generator: np.random.Generator) -> float:
        return float(generator.integers(2)) / 2

    def rescale(self, value: float, factor: float) -> float:
        return value * factor


def make(key: jax.Array) -> MLP:
    return MLP(2, 1, 8, 1, key=key)


def make_stateful(key: jax.Array) -> tuple[MLP, eqx.nn.State]:
    model = make(key)
    return model, eqx.nn.State(model)


def loss(model: MLP, batch: jax.Array, key: jax.Array) -> jax.Array:
    return model(batch).sum()


def sweeping(ensemble: ee.Ensemble[MLP], optimiser: Any, x: jax.Array, key: jax.Array) -> None:
    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1), "depth": ee.sweep.Choice([1, 2]), "half": Halves()}
    reveal_type(ee.sweep.draw(ranges, 8, key=key))  # is dict[str, Array]
    reveal_type(ee.sweep.grid({"lr": [1e-3, 1e-2], "decay": x}))  # is dict[str, Array]
    hyper = ee.sweep.draw({"lr": ee.sweep.Uniform(0.1, 0.2)}, 8, key=key)
    reveal_type(ee.fit(ensemble, loss, optimiser, x, hyper=hyper, epochs=3, key=key))  # is Run[MLP]

    ee.sweep.draw({"lr": 1e-3}, 8, key=key)  # error
    ee.sweep.draw([1e-3], 8, key=key)  # error
    ee.sweep.LogUniform("1e-3", 1)  # error
    ee.sweep.LogUniform(1e-3)  # error
    ee.sweep.grid({"lr": [1e-3]}, key=key)  # error


def methods(ensemble: ee.Ensemble[MLP], optimiser: Any, x: jax.Array, key: jax.Array) -> None:
    hyper = ee.sweep.grid({"lr": [1e-3, 1e-2]})
    population = ee.methods.population_based_training(
        ensemble, loss, optimiser, x, hyper=hyper, validation=x, rounds=3, epochs=2, key=key
    )
    reveal_type(population)  # is Population[MLP]
    reveal_type(population.run.ensemble[0])  # is MLP
    reveal_type(population.ancestors(0))  # is ndarray[tuple[Any, ...], dtype[Any]]
    halved = ee.methods.successive_halving(ensemble, loss, optimiser, x, validation=x, epochs=2, key=key)
    reveal_type(halved)  # is Run[MLP]
    runs = ee.methods.hyperband(
        make, {"lr": ee.sweep.Uniform(0, 1)}, loss, optimiser, x, validation=x, epochs=9, key=key
    )
    reveal_type(runs)  # is list[Run[Any]]
    runs = ee.methods.hyperband(
        make_stateful, {"lr": ee.sweep.Uniform(0, 1)}, loss, optimiser, x, validation=x, epochs=9, key=key
    )
    reveal_type(runs)  # is list[Run[Any]]
    folds = ee.resample.folds(100, 5, key=key)
    fitted = ee.methods.cross_fit(ensemble, loss, optimiser, x, folds, x=x, epochs=3, key=key)
    reveal_type(fitted.run)  # is Run[Any]
    reveal_type(fitted.held_out.mean)  # is Array
    run, held_out = fitted
    reveal_type(run.ensemble)  # is Ensemble[Any]
    reveal_type(held_out.num_members)  # is Array

    ee.methods.cross_fit(ensemble, loss, optimiser, x, 5, x=x, epochs=3, key=key)  # error
    ee.methods.successive_halving(ensemble, loss, optimiser, x, epochs=2, key=key)  # error
    ee.methods.hyperband(ensemble, {}, loss, optimiser, x, validation=x, key=key)  # error


def resampling(ensemble: ee.Ensemble[MLP], optimiser: Any, x: jax.Array, key: jax.Array) -> None:
    rows = ee.resample.bootstrap(100, 8, key=key)
    reveal_type(rows)  # is Array
    reveal_type(ee.resample.bayesian_weights(100, 8, key=key))  # is Array
    run = ee.fit(ensemble, loss, optimiser, x, rows=rows, epochs=3, key=key)
    reveal_type(run.out_of_bag(x))  # is Any
    reveal_type(ee.resample.held_out_mean(run.predict(x), ee.resample.out_of_bag(rows, 100)))  # is HeldOut
    folds = ee.resample.from_splits([(np.arange(50), np.arange(50, 100))], 100)
    reveal_type(folds)  # is Folds
    reveal_type(folds.train)  # is Array
    reveal_type(ee.resample.held_out_mean(run.predict(x), folds.in_test).mean)  # is Array

    ee.resample.bootstrap(100, 8)  # error
    ee.resample.bootstrap(100, 8, key)  # error
    ee.resample.subsets(100, 8, size="half", key=key)  # error
    ee.resample.from_splits([(np.arange(50), np.arange(50, 100))], 100, uneven="ignore")  # error
