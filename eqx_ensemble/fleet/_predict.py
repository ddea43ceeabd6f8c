import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import _axes
from .._caller import caller
from .._check import check_function
from .._combination import of_predictions, stream_of
from .._ensemble import Ensemble, check_ensemble, check_model_state, check_model_state_given, join, take
from .._predict import check_combine, check_members_and_rows, check_rows_of_result
from .._predict import predict as predict_here
from .._pytree import PyTree
from .._warnings import warn
from ..plan import AnyPlan
from ..plan._engine import as_plan
from ..plan._engine import map_members as map_here
from ..train._engine import Status, check_run_weights, excluded_message
from ..tree._engine import CONCATENATE_RULES, compare_trees, map_columns
from ._check import check_complete, check_member_arguments, check_no_auto
from ._divide import large_arrays, large_shared, on_host, resize
from ._run_shards import Call, Hooks, run_call
from ._sharded_run import ShardedRun, Stored, by_file, locate

_RULES = CONCATENATE_RULES._replace(needs="results of members that differ only in their arrays", noun="shard")


def map_members(
    executor: Any,
    fn: Callable[..., Any],
    *,
    shard: int | None = None,
    workers: int | None = None,
    retries: int = 2,
    plan: AnyPlan = None,
    progress: bool | None = None,
) -> Callable[..., Any]:
    """Transforms a function of one member into a function of all members, run on many workers.

    **Arguments:**

    - `executor`, `shard`, `workers`, `retries`, `progress`: as for [`eqx_ensemble.fleet.fit`][].
    - `fn`, `plan`: as for [`eqx_ensemble.map_members`][].

    **Returns:** the function of all members, called as for [`eqx_ensemble.map_members`][], also with an
    [`eqx_ensemble.fleet.ShardedRun`][] in place of an ensemble.

    **Raises:** (when called) as [`eqx_ensemble.map_members`][] and [`eqx_ensemble.fleet.predict`][]; `TypeError` for a
    `ShardedRun` of stateful members.

    ```python
    from concurrent.futures import ThreadPoolExecutor  # threads, for this example

    norm = lambda model: jnp.linalg.norm(model.weight)
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key)
    with ThreadPoolExecutor(2) as executor:
        norms = ee.fleet.map_members(executor, norm, shard=4)(ensemble)  # (8,)
    ```
    """
    check_function(fn, "fn", example="lambda model, x: model(x)")
    check_no_auto(as_plan(plan))

    @ft.wraps(fn)
    def run_all(*args: Any, **kwargs: Any) -> PyTree:
        given = on_host((args, kwargs), "args")
        ids = check_member_arguments(given)
        part = lambda positions: _cut(given, positions)
        arrays = [*large_arrays(given), *large_shared(given)]
        call = Call(_map_shard, (fn, plan), part, arrays, ids)
        runs = [node for node in jax.tree.leaves(given, is_leaf=_axes.is_per_member) if isinstance(node, ShardedRun)]
        in_files = lambda size: by_file(runs[0], np.arange(len(ids)))
        start = in_files if runs and shard is None else None
        finished = run_call(
            call, executor, shard=shard, workers=workers, retries=retries, hooks=Hooks(progress), start=start
        )
        check_complete(finished)
        return _join_results([result for _, result in finished.results])

    return run_all


def _join_results(results: list[PyTree]) -> PyTree:
    """What `map_members` returned for the members of each shard, for all of them."""
    is_marked = _axes.is_per_member
    marked, plain = zip(*[eqx.partition(result, is_marked, is_leaf=is_marked) for result in results], strict=True)
    columns = compare_trees(list(plain), rules=_RULES)
    plain = map_columns(lambda xs: jnp.concatenate(xs) if _axes.is_array(xs[0]) else xs[0], columns)
    joined = join(marked) if jax.tree.leaves(marked) else marked[0]
    return eqx.combine(plain, joined, is_leaf=is_marked)


def _map_shard(common: Any, own: Any) -> PyTree:
    (fn, plan), (args, kwargs) = common, jax.tree.map(_read, own, is_leaf=_is_stored)
    return map_here(fn, plan=plan)(*args, **kwargs)


def _cut(given: PyTree, positions: np.ndarray) -> PyTree:
    cut = lambda node: locate(node, positions) if isinstance(node, ShardedRun) else take(node, positions)
    return jax.tree.map(cut, given, is_leaf=_axes.is_per_member)


def _is_stored(node: Any) -> bool:
    return isinstance(node, Stored) or _axes.is_per_member(node)


def _read(node: Any) -> Any:
    return node.read()[0] if isinstance(node, Stored) else node


class PairwiseMerge:
    """Merges the partial results of shards as they arrive, in a fixed order.

    A binary tree over shard numbers: neighbours are merged first, then pairs of these. Each late shard delays only
    about as many partial results as the logarithm of the number of shards.
    """

    def __init__(self, merge: Callable[[Any, Any], Any]) -> None:
        self._merge = merge
        self._waiting: dict[tuple[int, int], Any] = {}

    def add(self, number: int, part: Any) -> None:
        """Adds the partial result of a shard."""
        level = 0
        while (level, number ^ 1) in self._waiting:
            other = self._waiting.pop((level, number ^ 1))
            part = self._merge(part, other) if number % 2 == 0 else self._merge(other, part)
            level, number = level + 1, number // 2
        self._waiting[level, number] = part

    def result(self) -> Any:
        """The merged result of all shards; `None` if there are none."""
        total = None
        for level, number in sorted(self._waiting, key=lambda at: at[1] << at[0]):
            total = self._merge(total, self._waiting[level, number])
        return total


def predict(
    executor: Any,
    ensemble: Ensemble[Any] | ShardedRun[Any],
    x: PyTree,
    *,
    combine: Callable[..., Any] | None = None,
    weights: Any = None,
    shard: int | None = None,
    workers: int | None = None,
    retries: int = 2,
    batch_size: int = 256,
    memory: int | None = None,
    state: eqx.nn.State | None = None,
    fn: Callable[..., Any] | None = None,
    inference: bool | None = None,
    plan: AnyPlan = None,
    progress: bool | None = None,
    key: Any = None,
) -> PyTree:
    """Predictions of members on many workers: each shard of members is one [`eqx_ensemble.predict`][].

    **Arguments:**

    - `executor`, `shard`, `workers`, `retries`, `progress`: as for [`eqx_ensemble.fleet.fit`][].
    - `ensemble`: the ensemble; or an [`eqx_ensemble.fleet.ShardedRun`][], whose healthy members workers read from its
        files, by default one file per shard.
    - `combine`: as for [`eqx_ensemble.predict`][]. A function with a [streaming form][eqx_ensemble.combine.streaming]
        is evaluated on the workers, and only partial results return; for others, all predictions do.
    - `x`, `weights`, `batch_size`, `memory`, `state`, `fn`, `inference`, `plan`, `key`: as for
        [`eqx_ensemble.predict`][]. A `ShardedRun` has its own `state`.

    **Returns:** the predictions, each array `(members, rows, ...)`; with `combine`, its results `(rows, ...)`.

    **Raises:** as [`eqx_ensemble.predict`][]; `concurrent.futures.BrokenExecutor`, or the engine's own error, if a
    shard fails after all retries; `ValueError` if all members of a `ShardedRun` diverged.

    ```python
    from concurrent.futures import ThreadPoolExecutor  # threads, for this example

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key), 8, key=key)
    with ThreadPoolExecutor(2) as executor:
        mean = ee.fleet.predict(
            executor, ensemble, jnp.ones((100, 3)), combine=ee.combine.mixture, shard=4
        )
    mean.shape  # (100, 2)
    ```
    """
    check_no_auto(as_plan(plan))
    x = on_host(x, "x")
    members = _members(ensemble, state, weights, combine)
    num_rows = check_members_and_rows(members.shapes, x, members.state)
    weights = check_combine(combine, members.weights, len(members.ids), num_rows)
    form = None if combine is None or (weights is not None and weights.ndim > 1) else stream_of(combine)
    options = {"batch_size": batch_size, "memory": memory, "fn": fn, "inference": inference, "plan": plan, "key": key}

    def part(positions: np.ndarray) -> dict[str, Any]:
        return {
            "ensemble": members.part(positions),
            "x": take(x, positions),
            "state": take(state, positions),
            "weights": None if form is None or weights is None else np.asarray(weights)[positions],
        }

    arrays = [*large_arrays(x), *large_shared(ensemble)]
    call = Call(_predict_shard, (form, options), part, arrays, members.ids)
    run = ft.partial(
        run_call, call, executor, shard=shard, workers=workers, retries=retries,
        start=members.start if shard is None else None,
    )  # fmt: skip
    if form is None:
        finished = run(hooks=Hooks(progress))
        check_complete(finished)
        predictions = jax.tree.map(lambda *xs: jnp.concatenate(xs), *(result for _, result in finished.results))
        if combine is None:
            return predictions
        together = of_predictions(combine)
        combined = together(predictions) if weights is None else together(predictions, weights=weights)
        check_rows_of_result(combined, num_rows)
        return combined
    merge = PairwiseMerge(form.merge)
    hooks = Hooks(progress, keep=lambda shard, partial: merge.add(shard.number, partial))
    finished = run(hooks=hooks)
    check_complete(finished)
    combined = form.finish(merge.result())
    check_rows_of_result(combined, num_rows)
    return combined


class _Members(NamedTuple):
    """The members to predict with: their ids, the shapes that arguments must match, and the members of a shard."""

    ids: np.ndarray
    shapes: Ensemble[Any]
    state: Any
    weights: Any
    part: Callable[[np.ndarray], Any]
    start: Callable[[int], list[tuple[int, np.ndarray]]] | None


def _members(ensemble: Any, state: Any, weights: Any, combine: Any) -> _Members:
    if not isinstance(ensemble, ShardedRun):
        check_ensemble(ensemble)
        check_model_state_given(ensemble.stacked, state)
        check_model_state(state, len(ensemble))
        return _Members(np.asarray(ensemble.ids), ensemble, state, weights, lambda p: ensemble[p], None)
    if state is not None:
        raise TypeError(f"`{caller()}` reads member states from the files of the run: leave out `state`.")
    healthy = ensemble.status != Status.DIVERGED
    weights = check_run_weights(weights, healthy, combine)
    if not healthy.all():
        message = excluded_message(ensemble.ids[~healthy], healthy)
        if not healthy.any():
            raise ValueError(message)
        warn(message)
    kept = np.flatnonzero(healthy)
    shapes = resize(ensemble.like, len(kept))
    shapes, state = shapes if isinstance(shapes, tuple) else (shapes, None)
    start = lambda size: by_file(ensemble, kept)
    return _Members(ensemble.ids[kept], shapes, state, weights, lambda p: locate(ensemble, kept[p]), start)


def _predict_shard(common: Any, own: dict[str, Any]) -> PyTree:
    """The predictions of one shard, or their partial combination."""
    form, options = common
    ensemble, state = own["ensemble"], own["state"]
    if isinstance(ensemble, Stored):
        ensemble, state = ensemble.read()
    found = predict_here(ensemble, own["x"], state=state, progress=False, **options)
    return found if form is None else form.update(None, found, weights=own["weights"])
