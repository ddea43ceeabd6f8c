from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import tree
from .._combination import of_predictions, stream_of
from .._ensemble import Ensemble
from .._ensemble._check import check_ensemble
from .._ensemble._check_state import check_model_state, check_model_state_given
from .._predict import predict as predict_here
from .._predict._check import check_combine
from .._predict._inputs import check_members_and_rows
from .._pytree import PyTree
from ..plan import AnyPlan
from ..plan._auto import as_plan
from ._call import Call, over_shards
from ._check import check_complete, check_no_auto
from ._cut import cut_data, large_arrays, on_host

_NAME = "fleet.predict"


def predict(
    executor: Any,
    ensemble: Ensemble[Any],
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
    """Predictions of members on many workers: each shard of members is an [`eqx_ensemble.predict`][] of its own.

    **Arguments:**

    - `executor`, `shard`, `workers`, `retries`: as for [`eqx_ensemble.fleet.fit`][].
    - `combine`: combines the members' predictions, as for [`eqx_ensemble.predict`][]. Functions with a
        [streaming form][eqx_ensemble.combine.streaming] are computed for each shard on its worker, and their parts are
        merged as they come back: predictions of all members exist nowhere. For other functions they are brought here.
    - `weights`: as for [`eqx_ensemble.predict`][].
    - `x`, `batch_size`, `memory`, `state`, `fn`, `inference`, `plan`, `key`: as for [`eqx_ensemble.predict`][]. Inputs
        that all members share are given to every worker once.
    - `progress`: whether to show a progress line over members; by default on a terminal or in a notebook.

    **Returns:** the predictions, each array `(members, rows, ...)`; with `combine`, its results `(rows, ...)`.

    **Raises:** as [`eqx_ensemble.predict`][]. `concurrent.futures.BrokenExecutor`, or the engine's own error, with a
    note that names the members, if workers died more often than `retries` says.

    ```python
    from concurrent.futures import ThreadPoolExecutor  # of one process, for this example

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key), 8, key=key)
    with ThreadPoolExecutor(2) as executor:
        mean = ee.fleet.predict(
            executor, ensemble, jnp.ones((100, 3)), combine=ee.combine.mixture, shard=4
        )
    mean.shape  # (100, 2)
    ```
    """
    check_ensemble(ensemble, name=_NAME)
    check_no_auto(as_plan(plan), name=_NAME)
    check_model_state_given(ensemble.stacked, state, name=_NAME)
    check_model_state(state, len(ensemble), name=_NAME)
    x = on_host(x, "x", name=_NAME)
    num_rows = check_members_and_rows(ensemble, x, state)
    weights = check_combine(combine, weights, len(ensemble), num_rows)
    form = None if combine is None or (weights is not None and weights.ndim > 1) else stream_of(combine)
    options = {"batch_size": batch_size, "memory": memory, "fn": fn, "inference": inference, "plan": plan, "key": key}

    def part(positions: np.ndarray) -> dict[str, Any]:
        return {
            "ensemble": ensemble[positions],
            "x": cut_data(x, positions),
            "state": None if state is None else tree.take(state, positions),
            "weights": None if form is None or weights is None else np.asarray(weights)[positions],
        }

    call = Call(_NAME, _predict_shard, (form, options), part, large_arrays(x), np.asarray(ensemble.ids))
    finished = over_shards(call, executor, shard=shard, workers=workers, retries=retries, progress=progress)
    check_complete(finished, name=_NAME)
    parts = [result for _, result in finished.results]
    if form is not None:
        partial = None
        for found in parts:
            partial = form.merge(partial, found)
        return form.finish(partial)
    predictions = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
    if combine is None:
        return predictions
    together = of_predictions(combine)
    return together(predictions) if weights is None else together(predictions, weights=weights)


def _predict_shard(common: Any, own: dict[str, Any]) -> PyTree:
    """The predictions of one shard, or their part of a combination."""
    form, options = common
    found = predict_here(own["ensemble"], own["x"], state=own["state"], progress=False, **options)
    return found if form is None else form.update(None, found, weights=own["weights"])
