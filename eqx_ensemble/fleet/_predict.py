import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import tree
from .._combination import of_predictions, stream_of
from .._ensemble import Ensemble
from .._ensemble._check import check_ensemble, check_model_state, check_model_state_given
from .._predict import predict as predict_here
from .._predict._check import check_combine, check_rows_of_result
from .._predict._inputs import check_members_and_rows
from .._pytree import PyTree
from .._warnings import warn
from ..plan import AnyPlan
from ..plan._auto import as_plan
from ..train._check_run import check_run_weights, excluded_message
from ..train._status import Status
from ._check import check_complete, check_no_auto
from ._divide import large_arrays, large_shared, on_host, resize, take_data
from ._run_shards import Call, Hooks, run_call
from ._sharded_run import ShardedRun, Stored, by_file, locate


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


_NAME = "fleet.predict"


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

    - `executor`, `shard`, `workers`, `retries`: as for [`eqx_ensemble.fleet.fit`][].
    - `ensemble`: the ensemble; or an [`eqx_ensemble.fleet.ShardedRun`][], whose members workers read from its files, by
        default one file per shard. Its diverged members are excluded, as by [`eqx_ensemble.Run.predict`][].
    - `combine`: combines the members' predictions, as for [`eqx_ensemble.predict`][]. A function with a [streaming
        form][eqx_ensemble.combine.streaming] is evaluated for each shard on its worker, and the partial results are
        merged as they arrive, in an order that depends on the shards only; no process holds the predictions of all
        members. For other functions all predictions are returned to the caller first.
    - `weights`: as for [`eqx_ensemble.predict`][].
    - `x`, `batch_size`, `memory`, `state`, `fn`, `inference`, `plan`, `key`: as for [`eqx_ensemble.predict`][]. Shared
        inputs are sent to each worker once. A `ShardedRun` has its own `state`.
    - `progress`: whether to show a progress line over members; by default on a terminal or in a notebook.

    **Returns:** the predictions, each array `(members, rows, ...)`; with `combine`, its results `(rows, ...)`.

    **Raises:** as [`eqx_ensemble.predict`][]. `concurrent.futures.BrokenExecutor`, or the engine's own error, with a
    note that names the members, if a shard fails after all retries; `KeyboardInterrupt` after Ctrl-C; `ValueError` if
    all members of a `ShardedRun` diverged.

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
    check_no_auto(as_plan(plan), name=_NAME)
    x = on_host(x, "x", name=_NAME)
    members = _members(ensemble, state, weights, combine)
    num_rows = check_members_and_rows(members.shapes, x, members.state)
    weights = check_combine(combine, members.weights, len(members.ids), num_rows)
    form = None if combine is None or (weights is not None and weights.ndim > 1) else stream_of(combine)
    options = {"batch_size": batch_size, "memory": memory, "fn": fn, "inference": inference, "plan": plan, "key": key}

    def part(positions: np.ndarray) -> dict[str, Any]:
        return {
            "ensemble": members.part(positions),
            "x": take_data(x, positions),
            "state": None if state is None else tree.take(state, positions),
            "weights": None if form is None or weights is None else np.asarray(weights)[positions],
        }

    arrays = [*large_arrays(x), *large_shared(ensemble)]
    call = Call(_NAME, _predict_shard, (form, options), part, arrays, members.ids)
    run = ft.partial(
        run_call, call, executor, shard=shard, workers=workers, retries=retries,
        start=members.start if shard is None else None,
    )  # fmt: skip
    if form is None:
        finished = run(hooks=Hooks(progress))
        check_complete(finished, name=_NAME)
        predictions = jax.tree.map(lambda *xs: jnp.concatenate(xs), *(result for _, result in finished.results))
        if combine is None:
            return predictions
        together = of_predictions(combine)
        combined = together(predictions) if weights is None else together(predictions, weights=weights)
        check_rows_of_result(combined, num_rows, name=_NAME)
        return combined
    merge = PairwiseMerge(form.merge)
    hooks = Hooks(progress, keep=lambda shard, partial: merge.add(shard.number, partial))
    finished = run(hooks=hooks)
    check_complete(finished, name=_NAME)
    combined = form.finish(merge.result())
    check_rows_of_result(combined, num_rows, name=_NAME)
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
        check_ensemble(ensemble, name=_NAME)
        check_model_state_given(ensemble.stacked, state, name=_NAME)
        check_model_state(state, len(ensemble), name=_NAME)
        return _Members(np.asarray(ensemble.ids), ensemble, state, weights, lambda p: ensemble[p], None)
    if state is not None:
        raise TypeError(f"`{_NAME}` reads member states from the files of the run: leave out `state`.")
    healthy = ensemble.status != Status.DIVERGED
    weights = check_run_weights(weights, healthy, combine, name=_NAME)
    if not healthy.all():
        message = excluded_message(ensemble.ids[~healthy], healthy, name=_NAME)
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
