import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._ensemble import Ensemble, take
from .._map import take_marked
from .._marks import Each
from ..train._run import Run
from . import trajectory
from ._protocol import AbstractOwnMethod, Posterior, Task, as_loss, as_made, check_counts
from .trajectory._check import check_rank, check_scale, check_steps


@ft.lru_cache(maxsize=64)
def wrap_optimiser(wrapper: Callable[..., Any], optimiser: Any, **options: Any) -> Any:
    """A wrapped optimiser, also of hyper-parameters; the same one for the same arguments."""
    if isinstance(optimiser, optax.GradientTransformation) or not callable(optimiser):
        return wrapper(optimiser, **options)
    return lambda hyper: wrapper(optimiser(hyper), **options)


def own_rows(x: Any, rows: Any) -> Any:
    """The rows of each member."""
    of_each = lambda x: jax.vmap(lambda x, rows: x[rows])(jnp.asarray(x), rows)
    is_each = lambda x: isinstance(x, Each)
    own = lambda x: Each(jax.tree.map(of_each, x.value)) if is_each(x) else Each(jnp.asarray(x)[rows])
    return jax.tree.map(own, x, is_leaf=is_each)


def posterior_of_draws(draws: Ensemble[Any], owners: Any, run: Run[Any], kept: Run[Any], task: Task) -> Posterior:
    """The posterior of draws from the members `owners` of a run, with the statistics of BatchNorm re-estimated."""
    if kept.state is None:
        return Posterior(draws, None, run)
    state = take(kept.state, owners)
    is_norm = lambda x: isinstance(x, eqx.nn.BatchNorm)
    if any(map(is_norm, jax.tree.leaves(draws.stacked, is_leaf=is_norm))):
        fn = lambda *inputs: as_loss(task.loss)(*inputs)[:2]
        data = task.of_healthy(run).data
        data = take_marked(data if kept.rows is None else own_rows(data, kept.rows), owners)
        state = trajectory.update_batch_norm(
            draws, state, fn, data, key=task.key, batch_size=task.options.get("batch_size")
        )
    return Posterior(draws, state, run)


class SWAG(AbstractOwnMethod):
    """Draws from a Gaussian around the path of each member; several members are MultiSWAG.

    **Arguments:**

    - `num_members`: the number of members.
    - `num_samples`: draws from each.
    - `rank`, `start`, `every`: as for [`eqx_ensemble.methods.trajectory.swag`][]; by default snapshots are taken once
        an epoch in the last quarter of the steps.
    - `scale`: as for [`eqx_ensemble.methods.trajectory.sample`][].

    ```python
    ee.methods.SWAG(4, num_samples=10, rank=10)
    ```
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    num_samples: int = 30
    rank: int = 20
    start: int | None = None
    every: int | None = None
    scale: float | int | None = None
    template = as_made

    def __check_init__(self) -> None:
        check_counts(self, "num_samples")
        check_rank(self.rank)
        check_steps(0 if self.start is None else self.start, 1 if self.every is None else self.every)
        check_scale(self.scale)

    def train(self, task: Task) -> Posterior[Any]:
        start, every = self.start, self.every
        if start is None or every is None:
            steps, per_epoch = task.num_steps("Pass `start` and `every` to the method.")
            start = 3 * steps // 4 if start is None else start
            every = per_epoch if every is None else every
        optimiser = wrap_optimiser(trajectory.swag, task.optimiser, rank=self.rank, start=start, every=every)
        run, healthy = task.run(self, optimiser=optimiser)
        draws = trajectory.sample(healthy, self.num_samples, scale=self.scale, key=task.key)
        return posterior_of_draws(
            draws, np.repeat(np.arange(len(healthy.status)), self.num_samples), run, healthy, task
        )


class Snapshots(AbstractOwnMethod):
    """Snapshot ensemble: the weights at the end of each cycle of a cosine learning rate.

    Updates of the optimiser are multiplied by [`eqx_ensemble.methods.trajectory.snapshot_schedule`][] from 1: its own
    learning rate is the largest one.

    **Arguments:**

    - `num_members`: the number of paths.
    - `num_snapshots`: snapshots of each.
    - `period`: the steps of a cycle; by default the steps of the run, divided by `num_snapshots`.

    ```python
    ee.methods.Snapshots(num_snapshots=5)
    ```
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    num_snapshots: int = 5
    period: int | None = None
    template = as_made

    def __check_init__(self) -> None:
        check_counts(self, "num_snapshots", "period")

    def train(self, task: Task) -> Posterior[Any]:
        period = self.period
        if period is None:
            period = max(1, task.num_steps("Pass `period` to the method.")[0] // self.num_snapshots)
        optimiser = wrap_optimiser(_cyclic_snapshots, task.optimiser, size=self.num_snapshots, period=period)
        run, healthy = task.run(self, optimiser=optimiser)
        owners = trajectory.snapshot_owners(healthy)
        return posterior_of_draws(trajectory.snapshot_ensemble(healthy), owners, run, healthy, task)


def _cyclic_snapshots(optimiser: optax.GradientTransformation, size: int, period: int) -> Any:
    cycles = optax.scale_by_schedule(trajectory.snapshot_schedule(1.0, period))
    return trajectory.snapshots(optax.chain(optimiser, cycles), size, every=period)
