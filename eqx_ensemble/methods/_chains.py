import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._caller import caller
from .._check import check_positive_int, check_word
from .._ensemble import Ensemble
from .._foreign import as_hashable, from_foreign_tree
from .._pytree import PyTree
from ..train import DivergedError, Status, TrainState, init, scan_steps
from ..train._engine import fit
from . import particles, sampling, trajectory
from ._check import check_options
from ._paths import state_of_draws
from ._protocol import (
    OF_SECOND_RUN,
    AbstractMethod,
    Posterior,
    as_loss,
    begin,
    check_noise,
    check_prior_std,
    epoch_lengths,
    num_rows_of,
    penalised,
    train,
)
from .particles._directions import check_kernel
from .sampling._langevin import check_fraction, check_rate
from .trajectory._check import check_steps

Make = Callable[..., Any] | Ensemble[Any]
LossLike = Callable[..., Any] | str


class AbstractChainMethod(AbstractMethod):
    """A method whose members are trained, then continue as chains of samples."""

    num_members: eqx.AbstractVar[int]
    num_samples: eqx.AbstractVar[int]
    learning_rate: eqx.AbstractVar[Any]
    start: eqx.AbstractVar[int | None]
    every: eqx.AbstractVar[int | None]
    prior_std: eqx.AbstractVar[Any]
    noise: eqx.AbstractVar[float | None]
    temperature: eqx.AbstractVar[Any]

    @abc.abstractmethod
    def sampler(self, num_rows: int, key: Any) -> Any:
        """The sampler as an optax optimiser."""

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][].

        `options` are those of training the members, which the chains begin with. The run is that of the chains.
        """
        check_options(options, ("hyper",), "chains have none")
        _, every = epoch_lengths(data, options, instead="Load it as arrays, or read it with `train.RowReader`.")
        every = every if self.every is None else self.every
        start = every * self.num_samples if self.start is None else self.start
        num_rows = num_rows_of(data, options, instead="")
        own = penalised(as_loss(loss, noise=self.noise), self.prior_std, num_rows)
        _, trained = train(make, self.num_members, own, optimiser, data, options, key)
        of_chains = {name: options[name] for name in OF_SECOND_RUN if name in options}
        of_chains |= {"epochs": None, "steps": (start or every) + every * (self.num_samples - 1)}
        of_chains |= {"rows": trained.rows, "state": trained.state, "key": jax.random.fold_in(key, 1)}
        chains = trajectory.snapshots(self.sampler(num_rows, key), self.num_samples, start=start, every=every)
        run = fit(trained.ensemble, own, chains, data, **of_chains)
        samples = trajectory.snapshot_ensemble(run)
        state = state_of_draws(samples, run, self.num_samples, own, data, options, key)
        return Posterior(samples, state, run)


def check_chains(method: AbstractChainMethod) -> None:
    """Raises unless the options that all samplers have are valid."""
    check_positive_int(method.num_members, "num_members")
    check_positive_int(method.num_samples, "num_samples")
    check_rate(method.learning_rate, "learning_rate")
    check_steps(0 if method.start is None else method.start, 1 if method.every is None else method.every)
    check_prior_std(method.prior_std)
    check_noise(method.noise)
    check_rate(method.temperature, "temperature")


class SGLD(AbstractChainMethod):
    """Stochastic-gradient Langevin dynamics: samples from chains that begin at trained members.

    The loss is a mean negative log-likelihood, to which the method adds the prior.

    **Arguments:**

    - `num_members`: the number of chains.
    - `num_samples`: samples from each.
    - `learning_rate`, `temperature`: of the chains, as for [`eqx_ensemble.methods.sampling.sgld`][]; the optimiser
        trains members before.
    - `start`, `every`: the steps before the first sample, and between two samples, as for
        [`eqx_ensemble.methods.trajectory.snapshots`][]; by default one epoch between, and as many steps before.
    - `prior_std`: the standard deviation of the prior, as for [`eqx_ensemble.methods.priors.gaussian_penalty`][];
        `None` for a loss that has the prior already.
    - `noise`: with the word `"regression"` as loss, the standard deviation of the noise in the targets.

    ```python
    ee.methods.SGLD(4, num_samples=10, learning_rate=1e-4)
    ```

    ??? cite
        [Welling and Teh 2011](https://dl.acm.org/doi/10.5555/3104482.3104568)
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    learning_rate: Any
    num_samples: int = 10
    start: int | None = None
    every: int | None = None
    prior_std: Any = 1.0
    noise: float | None = None
    temperature: Any = 1.0

    def __check_init__(self) -> None:
        check_chains(self)

    def sampler(self, num_rows: int, key: Any) -> Any:
        """The sampler as an optax optimiser."""
        return sampling.sgld(self.learning_rate, num_rows, temperature=self.temperature, key=key)


class SGHMC(AbstractChainMethod):
    """Stochastic-gradient Hamiltonian Monte Carlo: [`eqx_ensemble.methods.SGLD`][] with momentum.

    **Arguments:**

    - `num_members`, `learning_rate`, `num_samples`, `start`, `every`, `prior_std`, `noise`, `temperature`: as for
        [`eqx_ensemble.methods.SGLD`][].
    - `friction`: as for [`eqx_ensemble.methods.sampling.sghmc`][].

    ```python
    ee.methods.SGHMC(4, num_samples=10, learning_rate=1e-4)
    ```

    ??? cite
        [Chen et al. 2014](https://arxiv.org/abs/1402.4102)
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    learning_rate: Any
    num_samples: int = 10
    start: int | None = None
    every: int | None = None
    prior_std: Any = 1.0
    noise: float | None = None
    temperature: Any = 1.0
    friction: float = 0.1

    def __check_init__(self) -> None:
        check_chains(self)
        check_fraction(self.friction, "friction", allow=1)

    def sampler(self, num_rows: int, key: Any) -> Any:
        """The sampler as an optax optimiser."""
        own = {"friction": self.friction, "temperature": self.temperature}
        return sampling.sghmc(self.learning_rate, num_rows, key=key, **own)


class SVGD(AbstractMethod):
    """Stein variational gradient descent: members that repel each other in the space of weights.

    The loss is a mean negative log-likelihood, to which the method adds the prior.

    **Arguments:**

    - `num_members`: the number of particles.
    - `prior_std`, `noise`: as for [`eqx_ensemble.methods.SGLD`][].
    - `method`, `kernel`: as for [`eqx_ensemble.methods.particles.make_step`][].

    ```python
    ee.methods.SVGD(8, prior_std=0.5)
    ```

    ??? cite
        [Liu and Wang 2016](https://arxiv.org/abs/1608.04471)
    """

    num_members: int
    _: dataclasses.KW_ONLY
    prior_std: Any = 1.0
    noise: float | None = None
    method: Literal["svgd", "wgd"] = "svgd"
    kernel: Any = None

    def __check_init__(self) -> None:
        check_positive_int(self.num_members, "num_members")
        check_prior_std(self.prior_std)
        check_noise(self.noise)
        check_word(self.method, "method", ("svgd", "wgd"))
        if self.kernel is not None:
            check_kernel(self.kernel)

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][], with arrays as data.

        Of its options, `epochs` or `steps`, `batch_size`, `state`, `trainable`, `plan` and `mesh`: members meet in
        every step, so none can stop early or have rows of its own. Each epoch has its own row order.
        """
        options.pop("progress", None)
        known = ("epochs", "steps", "batch_size", "state", "trainable", "plan", "mesh")
        check_options(options, [name for name in options if name not in known], "members meet in every step")
        num_steps, _ = epoch_lengths(data, options, instead="Load it as arrays.")
        data, num_rows = from_foreign_tree(data, "data"), num_rows_of(data, options, instead="")
        ensemble, options = begin(make, self.num_members, options, key)
        own = penalised(as_loss(loss, noise=self.noise), self.prior_std, num_rows)
        of_step = {name: options[name] for name in ("plan", "mesh") if name in options}
        step = particles.make_step(
            own, as_hashable(optimiser), num_rows=num_rows, method=self.method, kernel=self.kernel, **of_step
        )
        of_init = {name: options[name] for name in ("state", "trainable", "mesh") if name in options}
        train_state = init(ensemble, optimiser, key=key, **of_init)
        size = options.get("batch_size") or 32
        for epoch, first in enumerate(range(0, num_steps, -(-num_rows // size))):
            order = jax.random.permutation(jax.random.fold_in(key, epoch), num_rows)
            train_state = _one_epoch(step, train_state, data, np.asarray(order), size, num_steps - first)
        healthy = np.asarray(train_state.status) != Status.DIVERGED
        if not healthy.any():
            raise DivergedError(f"`{caller()}`: all {len(healthy)} members diverged.", None)
        return Posterior(train_state.ensemble[healthy], jax.tree.map(lambda x: x[healthy], train_state.model_state))


def _one_epoch(step: Any, state: TrainState, data: PyTree, order: np.ndarray, size: int, most: int) -> TrainState:
    """The steps of an epoch: whole batches in one program, then what is left."""
    whole = min(len(order) // size, most)
    of_rows = lambda rows: jax.tree.map(lambda x: jnp.asarray(x)[rows], data)
    if whole:
        state, _ = scan_steps(step, state, of_rows(order[: whole * size].reshape(whole, size)))
    if whole < most and whole * size < len(order):
        state, _ = step(state, of_rows(order[whole * size :]))
    return state
