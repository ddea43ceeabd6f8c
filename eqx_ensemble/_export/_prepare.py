from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import symbolic_shape

from .. import _keys
from .._check import (
    check_optional_function,
    check_positive_int,
)
from .._combination import of_predictions
from .._ensemble import Ensemble
from .._ensemble._check import check_ensemble
from .._ensemble._check_state import check_model_state, check_model_state_given
from .._predict._batch import MemberCall, PredictionInputs, predict_batch
from .._pytree import PyTree
from ..plan import AbstractPlan
from ..plan._auto import as_plan
from ..train._check_run import check_run_weights
from ._check import check_known_plan, check_row_shapes
from ._leaves import Packed, Parts, pack
from ._plain import plain


class ExportJob(NamedTuple):
    """A prediction to export.

    **Attributes:**

    - `run`: the prediction of all members for a batch, combined, in plain containers.
    - `packed`: the arrays in the first argument of `run`.
    - `row`: shapes and dtypes of one row of the input.
    """

    run: Callable[[Parts, PyTree], PyTree]
    packed: Packed
    row: PyTree


def prepare_export(
    ensemble: Ensemble[Any],
    call: MemberCall,
    *,
    name: str,
    shapes: PyTree,
    combine: Callable[..., Any] | None,
    weights: Any,
    state: Any,
    plan: AbstractPlan | None = None,
    key: Any = None,
) -> ExportJob:
    """Checks the arguments of an export, and makes its job."""
    check_ensemble(ensemble, name=name)
    check_optional_function(call.fn, "fn", name=name, example="lambda model, x: model(x)")
    check_optional_function(combine, "combine", name=name, example="combine.mean")
    row = check_row_shapes(shapes, name=name)
    check_model_state_given(ensemble.stacked, state, name=name)
    check_model_state(state, ensemble.num_members, name=name)
    convex = check_run_weights(weights, np.ones(ensemble.num_members, bool), combine, name=name)
    keys = None if key is None else _keys.member_keys(_keys.root(key, name=name), ensemble.ids, purpose="predict")
    plan = as_plan(plan)
    check_known_plan(plan, name=name)

    def run(parts: Parts, x: PyTree) -> PyTree:
        rows = jnp.arange(jax.tree.leaves(x)[0].shape[0])
        out = predict_batch(plan, call, PredictionInputs(parts.ensemble, x, parts.state, parts.keys), rows)
        if combine is not None:
            fn = of_predictions(combine)
            out = fn(out) if parts.weights is None else fn(out, weights=parts.weights)
        return plain(out, name=name)

    convex = None if convex is None else jnp.asarray(convex)
    return ExportJob(run, pack(Parts(ensemble, state, convex, keys), name=name), row)


def with_constants(job: ExportJob) -> Callable[[PyTree], PyTree]:
    """The prediction for a batch, with all arrays as constants."""
    return lambda x: job.run(job.packed.unpack(job.packed.arrays), x)


def batches(row: PyTree, batch_size: int | None, *, name: str) -> tuple[PyTree, Any]:
    """The shapes of a batch, with a symbolic number of rows if `batch_size` is `None`; and a symbol for the members."""
    batch, members = symbolic_shape("batch, members")
    if batch_size is not None:
        batch = check_positive_int(batch_size, "batch_size", name=name)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype), row), members
