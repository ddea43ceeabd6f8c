"""Predictions of all members: some rows at a time, on all cores of a CPU."""

import functools as ft
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh

from ._check import check_positive_int
from ._cores import num_cores, thread_pool
from ._data import take_data
from ._ensemble import Ensemble, check_ensemble, check_model_state, split_own
from ._foreign import empty_aligned
from ._keys import member_keys
from ._leaves import is_inside_transformation, is_key, is_traced
from ._map import is_per_member, open_marks, view
from ._marks import Batch, Each
from ._mesh import check_mesh, pad_members, replicate, shard_members, sharding
from ._progress import members_in_words, progress_line
from ._pytree import PyTree
from .distributed import to_host
from .plan import AnyPlan, Vmap, as_plan

_AT_ONCE = Vmap()


def predict(
    ensemble: Ensemble[Any],
    x: PyTree,
    *,
    combine: Callable[..., Any] | None = None,
    weights: Any = None,
    batch_size: int = 256,
    state: eqx.nn.State | None = None,
    fn: Callable[..., Any] | None = None,
    inference: bool | None = None,
    plan: AnyPlan | None = None,
    mesh: Mesh | None = None,
    progress: bool | None = None,
    key: Any = None,
) -> PyTree:
    """Predictions of every member for every row, some rows at a time.

    Batches of rows are full, the last one with copies of its last row; on a CPU several run at the same time. With
    `combine`, the predictions of all members exist for some batches at a time.

    **Arguments:**

    - `ensemble`: an ensemble, whose members are functions of one example.
    - `x`: any PyTree of arrays `(rows, ...)`; parts marked [`eqx_ensemble.Each`][] are `(members, rows, ...)`. A member
        is called with one row.
    - `combine`: a function of the predictions for some rows, `(members, rows, ...)`, that treats rows independently and
        returns arrays `(rows, ...)`. Functions of a mean and a variance take members that return a pair.
    - `weights`: `(members,)`, passed on to `combine` as `weights=`.
    - `batch_size`: rows per batch. With `plan=ee.plan.Blocks(size)`, it bounds the memory.
    - `state`: the stacked `equinox.nn.State` of stateful members, which are called as `model(x, state)`; their new
        states are discarded.
    - `fn`: called instead of the member, as `fn(model, x)`, `fn(model, x, state)` or `fn(model, x, key=key)`.
    - `inference`: whether to put the members into inference mode (`equinox.nn.inference_mode`), which switches dropout
        off. The default is `True`; with `key` there is no default.
    - `plan`: the execution of the members, by default all at once; `cores` of `ee.plan.Blocks` compute batches of rows.
    - `mesh`: the devices to predict on, from [`eqx_ensemble.make_mesh`][]: members on its axis `members`.
    - `progress`: show a progress line; by default on a terminal or in a notebook, after two seconds.
    - `key`: one key, or one per member. Members are then called with `key=`, another one for every row: with
        `inference=False` this is Monte-Carlo dropout.

    **Returns:** the predictions, each array `(members, rows, ...)`; with `combine`, its results `(rows, ...)`.

    **Raises:** `ValueError` for a `key` without `inference`, and for results of `combine` other than `(rows, ...)`;
    `TypeError` for `weights` without `combine`.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 16, 2, key=key), 4, key=key)
    x = jnp.ones((1000, 3))
    ee.predict(ensemble, x).shape  # (4, 1000, 2)
    ee.predict(ensemble, x, combine=ee.combine.mixture).shape  # (1000, 2)
    parts = ee.predict(ensemble, x, combine=ee.uncertainty.decompose_entropy)
    parts.epistemic.shape  # (1000,)
    ```
    """
    check_ensemble(ensemble)
    check_model_state(ensemble, state)
    check_positive_int(batch_size, "batch_size")
    check_mesh(mesh)
    if key is not None and inference is None:
        raise ValueError(
            "`predict` with `key` needs `inference`: `False` samples dropout masks, `True` leaves them out."
        )
    if weights is not None and combine is None:
        raise TypeError("`predict` takes `weights` only with `combine`.")
    if isinstance(x, Batch):
        raise TypeError("`predict` takes the rows as they are: pass `x` instead of `Batch(x)`.")
    num_members = ensemble.num_members
    x, num_rows = rows_of(x, num_members)
    keys = None if key is None else Each(member_keys(key, num_members, purpose="predict"))
    plan = as_plan(plan, _AT_ONCE) if num_rows else _AT_ONCE  # `jax.lax.map` fails on no rows
    is_filled = mesh is not None and num_members % mesh.shape["members"]
    options = (fn, True if inference is None else inference, plan, num_members, mesh if is_filled else None)
    combine = _combination(combine, weights)
    if mesh is not None:
        is_each = lambda x: isinstance(x, Each)
        pad = lambda tree: shard_members(pad_members(tree, num_members, mesh), mesh)
        own, rest = split_own((ensemble, state, keys))
        ensemble, state, keys = eqx.combine(pad(own), replicate(rest, mesh))
        x = jax.tree.map(lambda x: pad(x) if is_each(x) else x, x, is_leaf=is_each)
    read = (options, ensemble, state, keys)
    if is_inside_transformation() or num_rows == 0:
        out = _predict(read, x, None if keys is None else np.arange(num_rows))
        return out if combine is None else combine(out)
    size = min(batch_size, 1 << (num_rows - 1).bit_length())  # few rows share programs of the powers of two
    batches = [np.minimum(np.arange(i, i + size), num_rows - 1) for i in range(0, num_rows, size)]
    own = lambda rows: _some_rows(x, rows, num_rows)

    def one_batch(rows: np.ndarray) -> PyTree:
        return jax.block_until_ready(_predict(read, own(rows), None if keys is None else rows))

    def finish(out: PyTree, rows: np.ndarray) -> PyTree:
        out = out if combine is None else combine(out)
        if combine is not None:
            check_rows(out, size)
        return out

    axis = 1 if combine is None else 0
    first = finish(one_batch(batches[0]), batches[0])  # alone: two threads would compile it twice
    if len(batches) == 1:
        return first if size == num_rows else jax.tree.map(lambda x: _first_rows(x, num_rows, axis), first)
    output = _Output(first, num_rows, size, axis)
    described = f"predict, {members_in_words(num_members)}"
    cores = 1 if jax.default_backend() != "cpu" or mesh is not None else getattr(plan, "cores", None) or num_cores()

    def compute(rows: np.ndarray) -> PyTree:
        out = one_batch(rows)
        return output.write(out, int(rows[0])) if combine is None else out

    with (
        progress_line(show=progress, description=described, total=num_rows, unit="row") as line,
        thread_pool(cores) as pool,
    ):
        line.update(size)  # of the first
        later = iter(batches[1:])
        waiting = [pool.submit(compute, rows) for rows in itertools.islice(later, 2 * cores)]
        for rows in batches[1:]:  # in their order; a few batches wait at most
            out = waiting.pop(0).result()
            waiting += [pool.submit(compute, more) for more in itertools.islice(later, 1)]
            if combine is not None:  # a function of the user, which is called in order
                output.write(finish(out, rows), int(rows[0]))
            line.update(min(size, num_rows - line.n))
    return output.value()


@eqx.filter_jit
def _predict(read: tuple, x: PyTree, rows: Any) -> PyTree:
    """The predictions of all members for some rows, by a function of one member."""
    (fn, inference, plan, num_members, filled), *_ = read
    own, rest = open_marks((read[1:], x))

    def one(own: PyTree) -> PyTree:
        (model, state, key), x = jax.tree.map(view, eqx.combine(own, rest), is_leaf=is_per_member)
        model = eqx.nn.inference_mode(model) if inference else model
        call = model if fn is None else ft.partial(fn, model)

        def on_row(x: PyTree, row: Any) -> PyTree:
            args = (x,) if state is None else (x, state)
            named = {} if key is None else {"key": jax.random.fold_in(key, row)}
            out = call(*args, **named)
            return out if state is None or fn is not None else out[0]

        return eqx.filter_vmap(on_row)(x, rows)

    out = plan.run(one, own)
    if filled is None:
        return out
    # The first of a mesh's members are on some of its devices, which no sharding tells.
    whole = lambda x: jax.lax.with_sharding_constraint(x, sharding(filled))[:num_members]
    return jax.tree.map(lambda x: whole(x) if eqx.is_array(x) else x, out)


def rows_of(x: PyTree, num_members: int) -> tuple[PyTree, int]:
    """The rows, and their number."""
    if any(is_traced(leaf) for leaf in jax.tree.leaves(x)):
        leaves = [
            (leaf, int(isinstance(node, Each)))
            for node in jax.tree.leaves(x, is_leaf=lambda x: isinstance(x, Each))
            for leaf in jax.tree.leaves(node)
        ]
        return x, leaves[0][0].shape[leaves[0][1]]
    return take_data(x, num_members, argument="x", least=0)


def _some_rows(x: PyTree, rows: np.ndarray, num_rows: int) -> PyTree:
    if len(rows) == num_rows:
        return x
    is_each = lambda x: isinstance(x, Each)

    def cut(leaf: Any, axis: int) -> Any:
        # On a CPU without a copy, and without a program for each slice. NumPy knows neither keys nor weak types.
        if isinstance(leaf, jax.Array) and not is_key(leaf) and not leaf.weak_type and _is_on_cpu(leaf):
            leaf = np.asarray(leaf)
        start, stop = int(rows[0]), int(rows[-1]) + 1
        if stop - start == len(rows):
            return leaf[:, start:stop] if axis else leaf[start:stop]
        return leaf[:, rows] if axis else leaf[rows]

    own = lambda node: Each(jax.tree.map(lambda x: cut(x, 1), node.value)) if is_each(node) else cut(node, 0)
    return jax.tree.map(own, x, is_leaf=is_each)


def _is_on_cpu(x: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in x.devices())


def _first_rows(x: Any, num_rows: int, axis: int) -> Any:
    if not eqx.is_array(x):
        return x
    index = (slice(None),) * axis + (slice(num_rows),)
    if not isinstance(x, jax.Array) or is_key(x) or not _is_on_cpu(x) or len(x.devices()) > 1:
        return x[index]
    # On the host: another number of rows would be another program.
    return jax.device_put(np.asarray(x)[index], x.sharding if x.committed else None)


def _combination(combine: Any, weights: Any) -> Any:
    if combine is None:
        return None
    from ._pairs import of_predictions

    combine = of_predictions(combine)
    return combine if weights is None else ft.partial(combine, weights=weights)


def check_rows(out: PyTree, size: int) -> None:
    """Raises unless `combine` returned one value per row."""
    for path, x in jax.tree_util.tree_leaves_with_path(out):
        if np.shape(x)[:1] != (size,):
            raise ValueError(
                f"`predict` calls `combine` with the predictions of {size} rows, and needs arrays (rows, ...); at "
                f"`{jax.tree_util.keystr(path)}`: got shape {np.shape(x)}.\nReduce over all rows afterwards."
            )


class _Output:
    """The result of all rows, in memory that JAX can use without a copy."""

    def __init__(self, first: PyTree, num_rows: int, size: int, axis: int) -> None:
        self.axis, self.size = axis, size
        shape = lambda x: (*x.shape[:axis], num_rows, *x.shape[axis + 1 :])
        self.arrays = jax.tree.map(lambda x: empty_aligned(shape(x), x.dtype) if eqx.is_array(x) else x, first)
        self.write(first, 0)

    def write(self, out: PyTree, start: int) -> None:
        """Writes the results of a batch."""

        def put(whole: Any, x: Any) -> None:
            if eqx.is_array(x):
                stop = min(start + self.size, whole.shape[self.axis])
                index = (slice(None),) * self.axis
                whole[(*index, slice(start, stop))] = np.asarray(to_host(x))[(*index, slice(0, stop - start))]

        jax.tree.map(put, self.arrays, out)

    def value(self) -> PyTree:
        """The result as JAX arrays."""
        return jax.tree.map(lambda x: jax.device_put(x) if eqx.is_array(x) else x, self.arrays)
