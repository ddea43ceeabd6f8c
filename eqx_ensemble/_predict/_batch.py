import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import _axes, _check, tree
from .._ensemble import Ensemble
from .._pytree import PyTree
from ..plan import AbstractPlan
from ..plan._sharded import sharded_plan
from ..sharding._layout import Layout
from ..sharding._shard import put, shard_rows
from ._blocks import take_block
from ._rows import row_of_zeros, take_rows


class MemberCall(eqx.Module):
    """The static part of calling a member with a row."""

    fn: Callable[..., Any] | None = eqx.field(static=True)
    inference: bool = eqx.field(static=True)
    layout: Layout | None = eqx.field(static=True, default=None)
    program_key: _axes.ProgramKey = eqx.field(static=True, default=())


class PredictionInputs(eqx.Module):
    """The arrays of a prediction: the members, the rows, and the members' states and keys."""

    ensemble: Ensemble
    x: PyTree
    state: PyTree
    keys: Any

    def take_rows(self, rows: np.ndarray) -> "PredictionInputs":
        """The inputs of some of the rows."""
        own = lambda value: _axes.Each(jax.tree.map(lambda x: take_rows(x, rows, axis=1), value))
        x = _axes.map_each(own, self.x, shared=lambda x: take_rows(x, rows, axis=0))
        return PredictionInputs(self.ensemble, x, self.state, self.keys)

    def one_row_of_zeros(self) -> "PredictionInputs":
        """The inputs with a single row of zeros, for the shapes of a prediction without rows."""
        own = lambda value: _axes.Each(jax.tree.map(lambda x: row_of_zeros(x, axis=1), value))
        x = _axes.map_each(own, self.x, shared=lambda x: row_of_zeros(x, axis=0))
        return PredictionInputs(self.ensemble, x, self.state, self.keys)

    def take_members(self, index: slice | np.ndarray, layout: Layout | None = None) -> "PredictionInputs":
        """The inputs of some of the members; on a mesh they stay on their devices."""
        if isinstance(index, slice) and len(range(*index.indices(self.ensemble.num_members))) == len(self.ensemble):
            return self
        x = _axes.map_each(lambda value: _axes.Each(tree.take(value, index)), self.x)
        if layout is not None and isinstance(index, np.ndarray):
            stacked, state, keys = take_block((self.ensemble.stacked, self.state, self.keys), index, layout)
            ids = put(np.asarray(self.ensemble.ids)[index], layout.replication)
            return PredictionInputs(Ensemble(stacked, self.ensemble.shared, ids), x, state, keys)
        state = None if self.state is None else tree.take(self.state, index)
        return PredictionInputs(self.ensemble[index], x, state, None if self.keys is None else self.keys[index])


def predict_batch(plan: AbstractPlan, call: MemberCall, inputs: PredictionInputs, rows: jax.Array) -> PyTree:
    """The predictions of all members for all rows of `inputs`; `rows` are their indices in the data."""
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


def batch_arguments(
    call: MemberCall, inputs: PredictionInputs, rows: np.ndarray, *, members: slice | np.ndarray = slice(None)
) -> tuple[MemberCall, PredictionInputs, jax.Array]:
    """The arguments of `predict_batch`, except for the plan, for some rows and members."""
    some = inputs.take_rows(rows).take_members(members, call.layout)
    if call.layout is None or any(map(_check.is_traced, jax.tree.leaves(some.x))):
        return call, some, jnp.asarray(rows)
    return call, dataclasses.replace(some, x=shard_rows(some.x, call.layout)), shard_rows(rows, call.layout)


def on_one_device(
    call: MemberCall, inputs: PredictionInputs, rows: jax.Array
) -> tuple[MemberCall, PredictionInputs, jax.Array]:
    """The same arguments without a layout, for static analysis."""
    return dataclasses.replace(call, layout=None), inputs, rows
