import os
from collections.abc import Callable
from typing import Any

from .._ensemble import Ensemble, M
from .._pytree import PyTree
from ..methods._check import check_options
from ..methods._halving import check_rungs, halve
from ..train._run import Run
from ..train.compiled._optimiser import Optimiser
from ._check import IN_FILES, MEMBERS_HERE, check_folder
from ._engines import open_engine
from ._fitting import whole_epochs
from ._rung import call_of, no_rounds, train_rungs


def successive_halving(
    executor: Any,
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    validation: PyTree,
    epochs: int | None = None,
    steps: int | None = None,
    factor: float | int = 3,
    rungs: int | None = None,
    shard: int | None = None,
    workers: int | None = None,
    retries: int = 2,
    checkpoint: str | os.PathLike[str] | None = None,
    key: Any,
    **options: Any,
) -> Run[M]:
    """Successive halving on many workers: trains all members briefly, and the best of each rung for longer.

    The result is that of [`eqx_ensemble.methods.successive_halving`][]: bit for bit under
    [`eqx_ensemble.plan.Sequential`][], within rounding under other plans, for any shard size. Each rung is one
    [`eqx_ensemble.fleet.fit`][] of the remaining members, and starts when the previous rung has ended: workers wait for
    the slowest shard, and most are idle in the last rungs.

    **Arguments:**

    - `executor`, `shard`, `workers`, `retries`: as for [`eqx_ensemble.fleet.fit`][].
    - `ensemble`, `loss`, `optimiser`, `data`, `validation`, `options`: as for [`eqx_ensemble.fleet.fit`][], without
        `save` and `ids`. `ensemble` must be an [`eqx_ensemble.Ensemble`][].
    - `epochs` or `steps`, `factor`, `rungs`: as for [`eqx_ensemble.methods.successive_halving`][].
    - `checkpoint`: a folder that all workers can write, in which each shard of each rung saves its run. Rerunning the
        same call reads completed shards and resumes the others. It takes the space of one run per rung.
    - `key`: the root key.

    **Returns:** the run. Dropped members have the status `STOPPED` and their best weights, and so have members of an
    abandoned shard after the first rung, with a warning; members of an abandoned shard of the first rung are missing.

    **Raises:** as [`eqx_ensemble.methods.successive_halving`][] and [`eqx_ensemble.fleet.fit`][].

    ```python
    from concurrent.futures import ThreadPoolExecutor  # threads, for this example

    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    hyper = ee.sweep.grid({"lr": jnp.logspace(-4, -1, 9)})
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 9, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    held_out = jnp.ones((16, 3)), jnp.zeros((16, 1))
    with ThreadPoolExecutor(2) as executor:
        run = ee.fleet.successive_halving(
            executor,
            ensemble,
            mse,
            lambda hyper: optax.adam(hyper["lr"]),
            data,
            hyper=hyper,
            validation=held_out,
            epochs=1,
            key=key,
        )
    run.best().ids  # of the member that was never dropped
    ```

    ??? cite

        Jamieson and Talwalkar, *Non-stochastic Best Arm Identification and Hyperparameter Optimization*, AISTATS 2016.
    """
    name = "fleet.successive_halving"
    ladder = check_rungs(
        ensemble, data, validation=validation, epochs=epochs, steps=steps, factor=factor, rungs=rungs, name=name
    )
    check_options(options, IN_FILES, MEMBERS_HERE, name=name)
    data = whole_epochs(data, steps, name=name)
    folder = check_folder(checkpoint, name=name)
    with open_engine(executor, workers, name=name) as engine:
        train = train_rungs(engine, folder, call=call_of(ladder), shard=shard, retries=retries, name=name)
        return halve(
            ensemble, loss, optimiser, data, ladder, no_rounds(name), train=train, **options,
            validation=validation, key=key,
        )  # fmt: skip
