"""A function that `map_members` decorates keeps its signature; `test_programs.py` compares with two type checkers."""
# pyright: strict
# ruff: noqa: F821

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax  # pyright: ignore[reportMissingTypeStubs]

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
    print(factor)
    return model


@ee.map_members
def init(model: MLP) -> Any:
    return {"momentum": model.layers[0].weight}


@ee.map_members
def step(model: MLP, state: optax.OptState, x: jax.Array) -> tuple[MLP, optax.OptState, jax.Array]:
    return model, state, x.sum()


@ee.map_members
def value_and_model(model: MLP, x: jax.Array) -> tuple[jax.Array, MLP]:
    return model(x), model


@ee.map_members
def optional(model: MLP, x: jax.Array | None = None, y: jax.Array | None = None) -> jax.Array:
    return model.layers[0].weight if x is None or y is None else model(x + y)


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
    reveal_type(ee.map_members(distance, plan=ee.plan.Sequential())(mlps, mlps[0]))  # is Array
    reveal_type(eqx.filter_jit(mse)(mlps, ee.Each(x)))  # is Array
    reveal_type(shrink(mlps, x))  # is Ensemble[MLP]
    reveal_type(step(mlps, init(mlps), x)[0])  # is Ensemble[MLP]
    reveal_type(step(mlps, init(mlps), x)[2])  # is Array
    reveal_type(step(mlps, mlps, ee.Each(x))[0])  # is Ensemble[MLP]
    reveal_type(optional(mlps))  # is Array
    reveal_type(optional(mlps, ee.Each(x)))  # is Array
    reveal_type(optional(mlps, y=ee.Each(x)))  # is Array
    reveal_type(ee.map_members(len)([mlps]))  # is int
    reveal_type(eqx.filter_jit(optional)(mlps, ee.Each(x)))  # is Array
    reveal_type(value_and_model(mlps, x))  # is tuple[Array, Ensemble[MLP]]
    reveal_type(mlps.to_stacked())  # is MLP
    free: Callable[..., jax.Array] = mse
    exact: Callable[[ee.Ensemble[MLP], jax.Array], jax.Array] = mse
    print(free(mlps, x), exact(mlps, x))

    mse(3, x)  # error
    mse(mlps.num_members, x=x)  # error
    mse(mlps, "x")  # error
    mse(mlps, x, x)  # error
    mse(mlps, ee.Each(x), x)  # error
    forward(mlps, x, {"a": mlps})  # error
    ee.map_members(distance)(mlps, x)  # error
    print(mse(mlps, x).num_members)  # error
    mse(mse(mlps, x), x)  # error
    print(shrink(mlps, x).width_size)  # error
    text: Callable[..., str] = mse  # error
    print(text, mse(mlps, x).shapes)  # error
    ee.map_members("mse")  # error
    ee.map_members(distance, plan="vmap")  # error
    ee.map_members(distance, axis=1)  # error
