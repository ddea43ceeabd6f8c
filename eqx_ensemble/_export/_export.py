import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from .._caller import caller
from .._check import check_flag, check_installed, check_word
from .._ensemble import Ensemble
from .._jaxpr import plain_jit
from .._predict import MemberCall, check_inference
from .._pytree import PyTree
from ..checkpoint._engine import versions
from ..plan import AbstractPlan
from ._artefact import Artefact, about, describe_arrays
from ._check import (
    check_fits_inside,
    check_no_callbacks,
    check_no_random_numbers,
    check_plain_dtypes,
    check_platforms,
    explain_export,
    explain_onnx,
)
from ._prepare import Packed, batches, prepare_export, with_constants


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
    """Converts an ensemble into one ONNX model, for ONNX Runtime and other runtimes without jax (extra `onnx`).

    Inputs are named `x`, or `x.image` for `shapes={"image": ...}`; outputs are named `out` in the same way.

    **Arguments:**

    - `ensemble`, `shapes`, `combine`, `weights`, `batch_size`, `state`, `fn`, `inference`: as for
        [`eqx_ensemble.export`][].

    **Returns:** an `onnx.ModelProto`.

    **Raises:** `ImportError` without jax2onnx; `NotImplementedError` for operations that it does not support;
    `TypeError` as for [`eqx_ensemble.export`][].
    """
    check_installed("jax2onnx", what="export_onnx", extra="onnx")
    call = MemberCall(fn, check_inference(inference, None))
    job = prepare_export(ensemble, call, shapes=shapes, combine=combine, weights=weights, state=state)
    x, _ = batches(job.row, batch_size)
    with explain_export(job.row):
        traced = plain_jit(with_constants(job)).trace(x)
    # This drops random keys that inference requires and does not use.
    jaxpr, _ = dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.jaxpr.outvars), instantiate=True)
    check_no_callbacks(jaxpr)
    check_no_random_numbers(jaxpr)
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


PLATFORMS = ("cpu", "cuda", "tpu")


def export(
    ensemble: Ensemble[Any],
    *,
    shapes: PyTree,
    combine: Callable[..., Any] | None = None,
    weights: Any = None,
    batch_size: int | None = None,
    leaves: Literal["inside", "beside"] = "inside",
    symbolic_members: bool = False,
    platforms: Sequence[str] = PLATFORMS,
    state: Any = None,
    fn: Callable[..., Any] | None = None,
    inference: bool | None = None,
    plan: AbstractPlan | None = None,
    key: Any = None,
) -> Artefact:
    """Exports an ensemble as one StableHLO program, which runs without this library and without the model's code.

    The program takes a batch of rows and returns the result of [`eqx_ensemble.predict`][] with `combine`.

    **Arguments:**

    - `ensemble`: an ensemble, whose members are functions of one example; for a run, `run.healthy`.
    - `shapes`: the shape of one row of the input, `(13,)`, or a `jax.ShapeDtypeStruct` if its dtype is not the default
        float; for an input of several arrays, dicts, lists and tuples of these.
    - `combine`: called as `combine(predictions)` with arrays `(members, batch, ...)`. If not given, the program returns
        these.
    - `weights`: one weight per member `(members,)`, divided by their sum, for `combine(predictions, weights=weights)`.
    - `batch_size`: the rows in a batch; if not given, any number of at least one.
    - `leaves`: `"inside"`: the members' arrays are constants of `program(x)`. `"beside"`: they are an argument,
        `program(leaves, x)`, a dict of arrays by name: [one program, many ensembles](#one-program-many-ensembles).
    - `symbolic_members`: any number of members, for `leaves="beside"`.
    - `platforms`: the platforms that the program can run on: any of `"cpu"`, `"cuda"`, `"tpu"`, `"rocm"`.
    - `state`, `fn`, `inference`: as for [`eqx_ensemble.predict`][].
    - `plan`: the execution of the members, not `"auto"`. With `symbolic_members`, `Vmap()` or `Sequential()`.
    - `key`: as for [`eqx_ensemble.predict`][], but a constant of the program: every call draws the same numbers.

    **Returns:** an [`eqx_ensemble.Artefact`][].

    **Raises:** `ImportError` without flatbuffers; `TypeError` for host callbacks (`jax.debug.print` and the like), and
    for inputs and outputs that are not arrays in dicts, lists and tuples; `ValueError` for more leaves than fit inside.

    ```python
    import tempfile

    path = f"{tempfile.mkdtemp()}/ensemble.zip"
    ensemble = ee.build(lambda key: eqx.nn.MLP(13, 3, 50, 2, key=key), 8, key=key)
    artefact = ee.export(ensemble, shapes=(13,), combine=ee.combine.mixture)
    artefact(jnp.ones((5, 13))).shape  # (5, 3)
    artefact.save(path)
    ```
    """
    check_installed("flatbuffers", what="export", extra="export")
    check_word(leaves, "leaves", ("inside", "beside"))
    check_flag(symbolic_members, "symbolic_members")
    if symbolic_members and leaves == "inside":
        raise ValueError(
            f"`{caller()}` needs `leaves='beside'` with `symbolic_members=True`: a program for any number of members "
            "gets their arrays as an argument."
        )
    platforms = check_platforms(platforms)
    job = prepare_export(
        ensemble,
        MemberCall(fn, check_inference(inference, key)),
        shapes=shapes,
        combine=combine,
        weights=weights,
        state=state,
        plan=plan,
        key=key,
    )
    packed = job.packed
    x, symbolic = batches(job.row, batch_size)
    if leaves == "inside":
        check_fits_inside(sum(array.nbytes for array in packed.arrays.values()))
        program = _export_program(with_constants(job), (x,), platforms, job.row)
        return Artefact(program, None, about(program, ensemble, symbolic_members=False))
    check_plain_dtypes(packed.arrays)
    specs = _specs(packed, symbolic if symbolic_members else ensemble.num_members)
    program = _export_program(lambda leaves, x: job.run(packed.unpack(leaves), x), (specs, x), platforms, job.row)
    host = {text: np.asarray(array) for text, array in packed.arrays.items()}
    return Artefact(program, host, about(program, ensemble, symbolic_members=symbolic_members))


def _specs(packed: Packed, num_members: Any) -> dict[str, jax.ShapeDtypeStruct]:
    def spec(text: str, x: Any) -> jax.ShapeDtypeStruct:
        shape = (num_members, *x.shape[1:]) if text in packed.stacked else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=getattr(x, "weak_type", False))

    return {text: spec(text, x) for text, x in packed.arrays.items()}


def _export_program(
    fn: Callable[..., PyTree], specs: tuple[PyTree, ...], platforms: tuple[str, ...], row: PyTree
) -> jax_export.Exported:
    fn.__name__ = "ensemble"  # for error messages of calls of the program
    jitted = plain_jit(fn)
    with explain_export(row):
        check_no_callbacks(jitted.trace(*specs).jaxpr.jaxpr)
        return jax_export.export(jitted, platforms=platforms)(*specs)
