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
    """Trains all members briefly, the best of them for longer, and the best of those for longer still, on many workers.

    The result is that of [`eqx_ensemble.methods.successive_halving`][]: bit for bit under
    [`eqx_ensemble.plan.Sequential`][], within rounding under other plans, whatever the size of the shards. Each rung is
    a [`eqx_ensemble.fleet.fit`][] of the remaining members, and begins when the rung before has ended: workers wait for
    the slowest shard, and few have work at the last rungs. [`eqx_ensemble.fleet.asynchronous_halving`][] does not wait.

    **Arguments:**

    - `executor`, `shard`, `workers`, `retries`: as for [`eqx_ensemble.fleet.fit`][].
    - `ensemble`, `loss`, `optimiser`, `data`, `validation`, `options`: as for [`eqx_ensemble.fleet.fit`][], except
        `save` and a function that makes members.
    - `epochs` or `steps`, `factor`, `rungs`: as for [`eqx_ensemble.methods.successive_halving`][].
    - `checkpoint`: a folder that all workers can write, in which each shard of each rung saves its run. Rerunning the
        same call takes the shards that were done from there, and trains on where the others were. Its size is that of
        one run for each rung.
    - `key`: the root key.

    **Returns:** the run. Dropped members have the status `STOPPED` and their best weights. So have members whose worker
    died too often at a later rung than the first, with a warning; those of the first rung are missing.

    **Raises:** as [`eqx_ensemble.methods.successive_halving`][] and [`eqx_ensemble.fleet.fit`][].

    ```python
    from concurrent.futures import ThreadPoolExecutor  # of one process, for this example

    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    hyper = ee.sweep.grid({"lr": jnp.logspace(-4, -1, 9)})
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 9, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    with ThreadPoolExecutor(2) as executor:
        run = ee.fleet.successive_halving(
            executor,
            ensemble,
            mse,
            lambda hyper: optax.adam(hyper["lr"]),
            data,
            hyper=hyper,
            validation=data,
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
