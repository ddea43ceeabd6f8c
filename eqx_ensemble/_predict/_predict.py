from collections.abc import Callable, Mapping
from typing import Any, TypedDict, Unpack, overload

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh

from .. import _axes, _check
from .._axes._check_rows import check_no_batch, explain_rows
from .._combination import of_predictions, stream_of
from .._ensemble import Ensemble, Group
from .._ensemble._check import check_ensemble
from .._foreign import as_hashable, from_foreign_tree
from .._pytree import PyTree
from .._suggest import explain_as
from .._typing import CallableEnsemble, Out, StatefulEnsemble
from .._typing._signatures import ByPart
from ..plan import AnyPlan
from ..plan._auto import as_plan
from ..plan._pilot import Pilot, explain_memory
from ._batch import MemberCall, PredictionInputs, first_rows, size_of_few, weights_of
from ._check import check_combine, check_inference, check_rows_of_result
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
from ._group import predict_group
from ._inputs import check_budget, check_members_and_rows, predict_no_rows, prepare_inputs, size_of_batch
from ._run_works import Work, combine_parts, run_works


class PredictOptions(TypedDict, total=False):
    """The options of `predict` that never change the type of its result."""

    weights: Any
    batch_size: int
    memory: int | None
    inference: bool | None
    plan: AnyPlan
    mesh: Mesh | None
    progress: bool | None
    key: Any


class WithCombine(PredictOptions, total=False):
    """The options that do not change the type of the result with `combine`."""

    state: eqx.nn.State | None
    fn: Callable[..., Any] | None


class WithoutCombine(PredictOptions, total=False):
    """The options without `combine`, which may be given as `None`."""

    combine: None


class GroupOptions(TypedDict, total=False):
    """The options of `predict` for a group, some of which may differ between parts."""

    weights: Any
    batch_size: int
    memory: int | None
    inference: bool | None
    plan: AnyPlan | Mapping[str, AnyPlan]
    mesh: Mesh | None
    progress: bool | None
    key: Any
    state: Mapping[str, eqx.nn.State] | None
    fn: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None


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
@overload
def predict(ensemble: Group, x: PyTree, *, combine: Callable[..., Out], **options: Unpack[GroupOptions]) -> Out: ...
@overload
def predict(ensemble: Group, x: PyTree, *, combine: None = None, **options: Unpack[GroupOptions]) -> Any: ...
@explain_as("predict")
def predict(  # pyright: ignore[reportInconsistentOverload]  # the protocols stand for `Ensemble`
    ensemble: Ensemble[Any] | Group,
    x: PyTree,
    *,
    combine: Callable[..., Any] | None = None,
    weights: Any = None,
    batch_size: int = 256,
    memory: int | None = None,
    state: ByPart[eqx.nn.State | None] = None,
    fn: ByPart[Callable[..., Any] | None] = None,
    inference: bool | None = None,
    plan: ByPart[AnyPlan] = None,
    mesh: Mesh | None = None,
    progress: bool | None = None,
    key: Any = None,
) -> PyTree:
    """Predictions of every member for every row, in bounded memory.

    Rows are processed in batches of `batch_size`. Only the intermediate arrays of one batch are needed in addition to
    inputs and result; batches of a few hundred rows stay in a processor's cache. With `combine`, the predictions of all
    members exist for one batch at a time, and `memory` bounds the members that are processed together.

    **Arguments:**

    - `ensemble`: an ensemble, whose members are functions of one example; or an [`eqx_ensemble.Group`][], whose members
        must all return arrays of one shape. For a group, `fn`, `plan`, `state` and `x` may be dicts with one value per
        part, by name.
    - `x`: any PyTree of arrays `(rows, ...)`, of zero or more rows; parts marked [`eqx_ensemble.Each`][] are
        `(members, rows, ...)`. A member is called with one row.
    - `combine`: combines the members' predictions for a batch of rows, `(members, rows, ...)`: any function that treats
        rows independently and returns arrays `(rows, ...)`, called as `combine(predictions)`, or with weights as
        `combine(predictions, weights=weights)`; pass options by `functools.partial`. If all members do not fit into
        `memory`, functions of this library with a [streaming form][eqx_ensemble.combine.streaming] take some members at
        a time, as does an [`eqx_ensemble.combine.AbstractCombination`][] of your own; any other function is called with
        all members for fewer rows. Functions of a mean and a variance take members that return a pair.
    - `weights`: for `combine`, one weight per member `(members,)`; or per member and row, `(members, rows)`, such as
        those of a gate, which are split by batch and exclude the streaming form.
    - `batch_size`: rows per batch; with `memory`, the maximum. A program is compiled for this number of rows and, for
        fewer, for the next power of two: the last row is repeated as padding, and the padding is dropped.
    - `memory`: a budget in bytes for the peak in addition to inputs and result. Fewer rows and, if needed, fewer
        members are processed at a time; their numbers follow from measuring the first batches, because a compiler's
        estimates can be many times too low. On a CPU the memory of the process is sampled, which needs Linux;
        elsewhere, and on an accelerator whose earlier peak was higher, only the compiler's estimate is available. The
        memory of the compiler itself is not counted. `plan="auto"` then chooses by static analysis only.
    - `state`: the stacked `equinox.nn.State` of stateful members, which are called as `model(x, state)`; their new
        states are discarded.
    - `fn`: called instead of the member, as `fn(model, x)`, `fn(model, x, state)` or `fn(model, x, key=key)`.
    - `inference`: whether to put the members into inference mode (`equinox.nn.inference_mode`) first, which switches
        dropout off. The default is `True`; with `key` there is no default.
    - `plan`: the execution of the members; `"auto"` measures candidates while it processes the batches.
    - `mesh`: the devices to predict on, from [`eqx_ensemble.make_mesh`][]; for an ensemble that was built on a mesh,
        that one by default. Members are sharded over its axis `members`, the rows of a batch over `data`. `memory` is
        then a budget per device, or per process on CPUs, whose devices share it; the smallest one applies.
    - `progress`: show a progress line; by default on a terminal or in a notebook, after two seconds.
    - `key`: if given, members are called with `key=`, a different key for every row: with `inference=False` this is
        Monte-Carlo dropout.

    **Returns:** the predictions, each array `(members, rows, ...)`; with `combine`, its results, each array
    `(rows, ...)`.

    **Raises:** `ValueError` for a `key` without `inference`, and for results of `combine` other than `(rows, ...)`;
    `TypeError` for `weights` without `combine`, and for `memory` while tracing; `MemoryError` if one row of one member
    needs more than `memory`, or if there is no memory for the result.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 16, 2, key=key), 4, key=key)
    x = jnp.ones((1000, 3))
    ee.predict(ensemble, x).shape  # (4, 1000, 2)
    ee.predict(ensemble, x, combine=ee.combine.mixture).shape  # (1000, 2)
    parts = ee.predict(ensemble, x, combine=ee.uncertainty.decompose_entropy, memory=2**26)
    parts.epistemic.shape  # (1000,)
    ```
    """
    few, x, fn = None, from_foreign_tree(x, "x", name="predict"), as_hashable(fn)
    if isinstance(ensemble, Group):
        return predict_group(
            predict, ensemble, x, combine=combine, weights=weights, batch_size=batch_size, memory=memory, state=state,
            fn=fn, inference=inference, plan=plan, mesh=mesh, progress=progress, key=key,
        )  # fmt: skip
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
    check_no_batch(x)
    num_rows = check_members_and_rows(ensemble, x, state)
    if few is not None and can_keep_program(plan, x):
        program = make_program(plan, MemberCall(fn, inference), PredictionInputs(ensemble, x, state, None))
        out = _predict_few(program, few, x, combine, weights)
        keep_program(few, program)
        return out
    weights = check_combine(combine, weights, ensemble.num_members, num_rows)
    if combine is not None:
        streams = memory is not None and (weights is None or weights.ndim == 1)
        combine = (stream_of(combine) if streams else None) or of_predictions(combine)
    inputs, layout = prepare_inputs(ensemble, x, state, mesh=mesh, key=key)
    if num_rows == 0:
        return predict_no_rows(plan, MemberCall(fn, inference), inputs, combine, weights)
    call = MemberCall(fn, inference, layout, _axes.program_key((ensemble, state, fn, plan)))
    check_budget(memory, (inputs, weights))
    size = size_of_batch([inputs], num_rows, batch_size, memory)
    work = Work(Pilot(plan, name="predict"), call, inputs, num_rows, size)
    collect = lambda parts, rows: combine_parts(parts, combine, weights_of(weights, rows))
    return run_works([work], collect, axis=1 if combine is None else 0, memory=memory, progress=progress)


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
