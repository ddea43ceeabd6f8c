"""A function that `map_members` decorates keeps its signature; `test_programs.py` compares with two type checkers."""
# pyright: strict
# ruff: noqa: F821

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import eqx_ensemble as ee

MLP = eqx.nn.MLP


class Shifted(ee.AbstractPerMember):
    x: jax.Array

    def per_member(self) -> jax.Array:
        return self.x

    def one(self, part: Any) -> jax.Array:
        return jnp.add(self.x, part)


@ee.map_members
def mse(model: MLP, x: jax.Array, *, scale: float = 1.0, key: jax.Array | None = None) -> jax.Array:
    return scale * model(x, key=key).sum()


@ee.map_members
def forward(model: MLP, batch: tuple[jax.Array, jax.Array], models: dict[str, MLP]) -> tuple[jax.Array, int]:
    return model(batch[0]) + models["a"](batch[1]), model.depth


def distance(a: MLP, b: MLP) -> jax.Array:
    return a.layers[0].weight - b.layers[0].weight


@ee.map_members
def shrink(model: MLP, factor: jax.Array) -> MLP:
    return jax.tree.map(lambda w: w * factor, model)


@ee.map_members
def step(model: MLP, state: optax.OptState, x: jax.Array) -> tuple[MLP, optax.OptState, jax.Array]:
    return model, state, x.sum()


@ee.map_members
def value_and_model(model: MLP, x: jax.Array) -> tuple[jax.Array, MLP]:
    return model(x), model


def mapping(mlps: ee.Ensemble[MLP], x: jax.Array, key: jax.Array) -> None:
    reveal_type(mse(mlps, x))  # is Array
    reveal_type(mse(mlps, x=x, scale=2.0))  # is Array
    reveal_type(mse(mlps, ee.Each(x)))  # is Array
    reveal_type(mse(mlps, x=ee.Each(x), scale=2.0))  # is Array
    reveal_type(mse(mlps[0], ee.Each(x)))  # is Array
    reveal_type(mse(ee.Each(mlps.stacked), x))  # is Array
    reveal_type(mse(mlps, Shifted(x)))  # is Array
    reveal_type(mse(mlps, x, key=mlps.keys(key)))  # is Array
    reveal_type(forward(mlps, (ee.Each(x), x), {"a": mlps}))  # is tuple[Array, int]
    reveal_type(ee.map_members(distance)(mlps, b=mlps))  # is Array
    reveal_type(ee.map_members(distance, plan="auto")(mlps, mlps[0]))  # is Array
    reveal_type(eqx.filter_jit(mse)(mlps, ee.Each(x)))  # is Array
    reveal_type(shrink(mlps, x))  # is Ensemble[MLP]
    reveal_type(step(mlps, None, x))  # is tuple[Ensemble[MLP], Any, Array]
    reveal_type(value_and_model(mlps, x))  # is tuple[Array, Ensemble[MLP]]
    reveal_type(mlps.to_stacked())  # is MLP
    free: Callable[..., jax.Array] = mse
    exact: Callable[[ee.Ensemble[MLP], jax.Array], jax.Array] = mse
    print(free(mlps, x), exact(mlps, x))

    text: Callable[..., str] = mse  # error
    print(text, mse(mlps, x).shapes)  # error
    ee.map_members("mse")  # error
    ee.map_members(distance, plan="vmap")  # error
    ee.map_members(distance, axis=1)  # error
