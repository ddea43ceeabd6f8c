from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _axes
from .._axes import check_rows_of_data
from .._caller import caller
from .._ensemble import Ensemble, check_ensemble
from .._foreign import from_foreign_tree
from .._predict import predict
from .._pytree import PyTree
from ..resample import Folds, HeldOut
from ..resample._engine import check_folds
from ..train._engine import Optimiser, Run, check_rows_of_folds, fit
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
    - `key`: the root key.

    **Returns:** [`eqx_ensemble.methods.CrossFit`][].

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
    check_ensemble(ensemble)
    check_folds(folds)
    check_options(options, ("rows",), "each member is trained on the training rows of its fold")
    num_folds, num_members = folds.test.shape[0], ensemble.num_members
    times, rest = divmod(num_members, num_folds)
    if rest or times == 0:
        raise ValueError(
            f"`{caller()}` needs one member per fold, or the same number for each: got {num_members} members and "
            f"{num_folds} folds."
        )
    own = jax.tree.map(lambda part: jnp.tile(part, (times, 1)), folds)
    x = from_foreign_tree(x, "x")
    num_rows = check_rows_of_data(x, num_members, argument="x", finite=False)
    check_rows_of_folds(num_rows, own, None)
    predict(ensemble, _first_row(x), state=options.get("state"), fn=fn)  # raises its errors before training
    run = fit(ensemble, loss, optimiser, data, rows=own.train, key=key, **options)
    return CrossFit(run, run.out_of_fold(x, own, fn=fn))


def _first_row(x: PyTree) -> PyTree:
    own = lambda value: _axes.Each(jax.tree.map(lambda x: x[:, :1], value))
    return _axes.map_each(own, x, shared=lambda x: x[:1])
