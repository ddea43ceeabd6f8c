from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .. import _axes, _check, _keys
from .._axes import check_no_batch, check_rows_of_data
from .._combination import AbstractCombination, of_predictions, stream_of
from .._compiled import program_key
from .._ensemble import (
    Ensemble,
    Group,
    by_part,
    check_like_outputs,
    check_model_state,
    check_model_state_given,
    data_by_part,
    explain_part,
    join_values,
    member_positions,
    states_by_part,
)
from .._foreign import as_hashable
from .._pytree import PyTree
from .._sharding import Layout, layout_for, replicate, shard_members
from ..plan import AbstractPlan
from ..plan._engine import Pilot, as_plan, plan_in_program
from ._batch import (
    MemberCall,
    PredictionInputs,
    combine_parts,
    first_rows,
    predict_batch,
    row_of_zeros,
    size_of_few,
    weights_of,
)
from ._check import check_combine, check_inference, check_rows_of_result, check_untraced
from ._run_works import Work, run_works

# The inputs of a prediction, checked and on their devices.


def check_members_and_rows(ensemble: Ensemble[Any], x: PyTree, state: Any) -> int:
    """Raises unless the members fit their state and the rows. Returns the number of rows."""
    check_model_state_given(ensemble.stacked, state)
    check_model_state(state, ensemble.num_members)
    num_rows = check_rows_of_data(x, ensemble.num_members, argument="x", finite=False, least=0)
    _check.check_integers_fit((ensemble.stacked, ensemble.shared, state), argument="ensemble")
    return num_rows


def check_budget(memory: Any, read: PyTree) -> None:
    """Raises unless `memory` is a positive integer and the arrays are concrete, or `memory` is `None`."""
    if memory is not None:
        _check.check_positive_int(memory, "memory")
        check_untraced(read)


def prepare_inputs(
    ensemble: Ensemble[Any], x: PyTree, state: Any, *, mesh: Mesh | None, key: Any
) -> tuple[PredictionInputs, Layout | None]:
    """The inputs on their devices, and their layout on a mesh."""
    keys = None if key is None else _axes.Each(_keys.member_keys(_keys.root(key), ensemble.ids, purpose="predict"))
    return _on_mesh(PredictionInputs(ensemble, _axes.map_each(_axes.Each, x), state, keys), mesh)


def size_of_batch(inputs: Sequence[PredictionInputs], num_rows: int, batch_size: int, memory: int | None) -> int:
    """The number of rows of a batch: a power of two if there are fewer rows than `batch_size`."""
    padded = memory is None and num_rows < batch_size and not any(map(_check.is_traced, jax.tree.leaves(inputs)))
    return size_of_few(num_rows, batch_size) if padded else min(batch_size, num_rows)


def _on_mesh(inputs: PredictionInputs, mesh: Mesh | None) -> tuple[PredictionInputs, Layout | None]:
    """The inputs on the devices of a mesh, with its layout; unchanged without a mesh."""
    layout = layout_for(mesh, inputs.ensemble.stacked)
    if layout is None or any(map(_check.is_traced, jax.tree.leaves(inputs))):
        return inputs, layout
    ensemble = inputs.ensemble
    stacked, state, keys = shard_members((ensemble.stacked, inputs.state, inputs.keys), layout)
    shared, ids = replicate((ensemble.shared, ensemble.ids), layout)
    return PredictionInputs(Ensemble(stacked, shared, ids), inputs.x, state, keys), layout


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
    out = combine_parts([(slice(None), jax.tree.map(zeros, shapes))], combine, weights)
    if combine is not None:
        check_rows_of_result(out, 1)
    return jax.tree.map(lambda x: first_rows(x, 0, axis=1 if combine is None else 0), out)


class Part(NamedTuple):
    """A part of a group: its name, the positions of its members in the group, and their arguments."""

    name: str
    ensemble: Ensemble[Any]
    members: np.ndarray
    x: PyTree
    state: Any
    fn: Any
    plan: Any


def predict_group(
    predict: Callable[..., PyTree],
    group: Group,
    x: PyTree,
    *,
    combine: Any,
    weights: Any,
    batch_size: int,
    memory: int | None,
    state: Any,
    fn: Any,
    plan: Any,
    progress: bool | None,
    **options: Any,
) -> PyTree:
    """The predictions of all members of a group, in its order; `predict` is that of an ensemble.

    Few rows are predicted by one part after another. With more rows, all parts predict a batch before the next one, so
    that combined predictions need memory for one batch only.
    """
    check_no_batch(x)
    _check.check_positive_int(batch_size, "batch_size")
    _check.check_optional_flag(progress, "progress")
    check_inference(options["inference"], options["key"])
    parts = _parts(group, x, state, fn, plan)
    num_rows = _num_rows(parts)
    weights = check_combine(combine, weights, group.num_members, num_rows)
    streams = memory is not None and (weights is None or weights.ndim == 1)
    if combine is not None:
        combine = (stream_of(combine) if streams else None) or of_predictions(combine)
    collect = lambda outs, rows: _collect(outs, combine, weights_of(weights, rows), parts)
    axis = 1 if combine is None else 0
    if num_rows > batch_size or (memory is not None and num_rows > 0):
        check_budget(memory, (group, x, state, weights))
        works = _works(parts, num_rows, batch_size, memory=memory, **options)
        return run_works(works, collect, axis=axis, memory=memory, progress=progress)
    at_least_one = parts if num_rows else [part._replace(x=_one_row_of_zeros(part.x)) for part in parts]
    outs = []
    for part in at_least_one:
        own = options | {"state": part.state, "fn": part.fn, "plan": part.plan}
        with explain_part(part.name):
            outs.append((part.members, predict(part.ensemble, part.x, batch_size=batch_size, progress=False, **own)))
    if num_rows == 0 and weights is not None and weights.ndim == 2:
        weights = np.ones((len(weights), 1))
    rows = np.arange(max(num_rows, 1))
    out = collect(outs, rows)
    if combine is not None:
        check_rows_of_result(out, len(rows))
    return out if num_rows else jax.tree.map(lambda x: first_rows(x, 0, axis=axis), out)


def _parts(group: Group, x: PyTree, state: Any, fn: Any, plan: Any) -> list[Part]:
    xs, states = data_by_part(group, x), states_by_part(state, group.parts)
    fns, plans = (by_part(value, group.parts, word) for word, value in (("fn", fn), ("plan", plan)))
    for own in fns.values():
        _check.check_optional_function(own, "fn", example="lambda model, x: model(x)")
    return [
        Part(name, group.parts[name], members, xs[name], states[name], as_hashable(fns[name]), plans[name])
        for name, members in member_positions(group).items()
    ]


def _num_rows(parts: list[Part]) -> int:
    counts = {}
    for part in parts:
        with explain_part(part.name):
            counts[part.name] = check_members_and_rows(part.ensemble, part.x, part.state)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{rows} for `{name}`" for name, rows in counts.items())
        raise ValueError(f"`predict` needs the same rows for all parts of a group; got {listed}.")
    return next(iter(counts.values()))


def _works(
    parts: list[Part], num_rows: int, batch_size: int, *, memory: int | None, inference: Any, mesh: Any, key: Any
) -> list[Work]:
    inference = check_inference(inference, key)
    ready = [prepare_inputs(p.ensemble, p.x, p.state, mesh=mesh, key=key) for p in parts]
    size = size_of_batch([inputs for inputs, _ in ready], num_rows, batch_size, memory)
    works = []
    for part, (inputs, layout) in zip(parts, ready, strict=True):
        plan = as_plan(part.plan)
        code = program_key((part.ensemble, part.state, part.fn, plan_in_program(plan)))
        call = MemberCall(part.fn, inference, layout, code)
        works.append(Work(Pilot(plan, name="predict"), call, inputs, num_rows, size, part.members))
    return works


def _collect(outs: Iterable[tuple[np.ndarray, PyTree]], combine: Any, weights: Any, parts: list[Part]) -> PyTree:
    """The result for some rows, from predictions of some members at a time."""
    outs = _alike(outs, {int(i): part.name for part in parts for i in part.members})
    if isinstance(combine, AbstractCombination):
        return combine_parts(outs, combine, weights)
    members, values = zip(*outs, strict=True)
    joined = join_values(values, np.argsort(np.concatenate(members)))
    if combine is None:
        return joined
    return combine(joined) if weights is None else combine(joined, weights=weights)


def _alike(outs: Iterable[tuple[np.ndarray, PyTree]], owners: dict[int, str]) -> Iterator[tuple[np.ndarray, PyTree]]:
    first = None
    for members, out in outs:
        owner = owners[int(members[0])]
        of_rows = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if _axes.is_array(x) else x
        shapes = jax.tree.map(of_rows, out)
        first = (owner, shapes) if first is None else first
        check_like_outputs({first[0]: first[1], owner: shapes})
        yield members, out


def _one_row_of_zeros(x: PyTree) -> PyTree:
    own = lambda value: _axes.Each(jax.tree.map(lambda x: row_of_zeros(x, axis=1), value))
    return _axes.map_each(own, x, shared=lambda x: row_of_zeros(x, axis=0))
