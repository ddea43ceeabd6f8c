import os
from collections.abc import Callable
from typing import Any

from jaxtyping import Key

from .._ensemble import Ensemble, M
from .._pytree import PyTree
from ..methods._check import check_options
from ..methods._evolve import check_evolution, evolve
from ..methods._population import Population
from ..train import perturb
from ..train.compiled._optimiser import Optimiser
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
    shard: int | None = None,
    workers: int | None = None,
    retries: int = 2,
    checkpoint: str | os.PathLike[str] | None = None,
    key: Any,
    **options: Any,
) -> Population[M]:
    """Trains a population on many workers, replacing the worst members by copies of the best.

    The result is that of [`eqx_ensemble.methods.population_based_training`][]: bit for bit under
    [`eqx_ensemble.plan.Sequential`][], within rounding under other plans, for any shard size. Each round is one
    [`eqx_ensemble.fleet.fit`][] of all members, which are compared, copied and perturbed when all have finished it.
    Workers wait for the slowest shard, and the result does not depend on their speed.

    **Arguments:**

    - `executor`, `shard`, `workers`, `retries`: as for [`eqx_ensemble.fleet.fit`][].
    - `ensemble`, `loss`, `optimiser`, `data`, `validation`, `options`: as for [`eqx_ensemble.fleet.fit`][], without
        `save`, `ids`, `patience`, `target` and `max_steps`. `ensemble` must be an [`eqx_ensemble.Ensemble`][].
    - `hyper`, `rounds`, `epochs` or `steps`, `fraction`, `explore`: as for
        [`eqx_ensemble.methods.population_based_training`][].
    - `checkpoint`: a folder that all workers can write, in which each shard of each round saves its run. Rerunning the
        same call reads completed shards and resumes the others. It takes the space of one run per round.
    - `key`: the root key.

    **Returns:** [`eqx_ensemble.methods.Population`][]. Members of an abandoned shard are replaced after that round, as
    diverged members are; those of the first round are missing. A warning says so.

    **Raises:** as [`eqx_ensemble.methods.population_based_training`][] and [`eqx_ensemble.fleet.fit`][].

    ```python
    from concurrent.futures import ThreadPoolExecutor  # threads, for this example

    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1)}
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    held_out = jnp.ones((16, 3)), jnp.zeros((16, 1))
    with ThreadPoolExecutor(2) as executor:
        found = ee.fleet.population_based_training(
            executor,
            ensemble,
            mse,
            lambda hyper: optax.adam(hyper["lr"]),
            data,
            hyper=ee.sweep.draw(ranges, 8, key=key),
            validation=held_out,
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
    data = whole_epochs(data, steps, name=name)
    folder = check_folder(checkpoint, name=name)
    with open_engine(executor, workers, name=name) as engine:
        call = {"rounds": rounds, "fraction": fraction} | plan.length
        train = train_rungs(engine, folder, call=call, shard=shard, retries=retries, name=name, word="round")
        return evolve(
            ensemble, loss, optimiser, data, plan, no_rounds(name), train=train, **options,
            validation=validation, key=key,
        )  # fmt: skip
