import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import _axes, tree
from .._check import check_function
from .._ensemble import Ensemble
from .._pytree import PyTree
from ..plan import AnyPlan
from ..plan._auto import as_plan
from ..plan._map import map_members as map_here
from ..tree._compare import CONCATENATE_RULES, compare_trees
from ..tree._index import map_columns
from ._check import check_complete, check_member_arguments, check_no_auto
from ._divide import large_arrays, large_shared, on_host
from ._run_shards import Call, Hooks, run_call
from ._sharded_run import ShardedRun, Stored, by_file, locate

_NAME = "fleet.map_members"
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

    - `executor`, `shard`, `workers`, `retries`: as for [`eqx_ensemble.fleet.fit`][].
    - `fn`, `plan`: as for [`eqx_ensemble.map_members`][]: any function of one member.
    - `progress`: whether to show a progress line over members; by default on a terminal or in a notebook.

    **Returns:** the function of all members, called as for [`eqx_ensemble.map_members`][]. Per-member arguments are
    divided among shards, all others are sent to every worker. An [`eqx_ensemble.fleet.ShardedRun`][] takes the place of
    an ensemble: workers read its members from its files, by default one file per shard.

    **Raises:** (when called) as [`eqx_ensemble.map_members`][] and [`eqx_ensemble.fleet.predict`][]; `TypeError` for a
    `ShardedRun` of stateful members.

    ```python
    from concurrent.futures import ThreadPoolExecutor  # threads, for this example

    def norm(model):
        return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))))

    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key)
    with ThreadPoolExecutor(2) as executor:
        norms = ee.fleet.map_members(executor, norm, shard=4)(ensemble)  # (8,)
    ```
    """
    check_function(fn, "fn", name=_NAME, example="lambda model, x: model(x)")
    check_no_auto(as_plan(plan), name=_NAME)

    @ft.wraps(fn)
    def run_all(*args: Any, **kwargs: Any) -> PyTree:
        given = on_host((args, kwargs), "args", name=_NAME)
        ids = check_member_arguments(given, name=_NAME)
        part = lambda positions: _cut(given, positions)
        arrays = [*large_arrays(given), *large_shared(given)]
        call = Call(_NAME, _map_shard, (fn, plan), part, arrays, ids)
        runs = [node for node in jax.tree.leaves(given, is_leaf=_axes.is_per_member) if isinstance(node, ShardedRun)]
        in_files = lambda size: by_file(runs[0], np.arange(len(ids)))
        start = in_files if runs and shard is None else None
        finished = run_call(
            call, executor, shard=shard, workers=workers, retries=retries, hooks=Hooks(progress), start=start
        )
        check_complete(finished, name=_NAME)
        columns = compare_trees([result for _, result in finished.results], name=_NAME, rules=_RULES)
        return map_columns(lambda xs: jnp.concatenate(xs) if _axes.is_array(xs[0]) else xs[0], columns)

    return run_all


def _map_shard(common: Any, own: Any) -> PyTree:
    (fn, plan), (args, kwargs) = common, jax.tree.map(_read, own, is_leaf=_is_stored)
    return map_here(fn, plan=plan)(*args, **kwargs)


def _cut(given: PyTree, positions: np.ndarray) -> PyTree:
    def own(node: Any) -> Any:
        if isinstance(node, Ensemble):
            return node[positions]
        if isinstance(node, ShardedRun):
            return locate(node, positions)
        if isinstance(node, _axes.Each):
            return _axes.Each(tree.take(node.per_member(), positions))
        return tree.take(node, positions) if isinstance(node, eqx.nn.State) else node

    return jax.tree.map(own, given, is_leaf=_axes.is_per_member)


def _is_stored(node: Any) -> bool:
    return isinstance(node, Stored) or _axes.is_per_member(node)


def _read(node: Any) -> Any:
    return node.read()[0] if isinstance(node, Stored) else node
