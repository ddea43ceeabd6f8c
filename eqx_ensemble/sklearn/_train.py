import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import tree
from .._build import build
from .._ensemble import Ensemble, concatenate
from ..resample import bootstrap
from ..train import DivergedError, Status
from ..train._fit import fit
from ._base import AbstractEstimator
from ._check import check_outputs
from ._data import Table
from ._heads import AbstractHead
from ._member import MemberMaker, Scaling, loss, stateful_loss
from ._network import Network, default_optimiser, optimiser_of_rate


class Members(NamedTuple):
    """Trained members, with the state of their layers, the rows they drew and their curves `(members, epochs)`."""

    ensemble: Ensemble
    state: Any
    rows: np.ndarray | None
    losses: np.ndarray
    validation: np.ndarray | None

    def take(self, kept: np.ndarray) -> "Members":
        """Some of the members."""
        if kept.all():
            return self
        take = lambda part: None if part is None else part[kept]
        state = None if self.state is None else tree.take(self.state, kept)
        return Members(self.ensemble[kept], state, take(self.rows), self.losses[kept], take(self.validation))


def make_maker(estimator: AbstractEstimator, in_size: int, head: AbstractHead, scaling: Scaling) -> MemberMaker:
    """The constructor of a member: the user's, or that of the default network."""
    make = estimator.make
    if make is None:
        sizes = tuple(map(int, estimator.hidden_layer_sizes))
        make = functools.partial(Network, hidden_layer_sizes=sizes, activation=estimator.activation)
    return MemberMaker(make, in_size, head, scaling)


def build_members(maker: MemberMaker, ids: range, x: np.ndarray, *, key: jax.Array, name: str) -> tuple[Ensemble, Any]:
    """New members, and the state of their layers if they have one."""
    made = build(maker, ids=ids, shared=_scaling, key=key)
    ensemble, state = made if isinstance(made, tuple) else (made, None)
    check_outputs(ensemble, maker.head, x, state, name=name)
    return ensemble, state


def draw_rows(estimator: AbstractEstimator, num_rows: int, ids: np.ndarray, *, key: jax.Array) -> np.ndarray | None:
    """With `bootstrap`, the rows of the members with these ids; those of a member do not depend on the others."""
    if not estimator.bootstrap:
        return None
    return np.asarray(bootstrap(num_rows, int(max(ids)) + 1, key=key))[ids]


def train_members(
    estimator: AbstractEstimator,
    ensemble: Ensemble,
    state: Any,
    data: Table,
    validation: Table | None,
    *,
    rows: np.ndarray | None,
    key: jax.Array,
    name: str,
) -> Members:
    """The members after at most `max_iter` epochs, without those that diverged."""
    batch_size = min(estimator.batch_size, len(data.x))
    options: dict[str, Any] = {}
    if validation is not None:
        # Patience longer than the run would have no effect; the best weights are kept anyway.
        patience = estimator.n_iter_no_change if estimator.n_iter_no_change < estimator.max_iter else None
        options |= {"validation": tuple(validation), "patience": patience, "min_delta": estimator.tol}
    optimiser = estimator.optimiser
    if not isinstance(optimiser, optax.GradientTransformation):
        hyper = {"learning_rate": estimator.learning_rate}
        if optimiser is None:
            hyper["weight_decay"] = estimator.weight_decay
        dtype = jax.dtypes.canonicalize_dtype(float)
        options["hyper"] = {k: jnp.full(ensemble.num_members, v, dtype) for k, v in hyper.items()}
        optimiser = default_optimiser if optimiser is None else optimiser_of_rate(optimiser)
    run = fit(
        ensemble, loss if state is None else stateful_loss, optimiser, tuple(data), epochs=estimator.max_iter,
        batch_size=batch_size, state=state, rows=rows, progress=bool(estimator.verbose), key=key, **options,
    )  # fmt: skip
    healthy = run.status != Status.DIVERGED
    if not healthy.any():
        raise DivergedError(
            f"`{name}`: all members diverged. Lower `learning_rate`, or look for extreme values in the data.", run
        )
    losses = _epoch_means(run.history.loss, len(data.x), batch_size)
    return Members(run.ensemble, run.state, rows, losses, run.history.validation).take(healthy)


def extend_curves(before: Members, after: Members) -> Members:
    """Concatenates the curves of members that were trained further."""
    kept = np.isin(np.asarray(before.ensemble.ids), np.asarray(after.ensemble.ids))
    before = before.take(kept)
    losses = np.concatenate([before.losses, after.losses], axis=1)
    return after._replace(losses=losses, validation=_join(before, after, axis=1))


def add_members(before: Members, after: Members) -> Members:
    """Joins members with new ones."""
    ensemble = concatenate([before.ensemble, after.ensemble])
    state = None if before.state is None else tree.concatenate([before.state, after.state])
    rows = None if before.rows is None or after.rows is None else np.concatenate([before.rows, after.rows])
    length = max(before.losses.shape[1], after.losses.shape[1])
    losses = np.concatenate([_pad(part.losses, length) for part in (before, after)])
    return Members(ensemble, state, rows, losses, _join(before, after, axis=0))


def _join(before: Members, after: Members, *, axis: int) -> np.ndarray | None:
    parts = [part.validation for part in (before, after) if part.validation is not None]
    if len(parts) < 2:  # curves are comparable if all members have one
        return None
    if axis == 0:
        parts = [_pad(part, max(part.shape[1] for part in parts)) for part in parts]
    return np.concatenate(parts, axis=axis)


def _pad(curves: np.ndarray, length: int) -> np.ndarray:
    return np.pad(curves, ((0, 0), (0, length - curves.shape[1])), constant_values=np.nan)


def _epoch_means(losses: np.ndarray, num_rows: int, batch_size: int) -> np.ndarray:
    """The mean loss of each epoch `(members, epochs)`, with batches weighted by their rows."""
    steps = -(-num_rows // batch_size)
    weights = np.full(steps, batch_size)
    weights[-1] = num_rows - batch_size * (steps - 1)
    epochs = -(-losses.shape[1] // steps)
    losses = _pad(losses, epochs * steps).reshape(len(losses), epochs, steps)
    total = np.where(np.isnan(losses), 0, weights).sum(axis=-1)
    means = np.nansum(losses * weights, axis=-1) / np.maximum(total, 1)
    return np.where(total > 0, means, np.nan)


def _scaling(member: Any) -> Scaling:
    return member.scaling
