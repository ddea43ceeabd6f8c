import time
from collections.abc import Callable, Iterator
from typing import Any, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .. import _axes, _check, _keys
from .._axes._check_rows import check_no_batch, check_rows_of_data, explain_rows
from .._combination import of_predictions, stream_of
from .._ensemble import Ensemble
from .._ensemble._check import check_ensemble
from .._ensemble._check_state import check_model_state, check_model_state_given
from .._foreign import from_foreign_tree
from .._progress import members_in_words, progress_line
from .._pytree import PyTree
from .._typing import CallableEnsemble, Out, StatefulEnsemble
from ..plan import AbstractPlan, AnyPlan
from ..plan._auto import as_plan
from ..plan._pilot import Pilot, explain_memory
from ..sharding._layout import Layout, layout_for
from ..sharding._shard import replicate, shard_members
from ._batch import MemberCall, PredictionInputs, batch_arguments, compiled_batch, on_one_device, predict_batch
from ._block_sizes import BlockSizes, measure
from ._check import check_combine, check_inference, check_rows_of_result, check_untraced
from ._few import (
    FewProgram,
    FewRows,
    can_keep_program,
    few_rows,
    find_program,
    keep_program,
    make_program,
    run_program,
)
from ._options import WithCombine, WithoutCombine
from ._output import OutputBuffer
from ._rows import first_rows, size_of_few, weights_of
from ._work import Work, combine_parts


@overload
def predict(
    ensemble: CallableEnsemble[Out],
    x: PyTree,
    *,
    state: None = None,
    fn: None = None,
    **options: Unpack[WithoutCombine],
) -> Out: ...
@overload
def predict(
    ensemble: StatefulEnsemble[tuple[Out, eqx.nn.State]],
    x: PyTree,
    *,
    state: eqx.nn.State,
    fn: None = None,
    **options: Unpack[WithoutCombine],
) -> Out: ...
@overload
def predict(
    ensemble: Ensemble[Any], x: PyTree, *, state: None = None, fn: Callable[..., Out], **options: Unpack[WithoutCombine]
) -> Out: ...
@overload
def predict(
    ensemble: Ensemble[Any],
    x: PyTree,
    *,
    state: eqx.nn.State,
    fn: Callable[..., tuple[Out, eqx.nn.State]],
    **options: Unpack[WithoutCombine],
) -> Out: ...
@overload
def predict(
    ensemble: Ensemble[Any], x: PyTree, *, combine: Callable[..., Out], **options: Unpack[WithCombine]
) -> Out: ...
def predict(  # pyright: ignore[reportInconsistentOverload]  # the protocols stand for `Ensemble`
    ensemble: Ensemble[Any],
    x: PyTree,
    *,
    combine: Callable[..., Any] | None = None,
    weights: Any = None,
    batch_size: int = 256,
    memory: int | None = None,
    state: eqx.nn.State | None = None,
    fn: Callable[..., Any] | None = None,
    inference: bool | None = None,
    plan: AnyPlan = None,
    mesh: Mesh | None = None,
    progress: bool | None = None,
    key: Any = None,
) -> PyTree:
    """Predictions of every member for every row, in bounded memory.

    Rows are processed in batches of `batch_size`, so that the intermediate arrays of one batch are all that is needed
    in addition to the result; batches of a few hundred rows stay in a processor's cache. With `combine` the predictions
    of all members exist for one batch at a time: apart from inputs and result, memory grows with neither members nor
    rows.

    **Arguments:**

    - `ensemble`: members are functions of one example.
    - `x`: any PyTree of arrays `(rows, ...)`, of zero or more rows; parts marked [`eqx_ensemble.Each`][] are
        `(members, rows, ...)`. A member is called with one row of it.
    - `combine`: combines the members' predictions for a batch of rows, `(members, rows, ...)`: any function that treats
        rows independently and returns arrays `(rows, ...)`, called as `combine(predictions)`, with weights as
        `combine(predictions, weights=weights)`, options by `functools.partial`. Where `memory` has no room for all
        members, functions of this library that have a [streaming form][eqx_ensemble.combine.streaming] take some at a
        time, as an [`eqx_ensemble.combine.AbstractCombination`][] of your own does; any other function is called with
        all members for fewer rows. Functions of a mean and a variance take members that return a pair.
    - `weights`: for `combine`, one weight for each member `(members,)`; or for each member and row, `(members, rows)`,
        such as those of a gate, of which each batch is given its own. With these no streaming form is used.
    - `batch_size`: rows per batch; with `memory`, the maximum. A program is compiled for this number of rows and, for
        fewer, for the next power of two: the last row is repeated as padding, and the padding is dropped.
    - `memory`: a budget in bytes for the peak in addition to inputs and result. Fewer rows and, if need be, fewer
        members are processed at a time; how many follows from measuring the first batches, since compilers' own
        estimates can be many times too low. On a CPU the memory of the process is sampled, which needs Linux;
        elsewhere, and on an accelerator that needed more before, only the compiler's estimate is known. The memory of
        the compiler itself is not counted. `plan="auto"` then chooses by static analysis only.
    - `state`: the stacked `equinox.nn.State` of stateful members, which are called as `model(x, state)` and whose new
        states are dropped.
    - `fn`: called instead of the member as `fn(model, x)`, `fn(model, x, state)`, `fn(model, x, key=key)`.
    - `inference`: whether to put the members into inference mode (`equinox.nn.inference_mode`) first, which switches
        dropout off. The default is `True`; with `key` there is no default.
    - `plan`: how the members are executed; `"auto"` measures candidates while it processes the batches.
    - `mesh`: the devices to predict on, from [`eqx_ensemble.make_mesh`][]; for an ensemble that was built on a mesh,
        that one. Members are sharded over its axis `members`, the rows of a batch over `data`; with `memory`, members
        are not padded, and there can be only one process.
    - `progress`: show a progress line; by default on a terminal or in a notebook, after two seconds.
    - `key`: if given, members are called with `key=`, a different key for every row: with `inference=False` this is
        Monte-Carlo dropout.

    **Returns:** the predictions, each array `(members, rows, ...)`; with `combine`, its results, each array
    `(rows, ...)`.

    **Raises:** `ValueError` for a `key` without `inference`; `MemoryError` when one row of one member needs more than
    `memory`, and when there is no memory for the result.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 16, 2, key=key), 4, key=key)
    x = jnp.ones((1000, 3))
    ee.predict(ensemble, x).shape  # (4, 1000, 2)
    ee.predict(ensemble, x, combine=ee.combine.mixture).shape  # (1000, 2)
    parts = ee.predict(ensemble, x, combine=ee.uncertainty.decompose_entropy, memory=2**26)
    parts.epistemic.shape  # (1000,)
    ```
    """
    few, x = None, from_foreign_tree(x, "x", name="predict")
    if memory is None and mesh is None and key is None and (progress is None or progress is False):
        few = few_rows(ensemble, x, state, fn=fn, inference=inference, plan=plan, batch_size=batch_size)
    program = None if few is None else find_program(few)
    if few is not None and program is not None:
        return _predict_few(program, few, x, combine, weights)
    check_ensemble(ensemble, name="predict")
    inference = check_inference(inference, key, name="predict")
    _check.check_optional_function(fn, "fn", name="predict", example="lambda model, x: model(x)")
    _check.check_optional_flag(progress, "progress", name="predict")
    plan = as_plan(plan)
    _check.check_positive_int(batch_size, "batch_size", name="predict")
    check_model_state_given(ensemble.stacked, state, name="predict")
    check_model_state(state, ensemble.num_members, name="predict")
    check_no_batch(x)
    num_rows = check_rows_of_data(x, ensemble.num_members, argument="x", name="predict", finite=False, least=0)
    _check.check_integers_fit((ensemble.stacked, ensemble.shared, state), argument="ensemble", name="predict")
    if few is not None and can_keep_program(plan, x):
        program = make_program(plan, MemberCall(fn, inference), PredictionInputs(ensemble, x, state, None))
        out = _predict_few(program, few, x, combine, weights)
        keep_program(few, program)
        return out
    weights = check_combine(combine, weights, ensemble.num_members, num_rows)
    if combine is not None:
        streams = memory is not None and (weights is None or weights.ndim == 1)
        combine = (stream_of(combine) if streams else None) or of_predictions(combine)
    keys = None if key is None else _keys.member_keys(_keys.root(key, name="predict"), ensemble.ids, purpose="predict")
    inputs, layout = _on_mesh(PredictionInputs(ensemble, _axes.map_each(_axes.Each, x), state, keys), mesh, memory)
    if num_rows == 0:
        return _of_no_rows(plan, MemberCall(fn, inference), inputs, combine, weights)
    padded = memory is None and num_rows < batch_size and not any(map(_check.is_traced, jax.tree.leaves(inputs)))
    batch_size = size_of_few(num_rows, batch_size) if padded else min(batch_size, num_rows)
    pilot = Pilot(plan, name="predict")
    collect = lambda parts, rows: combine_parts(parts, combine, weights_of(weights, rows))
    call = MemberCall(fn, inference, layout, _axes.number_kinds((ensemble, state)))
    work = Work(pilot, call, inputs, num_rows, batch_size, collect)
    if memory is not None:
        _check.check_positive_int(memory, "memory", name="predict")
        check_untraced((inputs, weights))

    axis = 1 if combine is None else 0
    output = OutputBuffer(num_rows, axis=axis)
    described = f"predict, {members_in_words(ensemble.num_members)}"
    with (
        progress_line(show=progress, description=described, total=num_rows, unit="row") as line,
        explain_memory(pilot, ensemble.num_members, name="predict"),
    ):
        for rows, out in _batches(work) if memory is None else _batches_within(memory, work):
            if combine is not None:
                check_rows_of_result(out, len(rows))
            if len(rows) > num_rows:
                out = jax.tree.map(lambda x: first_rows(x, num_rows, axis=axis), out)
            output.write(out, int(rows[0]))
            line.update(int(rows[-1]) + 1 - line.n)
    return output.value


def _predict_few(program: FewProgram, few: FewRows, x: PyTree, combine: Any, weights: Any) -> PyTree:
    """The prediction for at most a batch of rows, by one call of a program."""
    weights = check_combine(combine, weights, program.num_members, few.num_rows)
    with explain_memory(Pilot(program.plan, name="predict"), program.num_members, name="predict"):
        with explain_rows(x):
            out = run_program(program, few)
        if combine is not None:
            size = size_of_few(few.num_rows, few.batch_size)
            own = weights_of(weights, np.minimum(np.arange(size), few.num_rows - 1))
            out = combine_parts([(slice(None), out)], of_predictions(combine), own)
            check_rows_of_result(out, size)
        return jax.tree.map(lambda x: first_rows(x, few.num_rows, axis=1 if combine is None else 0), out)


def _on_mesh(inputs: PredictionInputs, mesh: Mesh | None, memory: int | None) -> tuple[PredictionInputs, Layout | None]:
    """The inputs on the devices of a mesh, with its layout; unchanged without a mesh."""
    layout = layout_for(mesh, inputs.ensemble.stacked, name="predict")
    if layout is None or any(map(_check.is_traced, jax.tree.leaves(inputs))):
        return inputs, layout
    if memory is not None and jax.process_count() > 1:
        raise NotImplementedError(
            "`predict` measures `memory` in one process, and these members are sharded over several.\n"
            "Pass `batch_size`: what a device needs is in proportion to the rows of a batch."
        )
    ensemble = inputs.ensemble
    stacked, state, keys = shard_members((ensemble.stacked, inputs.state, inputs.keys), layout)
    shared, ids = replicate((ensemble.shared, ensemble.ids), layout)
    # A budget is measured on blocks of members, which stay on the devices of these members.
    return PredictionInputs(Ensemble(stacked, shared, ids), inputs.x, state, keys), layout if memory is None else None


def _of_no_rows(plan: AbstractPlan, call: MemberCall, inputs: PredictionInputs, combine: Any, weights: Any) -> PyTree:
    """The prediction for no rows: that for one row, by its shapes alone, without this row."""
    shapes = eqx.filter_eval_shape(
        lambda inputs: predict_batch(plan, call, inputs.one_row_of_zeros(), jnp.arange(1)), inputs
    )
    zeros = lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
    if weights is not None and weights.ndim == 2:
        weights = np.ones((len(weights), 1))
    out = combine_parts([(slice(None), jax.tree.map(zeros, shapes))], combine, weights)
    if combine is not None:
        check_rows_of_result(out, 1)
    return jax.tree.map(lambda x: first_rows(x, 0, axis=1 if combine is None else 0), out)


def _batches(work: Work) -> Iterator[tuple[np.ndarray, PyTree]]:
    """The rows in batches of one size, with the result for them."""
    pilot, num_members, layout = work.pilot, work.inputs.ensemble.num_members, work.call.layout
    num_members = num_members if layout is None else layout.per_device(num_members)
    for start in range(0, work.num_rows, work.batch_size):
        rows = work.rows(start, work.batch_size)
        read = batch_arguments(work.call, work.inputs, rows)
        with explain_rows(work.inputs.x):
            pilot.look(predict_batch, *on_one_device(*read), num_members=num_members, unit="batch")
            began, trial = time.perf_counter(), pilot.watching
            out = pilot.call(lambda plan, read: compiled_batch(plan, *read), read)
        seconds = time.perf_counter() - began
        batches_left = (work.num_rows - 1 - start) // work.batch_size
        pilot.note(1, seconds, seconds_left=batches_left * seconds if trial else 0.0)
        yield rows, work.collect([(slice(None), out)], rows)


def _batches_within(memory: int, work: Work) -> Iterator[tuple[np.ndarray, PyTree]]:
    """The same within a budget of memory: the block of later batches follows from the peak of the first."""
    plan, call, inputs = work.pilot.plan, work.call, work.inputs
    with explain_rows(inputs.x):
        sizes = BlockSizes(memory, call, inputs, most_rows=work.batch_size)
    start = 0
    while start < work.num_rows:
        members, count = sizes.block
        rows = work.rows(start, count)
        chunks = [slice(i, i + members) for i in range(0, inputs.ensemble.num_members, members)]
        # Unfinished batches would occupy memory too: each one is awaited.
        some = lambda chunk, rows=rows: jax.block_until_ready(
            compiled_batch(plan, *batch_arguments(call, inputs, rows, members=chunk))
        )
        predict_rows = lambda chunks=chunks, some=some, rows=rows: work.collect(
            ((chunk, some(chunk)) for chunk in chunks), rows
        )
        if sizes.settled:
            out = jax.block_until_ready(predict_rows())
        else:
            out, need = measure(plan, call, inputs, rows, predict_rows, members=members)
            sizes.note(need)
        yield rows, out
        start += count
