from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._ensemble import Ensemble
from .._foreign import from_foreign_tree
from .._marks import Each
from .._predict import predict
from .._pytree import PyTree
from .._warnings import ignore_warnings
from ..resample import Folds, HeldOut, held_out_mean
from ..train._fit import fit
from ..train._optimiser import Optimiser
from ..train._run import Run, healthy_weights
from ._check import check_options


class CrossFit(NamedTuple):
    """The result of [`eqx_ensemble.methods.cross_fit`][].

    **Attributes:**

    - `run`: the run of all folds.
    - `held_out`: the out-of-fold prediction of every row, by members that were not trained on it.
    """

    run: Run[Any]
    held_out: HeldOut


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
    check_options(options, ("rows",), "each member is trained on the training rows of its fold")
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
