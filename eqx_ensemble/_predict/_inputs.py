"""The inputs of a prediction, checked and on their devices."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .. import _axes, _check, _keys
from .._axes import check_rows_of_data
from .._ensemble import Ensemble, check_model_state, check_model_state_given
from .._pytree import PyTree
from .._sharding import Layout, layout_for, replicate, shard_members
from ..plan import AbstractPlan
from ._batch import MemberCall, PredictionInputs, combine_members, first_rows, predict_batch, size_of_few
from ._check import check_rows_of_result


def check_members_and_rows(ensemble: Ensemble[Any], x: PyTree, state: Any) -> int:
    """Raises unless the members fit their state and the rows. Returns the number of rows."""
    check_model_state_given(ensemble.stacked, state)
    check_model_state(state, ensemble.num_members)
    num_rows = check_rows_of_data(x, ensemble.num_members, argument="x", finite=False, least=0)
    _check.check_integers_fit((ensemble.stacked, ensemble.shared, state), argument="ensemble")
    return num_rows


def prepare_inputs(
    ensemble: Ensemble[Any], x: PyTree, state: Any, *, mesh: Mesh | None, key: Any
) -> tuple[PredictionInputs, Layout | None]:
    """The inputs on the devices of a mesh, and their layout; unchanged without a mesh."""
    keys = None if key is None else _axes.Each(_keys.member_keys(_keys.root(key), ensemble.ids, purpose="predict"))
    inputs = PredictionInputs(ensemble, _axes.map_each(_axes.Each, x), state, keys)
    layout = layout_for(mesh, ensemble.stacked)
    if layout is None or any(map(_check.is_traced, jax.tree.leaves(inputs))):
        return inputs, layout
    stacked, state, keys = shard_members((ensemble.stacked, state, keys), layout)
    shared, ids = replicate((ensemble.shared, ensemble.ids), layout)
    return PredictionInputs(Ensemble(stacked, shared, ids), inputs.x, state, keys), layout


def size_of_batch(inputs: PredictionInputs, num_rows: int, batch_size: int) -> int:
    """The number of rows of a batch: a power of two if there are fewer rows than `batch_size`."""
    padded = num_rows < batch_size and not any(map(_check.is_traced, jax.tree.leaves(inputs)))
    return size_of_few(num_rows, batch_size) if padded else min(batch_size, num_rows)


def predict_no_rows(
    plan: AbstractPlan, call: MemberCall, inputs: PredictionInputs, combine: Any, weights: Any
) -> PyTree:
    """The prediction for no rows, from the shapes of that for one row."""
    shapes = eqx.filter_eval_shape(
        lambda inputs: predict_batch(plan, call, inputs.one_row_of_zeros(), jnp.arange(1)), inputs
    )
    zeros = lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
    if weights is not None and weights.ndim == 2:
        weights = np.ones((len(weights), 1))
    out = combine_members(jax.tree.map(zeros, shapes), combine, weights)
    if combine is not None:
        check_rows_of_result(out, 1)
    return jax.tree.map(lambda x: first_rows(x, 0, axis=1 if combine is None else 0), out)
