import os
from collections.abc import Callable
from typing import Any, Literal

from jaxtyping import Key

from .._ensemble import Ensemble, M
from .._pytree import PyTree
from ..train import perturb
from ..train._fit import fit
from ..train._run import Run
from ..train.compiled._optimiser import Optimiser
from ._check_rounds import check_saving
from ._evolve import check_evolution, evolve
from ._population import Population
from ._rounds import Rounds


def population_based_training(
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
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: Literal["auto", "must", "never"] = "auto",
    fit: Callable[..., Run[Any]] = fit,
    key: Any,
    **options: Any,
) -> Population[M]:
    """Population-based training: replaces the worst members by copies of the best, with perturbed hyper-parameters.

    After each round but the last, members are ranked by their validation scores. Each of the worst copies the weights,
    optimiser state and hyper-parameters of one of the best ([`eqx_ensemble.methods.population.truncation`][]); the
    copied hyper-parameters are then perturbed. Diverged members are also replaced, and are never donors. All rounds use
    one compiled program.

    **Arguments:**

    - `ensemble`, `loss`, `optimiser`, `data`, `hyper`, `validation`, `options`: as for [`eqx_ensemble.fit`][], without
        options that stop or revive members. The optimiser, the loss, or both may use the hyper-parameters.
    - `rounds`: the number of rounds.
    - `epochs` or `steps`: the length of one round.
    - `fraction`: the fraction of members that are replaced after a round, rounded up.
    - `explore`: `explore(hyper, key) -> hyper` perturbs the hyper-parameters of one copy: by default
        [`eqx_ensemble.train.perturb`][]; [`eqx_ensemble.methods.population.perturb_hyper`][] respects ranges.
    - `checkpoint`: a folder in which all rounds are saved, for data in arrays. Rerunning the same call after an
        interruption resumes bit for bit, or returns the finished result; a different call raises an error that lists
        the differences. Only one process at a time can use a folder. It takes the space of two rounds.
    - `checkpoint_every`, `resume`: as for [`eqx_ensemble.fit`][].
    - `fit`: the function that trains each round, as for [`eqx_ensemble.methods.successive_halving`][].
    - `key`: the root key.

    **Returns:** [`eqx_ensemble.methods.Population`][]. Ctrl-C stops training at the next boundary and returns the
    result so far.

    **Raises:** `TypeError` without `hyper` or validation data, and for options that stop or revive members;
    `ValueError` for a fraction outside (0, 0.5]; also as [`eqx_ensemble.fit`][].

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1)}
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 8, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    held_out = jnp.ones((16, 3)), jnp.zeros((16, 1))
    found = ee.methods.population_based_training(
        ensemble,
        loss,
        lambda hyper: optax.adam(hyper["lr"]),
        data,
        hyper=ee.sweep.draw(ranges, 8, key=key),
        validation=held_out,
        rounds=3,
        epochs=2,
        explore=ee.methods.population.perturb_hyper(ranges),
        key=key,
    )
    found.run.best()
    found.lineage  # (3, 8)
    ```

    ??? cite

        Jaderberg et al., *Population Based Training of Neural Networks*, arXiv:1711.09846, 2017.
    """
    name = "methods.population_based_training"
    check_saving(checkpoint, checkpoint_every, resume, data, name=name)
    plan = check_evolution(
        ensemble, data, options, hyper=hyper, validation=validation, rounds=rounds, epochs=epochs, steps=steps,
        fraction=fraction, explore=explore, key=key, name=name,
    )  # fmt: skip
    own = {"rounds": rounds, **plan.length, "fraction": fraction}
    saved = Rounds(checkpoint, own=own, every=checkpoint_every, resume=resume, name=name, fit=fit)
    saved.add_function("explore", explore, plan.one, plan.keys[0])
    with saved.lock():
        return evolve(ensemble, loss, optimiser, data, plan, saved, **options, validation=validation, key=key)
