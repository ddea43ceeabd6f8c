import os
from collections.abc import Callable, Mapping
from typing import Any

from .._check import check_positive_int
from .._pytree import PyTree
from ..methods._check import check_factor, check_options, check_validation_given
from ..methods._halving import halve
from ..methods._hyperband import SETS, brackets
from ..sweep import AbstractRange
from ..train._run import Run
from ..train.compiled._optimiser import Optimiser
from ._check import IN_FILES, MEMBERS_HERE, check_folder
from ._engines import open_engine
from ._rung import call_of, no_rounds, train_rungs


def hyperband(
    executor: Any,
    make: Callable[..., Any],
    ranges: Mapping[str, AbstractRange],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    validation: PyTree,
    epochs: int,
    factor: float | int = 3,
    shard: int | None = None,
    workers: int | None = None,
    retries: int = 2,
    checkpoint: str | os.PathLike[str] | None = None,
    key: Any,
    **options: Any,
) -> list[Run[Any]]:
    """Hyperband on many workers: several runs of successive halving, from many short trainings to a few full ones.

    The result is that of [`eqx_ensemble.methods.hyperband`][]: bit for bit under [`eqx_ensemble.plan.Sequential`][],
    within rounding under other plans. Brackets run one after another, each as an
    [`eqx_ensemble.fleet.successive_halving`][].

    **Arguments:**

    - `executor`, `shard`, `workers`, `retries`: as for [`eqx_ensemble.fleet.fit`][].
    - `make`, `ranges`, `epochs`, `factor`: as for [`eqx_ensemble.methods.hyperband`][].
    - `loss`, `optimiser`, `data`, `validation`, `options`: as for [`eqx_ensemble.fleet.fit`][], without `save` and
        `ids`.
    - `checkpoint`: as for [`eqx_ensemble.fleet.successive_halving`][]; each bracket has a subfolder.
    - `key`: the root key.

    **Returns:** one run per bracket, the largest first. Ids are unique across brackets.

    **Raises:** `TypeError` for options of [`eqx_ensemble.fit`][] that the method sets itself; otherwise as
    [`eqx_ensemble.fleet.successive_halving`][].

    ```python
    from concurrent.futures import ThreadPoolExecutor  # threads, for this example

    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    held_out = jnp.ones((16, 3)), jnp.zeros((16, 1))
    with ThreadPoolExecutor(2) as executor:
        runs = ee.fleet.hyperband(
            executor,
            lambda key: eqx.nn.Linear(3, 1, key=key),
            {"lr": ee.sweep.LogUniform(1e-4, 1e-1)},
            mse,
            lambda hyper: optax.adam(hyper["lr"]),
            data,
            validation=held_out,
            epochs=3,
            key=key,
        )
    winners = ee.concatenate([run.best() for run in runs])  # one from each bracket
    ```

    ??? cite

        Li et al., *Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization*, JMLR 18, 2018.
    """
    name = "fleet.hyperband"
    check_positive_int(epochs, "epochs", name=name)
    check_validation_given(validation, name=name)
    check_options(options, SETS, "it sets these itself", name=name)
    factor = check_factor(factor, name=name)
    check_options(options, IN_FILES, MEMBERS_HERE, name=name)
    folder = check_folder(checkpoint, name=name)
    runs = []
    with open_engine(executor, workers, name=name) as engine:
        for number, bracket in enumerate(brackets(make, ranges, epochs, factor, key=key)):
            own = None if folder is None else folder / f"bracket-{number:02d}"
            runs.append(
                halve(
                    bracket.ensemble,
                    loss,
                    optimiser,
                    data,
                    bracket.ladder,
                    no_rounds(name),
                    train=train_rungs(
                        engine, own, call=call_of(bracket.ladder), shard=shard, retries=retries, name=name
                    ),
                    **options,
                    validation=validation,
                    hyper=bracket.hyper,
                    state=bracket.state,
                    key=key,
                )  # fmt: skip
            )
            if runs[-1].interrupted:
                break
            options.pop("resume", None)  # it applies to the first bracket only
    return runs
