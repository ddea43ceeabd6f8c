import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from .._check import check_installed
from .._ensemble import Ensemble
from .._jaxpr import plain_jit
from .._predict._batch import MemberCall
from .._predict._check import check_inference
from .._pytree import PyTree
from ..checkpoint._snapshot import versions
from ._artefact import describe_arrays
from ._check import check_no_callbacks, check_no_random_numbers, explain_export, explain_onnx
from ._prepare import batches, prepare_export, with_constants


def export_onnx(
    ensemble: Ensemble[Any],
    *,
    shapes: PyTree,
    combine: Callable[..., Any] | None = None,
    weights: Any = None,
    batch_size: int | None = None,
    state: Any = None,
    fn: Callable[..., Any] | None = None,
    inference: bool | None = None,
) -> Any:
    """Converts an ensemble into one ONNX model, for ONNX Runtime and other runtimes without jax.

    Needs the extra `onnx`. jax2onnx does the conversion; it does not support random numbers and some less common
    operations, for which it raises. [`eqx_ensemble.export`][] has no such limit.

    Inputs are named `x`, or `x.image` for `shapes={"image": ...}`; outputs are named `out` in the same way.

    **Arguments:**

    - `ensemble`, `shapes`, `combine`, `weights`, `batch_size`, `state`, `fn`, `inference`: as for
        [`eqx_ensemble.export`][].

    **Returns:** an `onnx.ModelProto`: `onnx.save(model, path)` writes it to a file.

    **Raises:** `ImportError` without jax2onnx; `NotImplementedError` for random numbers and operations that it does not
    support; `TypeError` as for [`eqx_ensemble.export`][].
    """
    name = "export_onnx"
    check_installed("jax2onnx", what="export_onnx", extra="onnx")
    call = MemberCall(fn, check_inference(inference, None, name=name))
    job = prepare_export(ensemble, call, name=name, shapes=shapes, combine=combine, weights=weights, state=state)
    x, _ = batches(job.row, batch_size, name=name)
    with explain_export(job.row, name=name):
        traced = plain_jit(with_constants(job)).trace(x)
    # This drops random keys that inference requires and does not use.
    jaxpr, _ = dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.jaxpr.outvars), instantiate=True)
    check_no_callbacks(jaxpr, name=name)
    check_no_random_numbers(jaxpr, name=name)
    with explain_onnx():
        model = _convert(ClosedJaxpr(jaxpr, traced.jaxpr.consts), x, traced.out_info)
    origin = {"ids": ensemble.ids.tolist(), "versions": versions()}
    model.metadata_props.add(key="eqx_ensemble", value=json.dumps(origin))
    return model


def _convert(closed: ClosedJaxpr, x: PyTree, out: PyTree) -> Any:
    """Converts a traced program, so that jax2onnx sees JAX's operations instead of layers."""
    from jax2onnx import to_onnx  # pyright: ignore[reportMissingImports] (an extra)

    program = jaxpr_as_fun(closed)
    return to_onnx(
        lambda *x: tuple(program(*x)),
        jax.tree.leaves(x),
        model_name="ensemble",
        input_names=[entry["name"] for entry in describe_arrays(x, "x")],
        output_names=[entry["name"] for entry in describe_arrays(out, "out")],
        enable_double_precision=jnp.result_type(float) == jnp.float64,
    )
