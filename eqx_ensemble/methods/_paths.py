import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

from .. import tree
from .._check import check_positive_int
from .._ensemble import Ensemble
from .._foreign import as_hashable
from .._pytree import PyTree
from ..train._engine import Run
from . import trajectory
from ._protocol import AbstractMethod, Posterior, as_loss, epoch_lengths, train
from .trajectory._check import check_rank, check_scale, check_steps

Make = Callable[..., Any] | Ensemble[Any]
LossLike = Callable[..., Any] | str


@ft.lru_cache(maxsize=64)
def _wrap(wrapper: Callable[..., Any], optimiser: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    """A wrapped optimiser, also of hyper-parameters; the same one for the same arguments."""
    wrap = lambda one: wrapper(one, **dict(options))
    if isinstance(optimiser, optax.GradientTransformation) or not callable(optimiser):
        return wrap(optimiser)
    return lambda hyper: wrap(optimiser(hyper))


def wrap_optimiser(wrapper: Callable[..., Any], optimiser: Any, **options: Any) -> Any:
    """A wrapped optimiser, also of hyper-parameters; the same one for the same arguments."""
    return _wrap(wrapper, as_hashable(optimiser), tuple(options.items()))


def state_of_draws(
    draws: Ensemble[Any], run: Run[Any], per_member: int, loss: Any, data: PyTree, options: dict[str, Any], key: Any
) -> eqx.nn.State | None:
    """The states of draws from the members of a run, with the statistics of BatchNorm re-estimated."""
    if run.state is None:
        return None
    position = {int(own): i for i, own in enumerate(np.asarray(run.ensemble.ids))}
    owners = [position[int(own) // per_member] for own in np.asarray(draws.ids)]
    state = tree.take(run.state, np.array(owners))
    is_norm = lambda x: isinstance(x, eqx.nn.BatchNorm)
    if not any(map(is_norm, jax.tree.leaves(draws.stacked, is_leaf=is_norm))):
        return state
    options = {name: options.get(name) for name in ("batch_size", "plan")}
    fn = lambda *inputs: loss(*inputs)[:2]
    return trajectory.update_batch_norm(draws, state, fn, data, key=key, **options)


class SWAG(AbstractMethod):
    """SWAG: draws from a Gaussian around the path of each member; several members are MultiSWAG.

    **Arguments:**

    - `num_members`: the number of members.
    - `num_samples`: draws from each.
    - `rank`, `start`, `every`: as for [`eqx_ensemble.methods.trajectory.swag`][]; by default snapshots are taken once
        an epoch in the last quarter of the steps.
    - `scale`: as for [`eqx_ensemble.methods.trajectory.sample`][].

    ```python
    ee.methods.SWAG(4, num_samples=10, rank=10)
    ```

    ??? cite
        [Maddox et al. 2019](https://arxiv.org/abs/1902.02476)
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    num_samples: int = 30
    rank: int = 20
    start: int | None = None
    every: int | None = None
    scale: float | None = None

    def __check_init__(self) -> None:
        check_positive_int(self.num_members, "num_members")
        check_positive_int(self.num_samples, "num_samples")
        check_rank(self.rank)
        check_steps(0 if self.start is None else self.start, 1 if self.every is None else self.every)
        check_scale(self.scale)

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][]."""
        start, every = self.start, self.every
        if start is None or every is None:
            steps, per_epoch = epoch_lengths(data, options, instead="Pass `start` and `every` to the method.")
            start = 3 * steps // 4 if start is None else start
            every = per_epoch if every is None else every
        loss = as_loss(loss)
        optimiser = wrap_optimiser(trajectory.swag, optimiser, rank=self.rank, start=start, every=every)
        run, healthy = train(make, self.num_members, loss, optimiser, data, options, key)
        draws = trajectory.sample(healthy, self.num_samples, scale=self.scale, key=key)
        state = state_of_draws(draws, healthy, self.num_samples, loss, data, options, key)
        return Posterior(draws, state, run)


class Snapshots(AbstractMethod):
    """Snapshot ensemble: the weights at the end of each cycle of a cosine learning rate.

    Updates of the optimiser are multiplied by the schedule, which falls from 1 to 0 in each cycle: its own learning
    rate is the largest one, and higher than that of other methods.

    **Arguments:**

    - `num_members`: the number of paths.
    - `num_snapshots`: snapshots of each.
    - `period`: the steps of a cycle; by default the steps of the run, divided by `num_snapshots`.

    ```python
    ee.methods.Snapshots(num_snapshots=5)
    ```

    ??? cite
        [Huang et al. 2017](https://arxiv.org/abs/1704.00109)
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    num_snapshots: int = 5
    period: int | None = None

    def __check_init__(self) -> None:
        check_positive_int(self.num_members, "num_members")
        check_positive_int(self.num_snapshots, "num_snapshots")
        if self.period is not None:
            check_positive_int(self.period, "period")

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][]."""
        period = self.period
        if period is None:
            steps, _ = epoch_lengths(data, options, instead="Pass `period` to the method.")
            period = max(1, steps // self.num_snapshots)
        loss = as_loss(loss)
        optimiser = wrap_optimiser(_cyclic_snapshots, optimiser, size=self.num_snapshots, period=period)
        run, healthy = train(make, self.num_members, loss, optimiser, data, options, key)
        members = trajectory.snapshot_ensemble(healthy)
        state = state_of_draws(members, healthy, self.num_snapshots, loss, data, options, key)
        return Posterior(members, state, run)


def _cyclic_snapshots(optimiser: optax.GradientTransformation, size: int, period: int) -> Any:
    cycles = optax.scale_by_schedule(trajectory.snapshot_schedule(1.0, period))
    return trajectory.snapshots(optax.chain(optimiser, cycles), size, every=period)
