from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._brief import brief_repr
from .._ensemble import Ensemble
from .._foreign import from_foreign_tree
from .._marks import Each
from .._predict import predict
from .._pytree import PyTree
from .._table import table_of
from .._warnings import ignore_warnings
from ..resample import Folds, HeldOut, held_out_mean
from ..train import DivergedError
from ..train._fit import fit
from ..train._meeting import Optimiser
from ..train._run import Run, healthy_weights


def compare(
    methods: Mapping[str, Callable[[PyTree, Any], Callable[[PyTree], Any]]],
    data: PyTree,
    scores: Mapping[str, Callable[[Any, Any], Any]],
    *,
    folds: Folds,
    seeds: int = 1,
    key: Any,
) -> Any:
    """Compares methods on held-out rows: every method in every fold, with every seed.

    In one fold and with one seed all methods have the same rows and the same key.

    **Arguments:**

    - `methods`: functions by name, `method(data, key) -> predict`: they train on rows `(x, y)`, and return a function
        of the inputs `x`, such as `run.predict`.
    - `data`: arrays `(x, y)`.
    - `scores`: functions of predictions and `y` by name, each of which returns a number.
    - `folds`: from [`eqx_ensemble.resample.folds`][] or [`eqx_ensemble.resample.from_splits`][]: methods are trained on
        `folds.train` and scored on `folds.test`.
    - `seeds`: how often to repeat everything.
    - `key`: one key.

    **Returns:** a table, as [`eqx_ensemble.Run.table`][], of one row for each fit: `method`, `seed`, `fold`,
    `train_rows`, `test_rows`, `compile_seconds`, `run_seconds`, and the scores, NaN where all members diverged.
    `method(data, key)` takes both times, prediction none: in the first JAX traces or compiles, by its own events; the
    second is the rest. [`eqx_ensemble.methods.rank`][] says which differences are real.

    ```python
    def method(num_members):
        make = lambda key: eqx.nn.MLP(3, "scalar", 16, 1, key=key)

        def train(data, key):
            ensemble = ee.build(make, num_members, key=key)
            return ee.fit(ensemble, loss, optax.adam(1e-2), data, epochs=2, key=key).predict

        return train


    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    x = jax.random.normal(key, (60, 3))
    columns = ee.methods.compare(
        {"one": method(1), "four": method(4)},
        (x, x[:, 0] * x[:, 1]),
        {"rmse": ee.scores.rmse},
        folds=ee.resample.folds(len(x), 3, key=key),
        key=key,
    )
    ee.methods.rank(columns, "rmse", "one")
    ```
    """
    rows = []
    for seed, fold in np.ndindex(seeds, len(folds.train)):
        own = jax.random.fold_in(jax.random.fold_in(key, seed), fold)
        train, test = np.asarray(folds.train[fold]), np.asarray(folds.test[fold])[np.asarray(folds.valid[fold])]
        sizes = {"train_rows": len(train), "test_rows": len(test)}
        train, (x, y) = (jax.tree.map(lambda part, at=at: part[at], data) for at in (train, test))
        for name, method in methods.items():
            predict, seconds = _time(method, train, own)
            row = {"method": name, "seed": seed, "fold": fold, **sizes, **seconds}
            try:
                predictions = predict(x)
            except DivergedError:
                rows.append(row | dict.fromkeys(scores, np.nan))
            else:
                rows.append(row | {score: float(fn(predictions, y)) for score, fn in scores.items()})
    return table_of({name: np.array([row[name] for row in rows]) for name in rows[0]})


def _time(fn: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, float]]:
    """What a function returns, and its seconds by what they were spent on."""
    spans: list[Any] = []
    listen: Any = lambda event, *span, **_: spans.append(span) if event.startswith("/jax/core/compile/") else None
    jax.monitoring.register_event_time_span_listener(listen)
    start = perf_counter()
    try:
        out = fn(*args)
    finally:
        jax.monitoring.unregister_event_time_span_listener(listen)
    total, compiling, until = perf_counter() - start, 0.0, 0.0
    for begin, end in sorted(spans):  # a function that is traced inside another one counts once
        compiling += max(end - max(begin, until), 0)
        until = max(until, end)
    return out, {"compile_seconds": compiling, "run_seconds": total - compiling}


class CrossFit(NamedTuple):
    """The result of [`eqx_ensemble.methods.cross_fit`][].

    **Attributes:**

    - `run`: the run of all folds.
    - `held_out`: the out-of-fold prediction of every row, by members that were not trained on it.
    """

    run: Run[Any]
    held_out: HeldOut

    def __repr__(self) -> str:
        return brief_repr(self)


def cross_fit(
    ensemble: Ensemble[Any],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    folds: Folds,
    *,
    x: PyTree,
    fn: Callable[..., Any] | None = None,
    key: Any,
    **options: Any,
) -> CrossFit:
    """Trains all folds of a cross-validation in one program, and returns out-of-fold predictions for every row.

    **Arguments:**

    - `ensemble`: one member per fold, or several: member `i` has fold `i % num_folds`.
    - `loss`, `optimiser`, `data`, `options`: as for [`eqx_ensemble.fit`][], without `rows`.
    - `folds`: from [`eqx_ensemble.resample.folds`][] or [`eqx_ensemble.resample.from_splits`][].
    - `x`: the inputs to predict from: all rows of the data, in their order.
    - `fn`: how a member predicts, as for [`eqx_ensemble.predict`][]. Average class probabilities, not logits.
    - `key`: as for [`eqx_ensemble.fit`][].

    **Returns:** [`eqx_ensemble.methods.CrossFit`][]. Members that diverged are left out, with a warning.

    **Raises:** `ValueError` if the folds do not match the members or the rows.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 10, key=key)
    folds = ee.resample.folds(len(x), 5, key=key)
    run, held_out = ee.methods.cross_fit(
        ensemble, loss, optax.adam(1e-3), (x, y), folds, x=x, epochs=2, key=key
    )
    held_out.mean.shape  # (100, 1): each row by the two members of its fold
    ```

    ??? cite
        [Chernozhukov et al. 2018](https://arxiv.org/abs/1608.00060)
    """
    times, rest = divmod(ensemble.num_members, len(folds.test))
    x, num_rows = from_foreign_tree(x, "x"), folds.in_test.shape[1]
    if rest or times == 0 or any(len(part) != num_rows for part in jax.tree.leaves(x)):
        raise ValueError(
            f"`cross_fit` needs as many members for each of {len(folds.test)} folds, got {ensemble.num_members}, and "
            f"`x` of {num_rows} rows."
        )
    own = jax.tree.map(lambda part: jnp.tile(part, (times, 1)), folds)
    run = fit(ensemble, loss, optimiser, data, rows=own.train, key=key, **options)
    held = predict(run.ensemble, Each(jax.tree.map(lambda part: part[own.test], x)), fn=fn, state=run.state)
    with ignore_warnings(".*diverged"):  # `fit` has told it
        weights = healthy_weights(run, None)
    every = jnp.full((len(held), num_rows, *held.shape[2:]), jnp.nan, held.dtype)
    every = jax.vmap(lambda own, rows, values: own.at[rows].set(values))(every, own.test, held)
    return CrossFit(run, held_out_mean(every, own.in_test, weights=weights))
