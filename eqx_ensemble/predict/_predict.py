import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .. import _axes, _check, _keys
from .._ensemble import Ensemble
from .._progress import members_in_words, progress_line
from ..plan import AbstractPlan, AnyPlan
from ..plan._auto import as_plan
from ..plan._pilot import Pilot, explained_memory


def predict(
    ensemble: Ensemble,
    x: PyTree,
    *,
    batch_size: int = 256,
    state: eqx.nn.State | None = None,
    fn: Callable[..., Any] | None = None,
    inference: bool = True,
    plan: AnyPlan = None,
    progress: bool | None = None,
    key: Any = None,
) -> PyTree:
    """Predictions of every member for every row, in bounded memory.

    Rows go through the members `batch_size` at a time, so that the intermediate arrays of a batch are all that is
    held beside the result; batches of a few hundred rows stay in a processor's cache.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 16, 2, key=key), 4, key=key)
    ee.predict(ensemble, jnp.ones((1000, 3))).shape  # (4, 1000, 2)
    ```

    **Arguments:**

    - `ensemble`: members are functions of one example.
    - `x`: any PyTree of arrays `(rows, ...)`, parts marked [`eqx_ensemble.Each`][] being `(members, rows, ...)`; a
        member is called with one row of it.
    - `batch_size`: rows at a time.
    - `state`: the stacked `equinox.nn.State` of stateful members, which are called as `model(x, state)` and whose new
        states are dropped.
    - `fn`: called instead of the member as `fn(model, x)`, `fn(model, x, state)`, `fn(model, x, key=key)`, for models
        that are called in another way.
    - `inference`: put the members into inference mode (`equinox.nn.inference_mode`) first.
    - `plan`: how the members are executed; `"auto"` tries what makes sense while it goes through the batches.
    - `progress`: show a progress line; by default on a terminal or in a notebook, after two seconds.
    - `key`: if given, members are called with `key=`, a key of their own for every row: Monte-Carlo dropout.

    **Returns:** the predictions, each array `(members, rows, ...)`.
    """
    _check.ensemble(ensemble, Ensemble, name="predict")
    plan = as_plan(plan)
    _check.positive_int(batch_size, "batch_size", name="predict")
    _check.model_state_missing(ensemble.stacked, state, name="predict")
    _check.model_state(state, ensemble.num_members, name="predict")
    _check.no_batch_mark(x, _axes.Batch)
    num_rows = _check.rows_of_data(x, _axes.Each, ensemble.num_members, argument="x", name="predict", finite=False)
    nodes, treedef = jax.tree.flatten(x, is_leaf=lambda x: isinstance(x, _axes.Each))
    batch_size = min(batch_size, num_rows)
    keys = None if key is None else _keys.member_keys(_keys.root(key, name="predict"), ensemble.ids, purpose="predict")
    call = Call(fn, inference)
    pilot = Pilot(plan, name="predict")

    parts = []
    described = f"predict, {members_in_words(ensemble.num_members)}"
    with (
        progress_line(show=progress, description=described, total=num_rows, unit="row") as line,
        _check.explained_rows(x, _axes.Each),
        explained_memory(pilot, ensemble.num_members, name="predict"),
    ):
        for start in range(0, num_rows, batch_size):
            rows = np.minimum(np.arange(start, start + batch_size), num_rows - 1)
            batch = jax.tree.unflatten(treedef, [_rows_of(node, rows) for node in nodes])
            read = (call, ensemble, batch, state, keys, jnp.asarray(rows))
            pilot.look(predict_batch, *read, num_members=ensemble.num_members, unit="batch")
            began, trial = time.perf_counter(), pilot.watching
            parts.append(pilot.call(lambda plan, read: _compiled_batch(plan, *read), read))
            seconds = time.perf_counter() - began
            batches_left = (num_rows - 1 - start) // batch_size
            pilot.note(1, seconds, seconds_left=batches_left * seconds if trial else 0.0)
            line.update(min(batch_size, num_rows - start))
    return jax.tree.map(lambda *outs: jnp.concatenate(outs, axis=1)[:, :num_rows], *parts)


class Call(eqx.Module):
    fn: Callable[..., Any] | None = eqx.field(static=True)
    inference: bool = eqx.field(static=True)


def predict_batch(
    plan: AbstractPlan, call: Call, ensemble: Ensemble, batch: PyTree, state: PyTree, keys: Any, rows: jax.Array
) -> PyTree:
    inputs = (ensemble, batch, state, None if keys is None else _axes.Each(keys))
    own, view, _ = _axes.split_members(inputs, name="predict")

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

    return _axes.over_leading_axis(plan.run, one, own)


_compiled_batch = eqx.filter_jit(predict_batch)


def _rows_of(node: Any, rows: np.ndarray) -> Any:
    if isinstance(node, _axes.Each):
        return _axes.Each(jax.tree.map(lambda x: x[:, rows], node.per_member()))
    return node[rows]
