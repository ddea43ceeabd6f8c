"""What calls, predictions, files and steps return; `test_programs.py` compares this with two type checkers."""
# pyright: strict
# ruff: noqa: F821

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]

import eqx_ensemble as ee

MLP = eqx.nn.MLP
State = eqx.nn.State


class Gaussian(eqx.Module):
    net: MLP

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.net(x), self.net(x)


class Stateful(eqx.Module):
    net: MLP

    def __call__(self, x: jax.Array, state: State) -> tuple[jax.Array, State]:
        return self.net(x), state


class Parameters(eqx.Module):
    weight: jax.Array


def make(key: jax.Array) -> MLP:
    return MLP(2, 1, 8, 1, key=key)


def make_stateful(key: jax.Array) -> tuple[Stateful, State]:
    model = Stateful(make(key))
    return model, State(model)


C = TypeVar("C", bound=Callable[..., jax.Array])
M = TypeVar("M")


def evaluate(ensemble: ee.Ensemble[C], run: ee.Run[C], x: jax.Array) -> jax.Array:
    reveal_type(ee.predict(ensemble, x))  # is Any
    total: jax.Array = ensemble(x) + run.predict(x)
    return total


def evaluate_any(ensemble: ee.Ensemble[Any], modules: ee.Ensemble[eqx.Module], x: jax.Array) -> None:
    reveal_type(ensemble(x))  # is Any
    reveal_type(ee.predict(ensemble, x))  # is Any


def first(ensemble: ee.Ensemble[M]) -> M:
    return ensemble[0]


def forward(
    ensemble: ee.Ensemble[MLP],
    x: jax.Array,
    combine: Callable[..., jax.Array] | None,
    fn: Callable[..., jax.Array] | None,
    **options: Any,
) -> jax.Array:
    alone: jax.Array = ee.predict(ensemble, x, **options)
    combined: jax.Array = ee.predict(ensemble, x, combine=combine, fn=fn, batch_size=8)
    total: jax.Array = alone + combined
    return total


def calling(
    mlps: ee.Ensemble[MLP],
    gaussians: ee.Ensemble[Gaussian],
    stateful: ee.Ensemble[Stateful],
    grid: ee.Ensemble[ee.Ensemble[MLP]],
    sequential: ee.Ensemble[eqx.nn.Sequential],
    parameters: ee.Ensemble[Parameters],
    state: State,
    x: jax.Array,
) -> None:
    reveal_type(mlps(x))  # is Any
    reveal_type(mlps(ee.Each(ee.Batch(x))))  # is Any
    reveal_type(gaussians(x))  # is Any
    reveal_type(stateful(x, state))  # is Any
    reveal_type(sequential(x))  # is Any
    reveal_type(sequential(x, state))  # is Any
    reveal_type(ee.predict(sequential, x))  # is Any
    reveal_type(ee.predict(sequential, x, state=state))  # is Any
    reveal_type(grid(x))  # is Any
    reveal_type(grid[0])  # is Ensemble[MLP]
    reveal_type(mlps[np.asarray(x)])  # is Ensemble[MLP]
    reveal_type(mlps[int(x)])  # is MLP
    reveal_type(mlps[x])  # is Ensemble[MLP]
    print(mlps[:1].width_size)  # error
    print(mlps[0].num_members)  # error


def predicting(
    mlps: ee.Ensemble[MLP],
    gaussians: ee.Ensemble[Gaussian],
    stateful: ee.Ensemble[Stateful],
    parameters: ee.Ensemble[Parameters],
    run: ee.Run[MLP],
    stateful_run: ee.Run[Stateful],
    sequential_run: ee.Run[eqx.nn.Sequential],
    state: State,
    x: jax.Array,
) -> None:
    def first(model: Gaussian, x: jax.Array) -> jax.Array:
        return model(x)[0]

    reveal_type(eqx.filter_jit(mlps)(x))  # is Any
    reveal_type(eqx.filter_jit(ee.predict)(mlps, x))  # is Any
    reveal_type(ee.predict(mlps, x, batch_size=64))  # is Any
    reveal_type(ee.predict(gaussians, x))  # is Any
    reveal_type(ee.predict(stateful, x, state=state))  # is Any
    reveal_type(ee.predict(gaussians, x, fn=first))  # is Any
    reveal_type(ee.predict(mlps, x, combine=ee.combine.mixture, weights=[0.5, 0.5]))  # is Any
    reveal_type(ee.predict(mlps, x, combine=ee.uncertainty.decompose_entropy).epistemic)  # is Any
    reveal_type(run.predict(x))  # is Any
    reveal_type(stateful_run.predict(x, strict=True))  # is Any
    reveal_type(sequential_run.predict(x))  # is Any
    reveal_type(run.predict(x, combine=ee.uncertainty.decompose_variance, batch_size=64).total)  # is Any
    ee.predict(mlps, x, batch_sise=64)  # error
    ee.predict(mlps[0], x)  # error


def files(mlps: ee.Ensemble[MLP], state: State, x: jax.Array) -> None:
    reveal_type(ee.load("a", make))  # is Ensemble[MLP]
    reveal_type(ee.load("a", make_stateful))  # is tuple[Ensemble[Stateful], State]
    reveal_type(ee.load("a", mlps, members=[0]))  # is Ensemble[MLP]
    reveal_type(ee.load("a", mlps[0]))  # is MLP
    reveal_type(ee.load("a", (mlps, state)))  # is tuple[Ensemble[MLP], State]
    reveal_type(ee.load("a", {"rate": x}))  # is dict[str, Array]
    ee.load("a", make, strikt=False)  # error


def steps(mlps: ee.Ensemble[MLP], x: jax.Array, key: jax.Array) -> None:
    def loss(model: MLP, batch: jax.Array, key: jax.Array) -> jax.Array:
        return model(batch).sum()

    optimiser: Any = optax.adam(1e-3)
    state = ee.train.init(mlps, optimiser, key=key)
    step = ee.train.make_step(loss, optimiser)
    reveal_type(step)  # is Step
    state, metrics = step(state, x)
    reveal_type(state)  # is TrainState[MLP]
    reveal_type(state.ensemble[0])  # is MLP
    reveal_type(metrics.loss)  # is Array
    reveal_type(ee.train.scan_steps(step, state, x)[0])  # is TrainState[MLP]
    reveal_type(ee.train.scan_steps(lambda state, batch: step(state, batch), state, x)[0])  # is TrainState[MLP]
    step(mlps, x)  # error
    ee.train.make_step("mse", optimiser)  # error
