"""Groups of architectures; `test_programs.py` compares this with two type checkers."""
# pyright: strict
# ruff: noqa: F821

from typing import Any

import equinox as eqx
import jax

import eqx_ensemble as ee

MLP = eqx.nn.MLP


def make_mlp(key: jax.Array) -> MLP:
    return MLP(2, 1, 8, 1, key=key)


def make(key: jax.Array) -> ee.Group:
    return ee.Group([ee.build(make_mlp, 2, key=key)])


def groups(wide: ee.Ensemble[MLP], linear: ee.Ensemble[eqx.nn.Linear], x: jax.Array, key: jax.Array) -> None:
    parts: dict[str, ee.Ensemble[Any]] = {"wide": wide, "linear": linear}  # mypy does not join the two by itself
    group = ee.Group(parts, renumber=True)
    reveal_type(group["wide"])  # is Ensemble[Any]
    reveal_type(group[1:])  # is Group
    reveal_type(group[[0, 2]])  # is Group
    reveal_type(group.num_members)  # is int
    reveal_type(ee.group([wide[0], linear[0]]))  # is Group
    both: list[ee.Group | ee.Ensemble[MLP]] = [group, wide]
    reveal_type(ee.concatenate(both))  # is Group
    reveal_type(ee.concatenate([wide, wide]))  # is Ensemble[MLP]
    reveal_type(ee.prune_members(group, x))  # is tuple[Group, Array]
    reveal_type(ee.load("path", make))  # is Group
    reveal_type(ee.load("path", group))  # is Group
    reveal_type(ee.predict(group, x, combine=ee.combine.mean))  # is Array
    ee.Group(wide[0])  # error
    ee.concatenate([wide, linear])  # error
    ee.average_parameters(group)  # error


def training(group: ee.Group, optimiser: Any, x: jax.Array, key: jax.Array) -> None:
    def loss(model: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        total: jax.Array = model(batch).sum()
        return total

    run = ee.fit(group, {"wide": loss, "linear": loss}, optimiser, x, epochs={"wide": 3, "linear": 1}, key=key)
    reveal_type(run)  # is GroupRun
    reveal_type(ee.fit(run, loss, optimiser, x, epochs=3, key=key))  # is GroupRun
    reveal_type(run.group)  # is Group
    reveal_type(run.best(3))  # is Group
    reveal_type(run.runs["wide"])  # is Run[Any]
    ee.fit(group, loss, optimiser, x, epochs=3)  # error
