import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .. import _axes, _check, tree
from .._ensemble import Ensemble
from ..plan import AbstractPlan
from ..plan._sharded import sharded_plan
from ..sharding._layout import Layout
from ..sharding._shard import shard_rows
from ._rows import row_of_zeros, take_rows


class Call(eqx.Module):
    """How a member is called with a row."""

    fn: Callable[..., Any] | None = eqx.field(static=True)
    inference: bool = eqx.field(static=True)
    layout: Layout | None = eqx.field(static=True, default=None)


class Inputs(eqx.Module):
    """All that a prediction reads: the members, the rows, and what belongs to them."""

    ensemble: Ensemble
    x: PyTree
    state: PyTree
    keys: Any

    def of_rows(self, rows: np.ndarray) -> "Inputs":
        """The inputs of some of the rows."""
        own = lambda value: _axes.Each(jax.tree.map(lambda x: take_rows(x, rows, axis=1), value))
        x = _axes.map_each(own, self.x, shared=lambda x: take_rows(x, rows, axis=0))
        return Inputs(self.ensemble, x, self.state, self.keys)

    def of_a_row_of_zeros(self) -> "Inputs":
        """The inputs of one row, where there is none."""
        own = lambda value: _axes.Each(jax.tree.map(lambda x: row_of_zeros(x, axis=1), value))
        x = _axes.map_each(own, self.x, shared=lambda x: row_of_zeros(x, axis=0))
        return Inputs(self.ensemble, x, self.state, self.keys)

    def of_members(self, chosen: slice) -> "Inputs":
        """The inputs of some of the members."""
        if len(range(*chosen.indices(self.ensemble.num_members))) == self.ensemble.num_members:
            return self
        x = _axes.map_each(lambda value: _axes.Each(tree.take(value, chosen)), self.x)
        state = None if self.state is None else tree.take(self.state, chosen)
        return Inputs(self.ensemble[chosen], x, state, None if self.keys is None else self.keys[chosen])


def predict_batch(plan: AbstractPlan, call: Call, inputs: Inputs, rows: jax.Array) -> PyTree:
    """The predictions of all members for all rows of `inputs`, whose places in the data are `rows`."""
    read = (inputs.ensemble, inputs.x, inputs.state, None if inputs.keys is None else _axes.Each(inputs.keys))
    own, view, _ = _axes.split_members(read, name="predict")

    def one(part: PyTree) -> PyTree:
        model, batch, state, key = view(part)
        model = eqx.nn.inference_mode(model) if call.inference else model
        row_keys = None if key is None else jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)

        def row(x: PyTree, key: Any) -> PyTree:
            before = () if state is None else (state,)
            named = {} if key is None else {"key": key}
            if call.fn is not None:
                return call.fn(model, x, *before, **named)
            out = model(x, *before, **named)
            return out if state is None else out[0]

        return jax.vmap(row)(batch, row_keys)

    return _axes.over_leading_axis(sharded_plan(plan, call.layout).run, one, own)


compiled_batch = eqx.filter_jit(predict_batch)


def arguments(
    call: Call, inputs: Inputs, rows: np.ndarray, *, members: slice = slice(None)
) -> tuple[Call, Inputs, jax.Array]:
    """What `predict_batch` takes, beside the plan, for some rows and members."""
    some = inputs.of_rows(rows).of_members(members)
    if call.layout is None or any(map(_check.is_traced, jax.tree.leaves(some.x))):
        return call, some, jnp.asarray(rows)
    return call, dataclasses.replace(some, x=shard_rows(some.x, call.layout)), shard_rows(rows, call.layout)


def alone(read: tuple[Call, Inputs, jax.Array]) -> tuple[Call, Inputs, jax.Array]:
    """The same as on one device, to be looked at."""
    call, inputs, rows = read
    return dataclasses.replace(call, layout=None), inputs, rows
