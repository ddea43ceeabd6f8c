import os
from collections.abc import Callable
from typing import Any

from jaxtyping import Key

from .._check import check_flag
from .._ensemble import Ensemble, M
from .._pytree import PyTree
from ..methods._check import check_options
from ..methods._evolve import check_evolution, evolve
from ..methods._population import Population
from ..train import perturb
from ..train.compiled._optimiser import Optimiser
from ._asynchronous_population import evolve_asynchronously
from ._check import IN_FILES, MEMBERS_HERE, check_folder
from ._engines import open_engine
from ._fitting import whole_epochs
from ._rung import no_rounds, train_rungs


def population_based_training(
    executor: Any,
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    hyper: PyTree,
    validation: PyTree,
    rounds: int,
    epochs: int | None = None,
    steps: int | None = None,
    fraction: float | int = 0.2,
    explore: Callable[[PyTree, Key[Any, ""]], PyTree] = perturb,
    asynchronous: bool = False,
    shard: int | None = None,
    workers: int | None = None,
    retries: int = 2,
    checkpoint: str | os.PathLike[str] | None = None,
    key: Any,
    **options: Any,
) -> Population[M]:
    """Trains a population on many workers, replacing the worst members by copies of the best.

    By default the result is that of [`eqx_ensemble.methods.population_based_training`][]: bit for bit under
    [`eqx_ensemble.plan.Sequential`][], within rounding under other plans, whatever the size of the shards. Each round
    is a [`eqx_ensemble.fleet.fit`][] of all members, which are compared, copied and perturbed when all have ended it.
    So workers wait for the slowest shard, and the result does not depend on their speed.

    With `asynchronous=True`, as in the paper, no shard waits for others. When it begins a round, its worst members
    become copies of the best of all, by the last round that each member has ended, with the weights and optimiser
    states of that time. The result then depends on the order in which workers finish. It is the same again with an
    executor of one worker, and equal `workers` and `shard`.
    A donor may have ended fewer or more rounds than its copy; `lineage` has its id, and not its round.

    **Arguments:**

    - `executor`, `shard`, `workers`, `retries`: as for [`eqx_ensemble.fleet.fit`][].
    - `ensemble`, `loss`, `optimiser`, `data`, `validation`, `options`: as for [`eqx_ensemble.fleet.fit`][], except
        `save`, a function that makes members, and what stops them.
    - `hyper`, `rounds`, `epochs` or `steps`, `fraction`, `explore`: as for
        [`eqx_ensemble.methods.population_based_training`][].
    - `asynchronous`: whether shards go on without waiting for others.
    - `checkpoint`: a folder that all workers can write, in which each shard of each round saves its run. Rerunning the
        same call takes the shards that were done from there, and trains on where the others were. Its size is that of
        one run for each round. With `asynchronous=True`, the file `order.jsonl` in it lists which shards were done or
        given up, in order, so that the same call takes the same decisions again; those given up then go on.
    - `key`: the root key.

    **Returns:** [`eqx_ensemble.methods.Population`][]. Members whose worker died too often are replaced after that
    round, as diverged ones are, or stop there with `asynchronous=True`; those of the first round are missing. A warning
    says so.

    **Raises:** as [`eqx_ensemble.methods.population_based_training`][] and [`eqx_ensemble.fleet.fit`][].

    ```python
    from concurrent.futures import ThreadPoolExecutor  # of one process, for this example

    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1)}
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    with ThreadPoolExecutor(2) as executor:
        found = ee.fleet.population_based_training(
            executor,
            ensemble,
            mse,
            lambda hyper: optax.adam(hyper["lr"]),
            data,
            hyper=ee.sweep.draw(ranges, 8, key=key),
            validation=data,
            rounds=2,
            epochs=1,
            explore=ee.methods.population.perturb_hyper(ranges),
            shard=4,
            key=key,
        )
    found.lineage  # (2, 8)
    ```

    ??? cite

        Jaderberg et al., *Population Based Training of Neural Networks*, arXiv:1711.09846, 2017.
    """
    name = "fleet.population_based_training"
    plan = check_evolution(
        ensemble, data, options, hyper=hyper, validation=validation, rounds=rounds, epochs=epochs, steps=steps,
        fraction=fraction, explore=explore, key=key, name=name,
    )  # fmt: skip
    check_options(options, IN_FILES, MEMBERS_HERE, name=name)
    asynchronous = check_flag(asynchronous, "asynchronous", name=name)
    data = whole_epochs(data, steps, name=name)
    folder = check_folder(checkpoint, name=name)
    with open_engine(executor, workers, name=name) as engine:
        if asynchronous:
            return evolve_asynchronously(
                engine, ensemble, loss, optimiser, data, plan, folder, shard=shard, retries=retries, name=name,
                **options, validation=validation, key=key,
            )  # fmt: skip
        call = {"rounds": rounds, "fraction": fraction} | plan.length
        train = train_rungs(engine, folder, call=call, shard=shard, retries=retries, name=name, word="round")
        return evolve(
            ensemble, loss, optimiser, data, plan, no_rounds(name), train=train, **options,
            validation=validation, key=key,
        )  # fmt: skip
