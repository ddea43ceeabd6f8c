"""What users write, for pyright alone: nothing here runs. Errors that must be reported carry an ignore comment."""
# pyright: reportUnnecessaryTypeIgnoreComment=true
# ruff: noqa: F821

from collections.abc import Callable
from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import eqx_ensemble as ee

MLP = eqx.nn.MLP
State = eqx.nn.State


class Stateful(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self, key: Array):
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")

    def __call__(self, x: Array, state: State) -> tuple[Array, State]:
        return self.norm(x, state)


class Parameters(eqx.Module):
    """A Module that cannot be called is no member."""

    weight: Array


def make(key: Array) -> MLP:
    return MLP(2, 1, 8, 1, key=key)


def loss(model: MLP, batch: tuple[Array, Array], key: Array) -> Array:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def building(key: Array, mlp: MLP, keys: Array) -> None:
    assert_type(ee.build(make, 8, key=key), ee.Ensemble[MLP])
    assert_type(ee.build(lambda key: MLP(2, 1, 8, 1, key=key), 8, key=key), ee.Ensemble[MLP])
    assert_type(ee.build(make, keys=keys), ee.Ensemble[MLP])
    assert_type(ee.build(make, ids=range(8, 12), key=key), ee.Ensemble[MLP])
    assert_type(ee.build(make, product={"p": [0.1, 0.2]}, shared=lambda m: m.layers, key=key), ee.Ensemble[MLP])
    assert_type(ee.build(eqx.nn.make_with_state(Stateful), 8, key=key), tuple[ee.Ensemble[Stateful], State])
    ensemble, state = ee.build(eqx.nn.make_with_state(Stateful), 8, key=key)
    assert_type(ensemble[0], Stateful)
    assert_type(state, State)
    assert_type(ee.build(lambda key: ee.build(make, 3, key=key), 5, key=key), ee.Ensemble[ee.Ensemble[MLP]])

    assert_type(ee.stack([mlp]), ee.Ensemble[MLP])
    assert_type(ee.stack(mlp for _ in range(3)), ee.Ensemble[MLP])
    assert_type(ee.from_stacked(mlp, shared=lambda m: m.layers), ee.Ensemble[MLP])
    assert_type(ee.stack([jnp.tanh, jnp.sin])[0](keys), Array)
    assert_type(ee.build(lambda key: Parameters(key), 8, key=key)[0], Parameters)
    assert_type(ee.stack([{"rate": jnp.ones(3)}]), ee.Ensemble[dict[str, Array]])

    ee.build(make, "8", key=key)  # pyright: ignore[reportArgumentType, reportCallIssue]
    ee.build(make, 8, key)  # pyright: ignore[reportCallIssue]
    ee.build(mlp.layers, 8, key=key)  # pyright: ignore[reportArgumentType, reportCallIssue]
    ee.stack(mlp)  # pyright: ignore[reportArgumentType]
    ee.stack([mlp], shared="layers")  # pyright: ignore[reportArgumentType]


def holding(ensemble: ee.Ensemble[MLP], x: Array, index: Array, key: Array) -> None:
    assert_type(ensemble[0], MLP)
    assert_type(ensemble[-1], MLP)
    assert_type(ensemble[np.int64(3)], MLP)
    assert_type(ensemble[1:], ee.Ensemble[MLP])
    assert_type(ensemble[[0, 1]], ee.Ensemble[MLP])
    assert_type(ensemble[[True, False]], ee.Ensemble[MLP])
    assert_type(ensemble[np.array([0, 1])], ee.Ensemble[MLP])
    assert_type(ensemble[index], Any)  # a jax array may be one integer or many
    assert_type(ensemble.unstack(), list[MLP])
    assert_type(list(ensemble), list[MLP])
    for model in ensemble:
        assert_type(model, MLP)
        assert_type(model.width_size, int)
    first, *rest = ensemble
    assert_type(first, MLP)
    assert_type(rest, list[MLP])
    assert_type(len(ensemble), int)
    assert_type(ensemble.num_members, int)
    assert_type(ensemble.stacked, MLP)
    assert_type(ensemble.ids, Array)
    assert_type(ensemble.keys(key), ee.Each)
    jax.vmap(ensemble[0])(x)
    eqx.filter_jit(ensemble)(x)
    ensemble(ee.Each(ee.Batch(x)), key=ensemble.keys(key))

    ensemble["a"]  # pyright: ignore[reportArgumentType, reportCallIssue]
    ensemble[0.5]  # pyright: ignore[reportArgumentType, reportCallIssue]
    _ = ensemble.members  # pyright: ignore[reportAttributeAccessIssue]
    _ = ensemble[0].stacked  # pyright: ignore[reportAttributeAccessIssue]
    ensemble.num_members = 3  # pyright: ignore[reportAttributeAccessIssue]


def combining(ensemble: ee.Ensemble[MLP], other: ee.Ensemble[eqx.nn.Linear], mlp: MLP) -> None:
    assert_type(ee.average_parameters(ensemble), MLP)
    assert_type(ee.average_parameters(ensemble, [0.5, 0.5]), MLP)
    assert_type(ee.concatenate([ensemble, ensemble[1:]]), ee.Ensemble[MLP])
    assert_type(ee.tree.stack([mlp, mlp]), MLP)
    assert_type(ee.tree.unstack(mlp), list[MLP])
    assert_type(ee.tree.take(mlp, 0), MLP)
    assert_type(ee.tree.weighted_mean([mlp, mlp]), MLP)

    ee.average_parameters(mlp)  # pyright: ignore[reportArgumentType]
    ee.concatenate([mlp])  # pyright: ignore[reportArgumentType, reportCallIssue]
    ee.concatenate([ensemble, other])  # pyright: ignore[reportArgumentType, reportCallIssue]


def training(ensemble: ee.Ensemble[MLP], optimiser: optax.GradientTransformation, x: Array, key: Array) -> None:
    y = x
    run = ee.fit(ensemble, loss, optimiser, (x, y), epochs=3, key=key)
    assert_type(run, ee.Run[MLP])
    assert_type(run.ensemble, ee.Ensemble[MLP])
    assert_type(run.ensemble[0], MLP)
    assert_type(run.ensemble[run.stopped_at < 0], ee.Ensemble[MLP])
    assert_type(run.train_state.ensemble[0], MLP)
    assert_type(run.interrupted, bool)
    assert_type(ee.concatenate([run[:1], run[1:]]), ee.Run[MLP])
    assert_type(ee.concatenate([run.train_state[:1], run.train_state[1:]]), ee.train.TrainState[MLP])
    ee.fit(ensemble, loss, lambda h: optax.adam(h["lr"]), (x, y), hyper={"lr": x}, steps=3, key=key)
    ee.fit(ensemble, loss, optimiser, [(x, y)], epochs=3, shuffle=False, plan=ee.plan.Chunked(2), key=key)

    ee.fit(ensemble, loss, optimiser, (x, y), epochs="3", key=key)  # pyright: ignore[reportArgumentType]
    ee.fit(ensemble, loss, optimiser, (x, y), epochs=3)  # pyright: ignore[reportCallIssue]
    ee.fit(ensemble, loss, optimiser, (x, y), 3, key=key)  # pyright: ignore[reportCallIssue]
    ee.fit(ensemble, "mse", optimiser, (x, y), epochs=3, key=key)  # pyright: ignore[reportArgumentType]
    ee.fit(ensemble, loss, 1e-3, (x, y), epochs=3, key=key)  # pyright: ignore[reportArgumentType]
    ee.fit(ensemble[0], loss, optimiser, (x, y), epochs=3, key=key)  # pyright: ignore[reportArgumentType]
    ee.fit(ensemble, loss, optimiser, (x, y), epochs=3, shuffle="own", key=key)  # pyright: ignore[reportArgumentType]
    ee.fit(ensemble, loss, optimiser, (x, y), epochs=3, plan="vmap", key=key)  # pyright: ignore[reportArgumentType]
    _ = run.weights  # pyright: ignore[reportAttributeAccessIssue]


def stacked_types(ensemble: ee.Ensemble[MLP], mlp: MLP, w: Array) -> None:
    def disagreement(model: ee.Stacked[MLP, "members"], w: Float[Array, " members"]) -> Float[Array, ""]:
        assert_type(model, MLP)
        return jnp.sum(w)

    def several(
        ensemble: ee.Stacked[ee.Ensemble[MLP], "members"],
        grid: ee.Stacked[MLP, "populations members"] | None = None,
        listed: list[ee.Stacked[MLP, "4"]] | None = None,
    ) -> ee.Stacked[ee.Ensemble[MLP], "2*members"]:
        assert_type(ensemble[0], MLP)
        assert_type(grid, MLP | None)
        return ensemble

    def anything(model: ee.Stacked[Callable[[Array], Array], "members"], other: ee.Stacked[Any, "members"]) -> Array:
        return model(w)

    disagreement(mlp, w)
    assert_type(several(ensemble), ee.Ensemble[MLP])
    anything(mlp, ensemble)

    disagreement(ensemble, w)  # pyright: ignore[reportArgumentType]
    several(mlp)  # pyright: ignore[reportArgumentType]
    several(ensemble, listed=[w])  # pyright: ignore[reportArgumentType]

    class Weighted(eqx.Module):
        ensemble: ee.Stacked[ee.Ensemble[MLP], "members"]
        w: Float[Array, " members"]

    assert_type(Weighted(ensemble, w).ensemble[0], MLP)
    Weighted(mlp, w)  # pyright: ignore[reportArgumentType]
