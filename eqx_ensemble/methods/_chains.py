import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._caller import caller
from .._check import check_word
from .._foreign import from_foreign_tree
from .._marks import Each
from ..train import DivergedError, Status, init, scan_steps
from ..train._fit import fit
from . import particles, sampling, trajectory
from ._check import check_options
from ._paths import posterior_of_draws
from ._protocol import (
    OF_SECOND_RUN,
    AbstractOwnMethod,
    Posterior,
    Task,
    add_prior,
    as_loss,
    as_made,
    check_above_zero,
    check_counts,
    healthy_part,
)
from .particles._directions import check_kernel
from .sampling._langevin import check_fraction, check_rate
from .trajectory._check import check_steps


def _check_chains(method: Any) -> None:
    """Raises unless the options that both samplers have are valid."""
    check_counts(method, "num_samples")
    check_rate(method.learning_rate, "learning_rate")
    check_rate(method.temperature, "temperature")
    check_steps(0 if method.start is None else method.start, 1 if method.every is None else method.every)
    check_above_zero(method, "prior_std", "noise")


def _lengths(method: Any, per_epoch: int) -> tuple[int, int, int]:
    """The steps before the first sample, between two, and in all."""
    every = per_epoch if method.every is None else method.every
    start = every * method.num_samples if method.start is None else method.start
    return start, every, (start or every) + every * (method.num_samples - 1)


def _sample(method: Any, task: Task, sampler: Any, **options: Any) -> Posterior[Any]:
    """Trains members, which continue as chains."""
    check_options(task.options, ("hyper",), "chains have none")
    num_rows = task.num_rows()
    start, every, num_steps = _lengths(method, task.num_steps()[1] if method.every is None else method.every)
    loss = add_prior(as_loss(task.loss, noise=method.noise), method.prior_std, num_rows)
    run, trained = task.run(method, loss=loss)
    task = task._replace(loss=loss).of_healthy(run)
    of_chains = {name: task.options[name] for name in OF_SECOND_RUN if name in task.options}
    of_chains |= {"epochs": None, "steps": num_steps}
    of_chains |= {"rows": trained.rows, "state": trained.state, "key": jax.random.fold_in(task.key, 1)}
    sampler = sampler(method.learning_rate, num_rows, temperature=method.temperature, key=task.key, **options)
    chains = trajectory.snapshots(sampler, method.num_samples, start=start, every=every)
    run = fit(trained.ensemble, loss, chains, task.data, **of_chains)
    healthy = healthy_part(run)
    return posterior_of_draws(
        trajectory.snapshot_ensemble(healthy), trajectory.snapshot_owners(healthy), run, healthy, task
    )


class SGLD(AbstractOwnMethod):
    """Stochastic-gradient Langevin dynamics: samples from chains that begin at trained members.

    `optimiser` and the options of `fit` are those of training the members, `run` is that of the chains.

    **Arguments:**

    - `num_members`: the number of chains.
    - `num_samples`: samples from each.
    - `learning_rate`, `temperature`: as for [`eqx_ensemble.methods.sampling.sgld`][].
    - `start`, `every`: the steps before the first sample, and between two samples; by default one epoch between, and
        as many steps before as after.
    - `prior_std`: the standard deviation of the prior, as for [`eqx_ensemble.methods.priors.gaussian_penalty`][], which
        is added to the loss; `None` for a loss with its own prior.
    - `noise`: for the loss `"regression"`, the standard deviation of the noise in the targets; by default 1.

    ```python
    ee.methods.SGLD(4, num_samples=10, learning_rate=1e-4)
    ```
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    learning_rate: Any
    num_samples: int = 10
    start: int | None = None
    every: int | None = None
    prior_std: Any = 1.0
    noise: float | int | None = None
    temperature: Any = 1.0
    template = as_made

    def __check_init__(self) -> None:
        _check_chains(self)

    def train(self, task: Task) -> Posterior[Any]:
        return _sample(self, task, sampling.sgld)

    def cost(self, steps: int, per_epoch: int) -> int:
        return self.num_members * (steps + _lengths(self, per_epoch)[2])


class SGHMC(AbstractOwnMethod):
    """Stochastic-gradient Hamiltonian Monte Carlo: [`eqx_ensemble.methods.SGLD`][] with momentum.

    **Arguments:**

    - `friction`: as for [`eqx_ensemble.methods.sampling.sghmc`][].
    - `num_members`, `learning_rate`, `num_samples`, `start`, `every`, `prior_std`, `noise`, `temperature`: as for
        [`eqx_ensemble.methods.SGLD`][].

    ```python
    ee.methods.SGHMC(4, num_samples=10, learning_rate=1e-4)
    ```
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    learning_rate: Any
    num_samples: int = 10
    start: int | None = None
    every: int | None = None
    prior_std: Any = 1.0
    noise: float | int | None = None
    temperature: Any = 1.0
    friction: float | int = 0.1
    template = as_made

    def __check_init__(self) -> None:
        _check_chains(self)
        check_fraction(self.friction, "friction", allow=1)

    def train(self, task: Task) -> Posterior[Any]:
        return _sample(self, task, sampling.sghmc, friction=self.friction)

    def cost(self, steps: int, per_epoch: int) -> int:
        return self.num_members * (steps + _lengths(self, per_epoch)[2])


class SVGD(AbstractOwnMethod):
    """Stein variational gradient descent: members that repel each other in the space of weights.

    Members meet in every step, so none can stop early or have rows of its own. Of the options of `fit` it takes
    `epochs` or `steps`, `batch_size`, `state` and `trainable`.

    **Arguments:**

    - `num_members`: the number of particles.
    - `prior_std`, `noise`: as for [`eqx_ensemble.methods.SGLD`][].
    - `method`, `kernel`: as for [`eqx_ensemble.methods.particles.make_step`][].

    ```python
    ee.methods.SVGD(8, prior_std=0.5)
    ```
    """

    num_members: int
    _: dataclasses.KW_ONLY
    prior_std: Any = 1.0
    noise: float | int | None = None
    method: Literal["svgd", "wgd"] = "svgd"
    kernel: Any = None
    template = as_made

    def __check_init__(self) -> None:
        check_counts(self)
        check_above_zero(self, "prior_std", "noise")
        check_word(self.method, "method", ("svgd", "wgd"))
        if self.kernel is not None:
            check_kernel(self.kernel)

    def train(self, task: Task) -> Posterior[Any]:
        known = ("epochs", "steps", "batch_size", "state", "trainable", "progress")
        check_options(task.options, set(task.options) - set(known), "members meet in every step")
        if any(isinstance(x, Each) for x in jax.tree.leaves(task.data, is_leaf=lambda x: isinstance(x, Each))):
            raise TypeError(
                f"`{caller()}` needs one batch for all members, got data marked `Each`: they meet in every step."
            )
        (num_steps, per_epoch), num_rows = task.num_steps(), task.num_rows()
        ensemble, options = task.build(self.num_members, task.make)
        some = lambda *names: {name: options[name] for name in names if name in options}
        loss = add_prior(as_loss(task.loss, noise=self.noise), self.prior_std, num_rows)
        step = particles.make_step(
            loss,
            task.optimiser,
            num_rows=num_rows,
            method=self.method,
            kernel=self.kernel,
        )
        state = init(ensemble, task.optimiser, key=task.key, **some("state", "trainable"))
        data, size = from_foreign_tree(task.data, "data"), min(options.get("batch_size") or 32, num_rows)
        passes = range(-(-num_steps * size // num_rows))  # full batches of an endless stream, as in `fit`
        order = [jax.random.permutation(jax.random.fold_in(task.key, i), num_rows) for i in passes]
        rows = np.concatenate(order)[: num_steps * size].reshape(num_steps, size)
        for first in range(0, num_steps, per_epoch):
            epoch = rows[first : first + per_epoch]
            state, _ = scan_steps(step, state, jax.tree.map(lambda x, epoch=epoch: jnp.asarray(x)[epoch], data))
        healthy = np.asarray(state.status) != Status.DIVERGED
        if not healthy.any():
            raise DivergedError(f"`{caller()}`: all {len(healthy)} members diverged.", None)
        return Posterior(state.ensemble[healthy], jax.tree.map(lambda x: x[healthy], state.model_state))
