import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack, overload

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from .. import _check
from .._axes import check_no_batch, explain_rows, is_per_member
from .._combination import of_predictions
from .._compiled import flatten, program_key
from .._ensemble import Ensemble, check_ensemble
from .._foreign import as_hashable, from_foreign_tree, own_array
from .._pytree import PyTree
from .._typing import CallableEnsemble, Out, StatefulEnsemble
from ..plan import AbstractPlan, AnyPlan
from ..plan._engine import as_plan, explain_memory, plan_in_program
from ._batch import FlatInputs, MemberCall, combine_members, compiled_rows, first_rows, size_of_few, weights_of
from ._check import check_combine, check_inference, check_rows_of_result
from ._inputs import check_members_and_rows, predict_no_rows, prepare_inputs, size_of_batch
from ._run_work import Work, run_work

# The fast path for few rows: most checks of `predict` depend on structures, shapes and dtypes only. Calls that were
# compiled before skip the checks, and take a tenth of the time.

_INTEGERS_OF_64_BITS = [np.dtype("int64"), np.dtype("uint64")]  # may not fit: checked by value, at every call


class FewRows(NamedTuple):
    """The arguments of `predict` for at most a batch of rows.

    **Attributes:**

    - `read`: the arguments of the program, with rows that are padded to a power of two by repeating the last one.
    - `num_rows`, `size`: the number of rows without the padding, and with it.
    """

    read: FlatInputs
    num_rows: int
    size: int


def few_rows(
    ensemble: Any, x: PyTree, state: Any, *, fn: Any, inference: Any, plan: Any, batch_size: Any
) -> FewRows | None:
    """The arguments for few rows; `None` without a fast path, as for several devices, or rows not on a CPU."""
    if type(ensemble) is not Ensemble or type(batch_size) is not int or type(inference) not in (bool, type(None)):
        return None
    if not isinstance(plan, AbstractPlan | None) or _check.is_inside_transformation():
        return None
    rows, structure = jax.tree.flatten(x)
    if not rows or not all(map(_is_rows, rows)):
        return None
    num_rows = rows[0].shape[0]
    if not 1 <= num_rows <= batch_size or any(x.shape[0] != num_rows for x in rows):
        return None
    try:
        arrays = [*flatten(ensemble).arrays, *flatten(state).arrays]
        own_plan, call = _call(fn, inference, plan)
    except TypeError:  # something cannot be hashed
        return None
    if not all(map(_is_plain, arrays)):
        return None
    size = size_of_few(num_rows, batch_size)
    x = jax.tree.unflatten(structure, [own_array(x) if size == num_rows else _pad(x, size) for x in rows])
    return FewRows((own_plan, call, ensemble, state, x, None, None), num_rows, size)


@ft.lru_cache(maxsize=512)
def _call(fn: Any, inference: Any, plan: AbstractPlan | None) -> tuple[AbstractPlan, MemberCall]:
    return as_plan(plan), MemberCall(fn, inference is not False)


def can_be_few(plan: AbstractPlan, x: PyTree) -> bool:
    """Whether the plan is fixed, and all rows are shared by the members."""
    return not any(map(is_per_member, jax.tree.leaves(x, is_leaf=is_per_member)))


def _is_plain(x: Any) -> bool:
    """Whether an array is concrete, on one device, and passes every check by its shape and dtype alone."""
    if isinstance(x, np.ndarray | np.generic):
        return type(x) is np.ndarray and x.dtype not in _INTEGERS_OF_64_BITS
    return not _check.is_traced(x) and isinstance(x.sharding, SingleDeviceSharding)


def _is_rows(x: Any) -> bool:
    if not isinstance(x, jax.Array | np.ndarray) or x.ndim == 0 or not _is_plain(x):
        return False
    if isinstance(x, np.ndarray):
        return True
    if _check.is_key(x) or x.aval.weak_type:
        return False
    return all(device.platform == "cpu" for device in x.sharding.device_set)


def _pad(x: Any, size: int) -> Any:
    host = np.asarray(x)
    padded = np.empty((size, *host.shape[1:]), host.dtype)
    padded[: len(host)], padded[len(host) :] = host, host[-1]
    return jax.device_put(padded, x.sharding) if isinstance(x, jax.Array) and x.committed else padded


class PredictOptions(TypedDict, total=False):
    """The options of `predict` that never change the type of its result."""

    weights: Any
    batch_size: int
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
    state: eqx.nn.State | None = None,
    fn: Callable[..., Any] | None = None,
    inference: bool | None = None,
    plan: AnyPlan = None,
    mesh: Mesh | None = None,
    progress: bool | None = None,
    key: Any = None,
) -> PyTree:
    """Predictions of every member for every row, some rows at a time.

    Rows are processed in batches, on a CPU several at the same time on all cores. With `combine`, the predictions of
    all members exist for some batches at a time. Results do not depend on the number of cores.

    **Arguments:**

    - `ensemble`: an ensemble, whose members are functions of one example.
    - `x`: any PyTree of arrays `(rows, ...)`; parts marked [`eqx_ensemble.Each`][] are `(members, rows, ...)`. A member
        is called with one row.
    - `combine`: a function of the predictions for some rows, `(members, rows, ...)`, that treats rows independently and
        returns arrays `(rows, ...)`: `combine(predictions)`, or `combine(predictions, weights=weights)`; pass options
        by `functools.partial`. An [`eqx_ensemble.combine.AbstractCombination`][] of your own works, too. Functions of a
        mean and a variance take members that return a pair.
    - `weights`: for `combine`, one weight per member `(members,)`; or per member and row, `(members, rows)`.
    - `batch_size`: rows per batch. With `plan=ee.plan.Chunked(size)`, it bounds the memory.
    - `state`: the stacked `equinox.nn.State` of stateful members, which are called as `model(x, state)`; their new
        states are discarded.
    - `fn`: called instead of the member, as `fn(model, x)`, `fn(model, x, state)` or `fn(model, x, key=key)`.
    - `inference`: whether to put the members into inference mode (`equinox.nn.inference_mode`), which switches dropout
        off. The default is `True`; with `key` there is no default.
    - `plan`: the execution of the members; `ee.plan.Cores(count=1)` limits the number of cores.
    - `mesh`: the devices to predict on, from [`eqx_ensemble.make_mesh`][]; by default those on which the ensemble was
        built. Members are sharded over its axis `members`, rows over `data`.
    - `progress`: show a progress line; by default on a terminal or in a notebook, after two seconds.
    - `key`: if given, members are called with `key=`, a different key for every row: with `inference=False` this is
        Monte-Carlo dropout.

    **Returns:** the predictions, each array `(members, rows, ...)`; with `combine`, its results `(rows, ...)`.

    **Raises:** `ValueError` for a `key` without `inference`, and for results of `combine` other than `(rows, ...)`;
    `TypeError` for `weights` without `combine`; `MemoryError` if there is no memory for the result.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 16, 2, key=key), 4, key=key)
    x = jnp.ones((1000, 3))
    ee.predict(ensemble, x).shape  # (4, 1000, 2)
    ee.predict(ensemble, x, combine=ee.combine.mixture).shape  # (1000, 2)
    parts = ee.predict(ensemble, x, combine=ee.uncertainty.decompose_entropy)
    parts.epistemic.shape  # (1000,)
    ```
    """
    few, x, fn = None, from_foreign_tree(x, "x"), as_hashable(fn)
    if mesh is None and key is None and (progress is None or progress is False):
        few = few_rows(ensemble, x, state, fn=fn, inference=inference, plan=plan, batch_size=batch_size)
    if few is not None and compiled_rows.traits(few.read) is not None:
        return _predict_few(few, x, combine, weights)
    check_ensemble(ensemble)
    inference = check_inference(inference, key)
    _check.check_optional_function(fn, "fn", example="lambda model, x: model(x)")
    _check.check_optional_flag(progress, "progress")
    plan = as_plan(plan)
    _check.check_positive_int(batch_size, "batch_size")
    check_no_batch(x)
    num_rows = check_members_and_rows(ensemble, x, state)
    if few is not None and can_be_few(plan, x):
        return _predict_few(few, x, combine, weights)
    weights = check_combine(combine, weights, ensemble.num_members, num_rows)
    if combine is not None:
        combine = of_predictions(combine)
    inputs, layout = prepare_inputs(ensemble, x, state, mesh=mesh, key=key)
    if num_rows == 0:
        return predict_no_rows(plan, MemberCall(fn, inference), inputs, combine, weights)
    call = MemberCall(fn, inference, layout, program_key((ensemble, state, fn, plan_in_program(plan))))
    size = size_of_batch(inputs, num_rows, batch_size)
    work = Work(plan, call, inputs, num_rows, size)
    collect = lambda out, rows: combine_members(out, combine, weights_of(weights, rows))
    return run_work(work, collect, axis=1 if combine is None else 0, progress=progress)


def _predict_few(few: FewRows, x: PyTree, combine: Any, weights: Any) -> PyTree:
    """The prediction for at most a batch of rows, by one call of a program."""
    plan, _, ensemble, *_ = few.read
    weights = check_combine(combine, weights, ensemble.num_members, few.num_rows)
    with explain_memory(plan, ensemble.num_members):
        with explain_rows(x):
            _, out = compiled_rows(few.read)
        if combine is not None:
            own = weights_of(weights, np.minimum(np.arange(few.size), few.num_rows - 1))
            out = combine_members(out, of_predictions(combine), own)
            check_rows_of_result(out, few.size)
        return jax.tree.map(lambda x: first_rows(x, few.num_rows, axis=1 if combine is None else 0), out)
