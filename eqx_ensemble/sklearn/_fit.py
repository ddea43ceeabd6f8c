import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import ArrayLike
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from .._build import build
from .._caller import caller
from .._combination import of_predictions
from .._ensemble import Ensemble, join, take
from .._predict import predict
from ..resample import bootstrap, out_of_bag_mean
from ..train import DivergedError, Status, Validation
from ..train._engine import fit
from ._base import AbstractEstimator
from ._check import check_outputs, check_sample_weight, check_validation_fraction
from ._member import (
    AbstractHead,
    MemberMaker,
    Network,
    Scaler,
    Scaling,
    call_network,
    default_optimiser,
    loss,
    optimiser_of_rate,
    stateful_loss,
)
from ._method import fit_method, predict_method


class Table(NamedTuple):
    """Rows to train on: features, targets (numbers, or indices of classes) and weights."""

    x: np.ndarray
    y: np.ndarray
    weights: np.ndarray

    def take(self, rows: np.ndarray) -> "Table":
        """Some of the rows."""
        return Table(*(part[rows] for part in self))


def split_rows(
    rows: np.ndarray, fraction: float, *, strata: np.ndarray | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows into training and validation rows, stratified by `strata` if each stratum has enough rows."""
    count = check_validation_fraction(fraction, len(rows))
    if strata is not None:
        sizes = np.unique(strata[rows], return_counts=True)[1]
        if sizes.min() < 2 or count < len(sizes) or len(rows) - count < len(sizes):
            strata = None
    stratify = None if strata is None else strata[rows]
    train, held_out = train_test_split(rows, test_size=count, random_state=seed, stratify=stratify)
    return np.asarray(train), np.asarray(held_out)


def fit_scaler(values: np.ndarray, weights: np.ndarray, *, standardise: bool) -> StandardScaler:
    """Means and standard deviations of the columns, in 64 bits."""
    scaler = StandardScaler(with_mean=standardise, with_std=standardise)
    return scaler.fit(_columns(values), sample_weight=weights)


def scale(scaler: StandardScaler, values: np.ndarray) -> np.ndarray:
    """Standardises in 64 bits, then casts to the dtype of the members."""
    scaled = np.asarray(scaler.transform(_columns(values))).reshape(values.shape)
    return scaled.astype(jax.dtypes.canonicalize_dtype(float))


def unscale(scaler: StandardScaler, values: ArrayLike) -> np.ndarray:
    """The inverse of `scale`, in 64 bits: the dtype of the members may lack the precision for a large offset."""
    exact = np.asarray(values, np.float64)
    return np.asarray(scaler.inverse_transform(_columns(exact))).reshape(exact.shape)


def widths(scaler: StandardScaler, values: ArrayLike) -> np.ndarray:
    """Converts standardised widths `(rows, ...)`, such as standard deviations, to the unit of the targets."""
    exact = np.asarray(values, np.float64)
    return exact if scaler.scale_ is None else (_columns(exact) * scaler.scale_).reshape(exact.shape)


def device_scaler(scaler: StandardScaler, shape: tuple[int, ...]) -> Scaler:
    """The same standardisation as a Module, for members that are called directly."""
    dtype = jax.dtypes.canonicalize_dtype(float)
    mean = np.zeros(shape) if scaler.mean_ is None else scaler.mean_
    scale = np.ones(shape) if scaler.scale_ is None else scaler.scale_
    return Scaler(*(jax.numpy.asarray(np.reshape(part, shape), dtype) for part in (mean, scale)))


def _columns(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1)


def validate_and_predict(estimator: AbstractEstimator, X: Any, combine: Callable[..., Any] | None = None) -> Any:
    """The members' predictions of standardised targets, or of logits, for rows of features, combined."""
    check_is_fitted(estimator)
    X = validate_data(estimator, X, reset=False, dtype=np.float64)
    return predict_rows(estimator, X, combine)


def predict_rows(estimator: AbstractEstimator, x: np.ndarray, combine: Callable[..., Any] | None = None) -> Any:
    """`validate_and_predict` for validated features."""
    if hasattr(estimator, "posterior_"):
        found = predict_method(estimator, scale(estimator.input_scaler_, x))
        return found if combine is None else of_predictions(combine)(found)
    return predict(
        estimator.ensemble_, scale(estimator.input_scaler_, x), fn=call_network, combine=combine,
        state=estimator.state_, progress=False,
    )  # fmt: skip


def predict_out_of_bag(predictions: Any, drawn: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The mean over the members that did not draw a row; NaN if all did, or if members could not draw it."""
    found = np.array(out_of_bag_mean(predictions, drawn).mean)
    found[~np.isin(np.arange(len(found)), rows)] = np.nan
    return found


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
        some = lambda part: None if part is None else part[kept]
        ensemble, state = take((self.ensemble, self.state), kept)
        return Members(ensemble, state, some(self.rows), self.losses[kept], some(self.validation))


def make_maker(estimator: AbstractEstimator, in_size: int, head: AbstractHead, scaling: Scaling) -> MemberMaker:
    """The constructor of a member: the user's, or that of the default network."""
    make = estimator.make
    if make is None:
        sizes = tuple(map(int, estimator.hidden_layer_sizes))
        make = functools.partial(Network, hidden_layer_sizes=sizes, activation=estimator.activation)
    return MemberMaker(make, in_size, head, scaling)


def build_members(maker: MemberMaker, ids: range, x: np.ndarray, *, key: jax.Array) -> tuple[Ensemble, Any]:
    """New members, and the state of their layers if they have one."""
    made = build(maker, ids=ids, shared=_scaling, key=key)
    ensemble, state = made if isinstance(made, tuple) else (made, None)
    check_outputs(ensemble, maker.head, x, state)
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
) -> Members:
    """The members after at most `max_iter` epochs, without those that diverged."""
    batch_size = min(estimator.batch_size, len(data.x))
    options: dict[str, Any] = {}
    if validation is not None:
        # Patience longer than the run would have no effect; the best weights are kept anyway.
        patience = estimator.n_iter_no_change if estimator.n_iter_no_change < estimator.max_iter else None
        options |= {"validation": Validation(tuple(validation), min_delta=estimator.tol), "patience": patience}
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
            f"`{caller()}`: all members diverged. Lower `learning_rate`, or look for extreme values in the data.", run
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
    ensemble, state = join([(part.ensemble, part.state) for part in (before, after)])
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


def is_warm(estimator: AbstractEstimator) -> bool:
    """Whether `fit` continues from an earlier one."""
    return estimator.warm_start and hasattr(estimator, "ensemble_")


def fit_members(
    estimator: AbstractEstimator, x: np.ndarray, y: np.ndarray, sample_weight: Any, *, head: AbstractHead
) -> np.ndarray:
    """Trains the members, and sets the fitted attributes that both estimators have.

    **Returns:** the rows that members were trained on or could draw: those of nonzero weight, without the validation
    rows.
    """
    vars(estimator).pop("posterior_", None)
    if estimator.method is not None:
        vars(estimator).pop("ensemble_", None)
    warm = is_warm(estimator)
    if not warm:
        estimator._seed = int(check_random_state(estimator.random_state).randint(np.iinfo(np.int32).max))
    classes = y if np.issubdtype(y.dtype, np.integer) else None
    weights = None if sample_weight is None else _check_sample_weight(sample_weight, x, dtype=np.float64)
    check_sample_weight(weights)
    # A row of weight zero is treated as absent, also in batches.
    rows = np.arange(len(x)) if weights is None else np.flatnonzero(weights > 0)
    held_out = None
    if estimator.early_stopping:
        rows, held_out = split_rows(rows, estimator.validation_fraction, strata=classes, seed=estimator._seed)
    weights = np.ones(len(x)) if weights is None else weights
    if warm:
        before = estimator._maker.head
        if head != before:
            raise ValueError(
                f"`{caller()}` with `warm_start=True` needs targets and `head` as in the previous fit: there the "
                f"outputs were {before.meaning}, now they are {head.meaning}.\nPass `warm_start=False`, or fit a new "
                "estimator."
            )
    else:
        _fit_scalers(estimator, Table(x, y, weights).take(rows), head)
    table = _standardise(estimator, Table(x, y, weights / weights[rows].mean()))
    if estimator.method is not None:
        pair = lambda own: (table.x[own], table.y[own])
        estimator.posterior_ = fit_method(estimator, pair(rows), None if held_out is None else pair(held_out))
        estimator._few_rows = pair(rows[:2])
        return rows
    members = _train(estimator, table, rows, held_out, warm=warm)
    _set_attributes(estimator, members)
    return rows


def _fit_scalers(estimator: AbstractEstimator, table: Table, head: AbstractHead) -> None:
    x, y, weights = table
    standardise = estimator.standardise
    estimator.input_scaler_ = fit_scaler(x, weights, standardise=standardise)
    inputs, targets = device_scaler(estimator.input_scaler_, x.shape[1:]), None
    if not np.issubdtype(y.dtype, np.integer):
        estimator.target_scaler_ = fit_scaler(y, weights, standardise=standardise)
        targets = device_scaler(estimator.target_scaler_, y.shape[1:])
    estimator._maker = make_maker(estimator, x.shape[1], head, Scaling(inputs, targets))


def _standardise(estimator: AbstractEstimator, table: Table) -> Table:
    x = scale(estimator.input_scaler_, table.x)
    scaler: StandardScaler | None = getattr(estimator, "target_scaler_", None)
    y = table.y.astype(np.int32) if scaler is None else scale(scaler, table.y)
    return Table(x, y, table.weights.astype(x.dtype))


def _train(
    estimator: AbstractEstimator, table: Table, rows: np.ndarray, held_out: np.ndarray | None, *, warm: bool
) -> Members:
    data, validation = table.take(rows), None if held_out is None else table.take(held_out)
    key = jax.random.key(estimator._seed)
    wanted, built = estimator.num_members, estimator._num_built if warm else 0
    if wanted < built:
        raise ValueError(
            f"`{caller()}` with `warm_start=True` needs `num_members` of at least {built}, as in the previous fit; "
            f"got {wanted}.\nSelect members from the fitted ensemble (`ensemble_[:{wanted}]`) instead."
        )

    def train(ensemble: Ensemble, state: Any, drawn: np.ndarray | None, key: jax.Array) -> Members:
        trained = train_members(estimator, ensemble, state, data, validation, rows=drawn, key=key)
        return trained if drawn is None else trained._replace(rows=rows[trained.rows])

    before = _members(estimator) if warm else None
    if before is not None and wanted == built:
        drawn = draw_rows(estimator, len(rows), np.asarray(before.ensemble.ids), key=key)
        if drawn is not None:
            if before.rows is None or not np.array_equal(rows[drawn], before.rows):
                raise ValueError(
                    f"`{caller()}` trains bagged members further, which needs their earlier bootstrap samples: the "
                    f"previous fit {'had none' if before.rows is None else 'drew other rows'}, so that rows which a "
                    "member has seen would count as out of bag.\nPass the same rows and `bootstrap` as in the "
                    "previous fit, or `warm_start=False`."
                )
        # Further epochs, with new row orders.
        key = jax.random.fold_in(key, before.losses.shape[1])
        return extend_curves(before, train(before.ensemble, before.state, drawn, key))
    ids = range(built, wanted)
    drawn = draw_rows(estimator, len(rows), np.asarray(ids), key=key)
    if before is not None and before.rows is not None and drawn is not None:
        if drawn.shape[1] != before.rows.shape[1]:
            raise ValueError(
                f"`{caller()}` adds members to bagged ones, which needs the same training rows: there were "
                f"{before.rows.shape[1]}, now there are {drawn.shape[1]}."
            )
    after = train(*build_members(estimator._maker, ids, data.x, key=key), drawn, key)
    return after if before is None else add_members(before, after)


def _members(estimator: AbstractEstimator) -> Members:
    fitted = estimator.ensemble_, estimator.state_, estimator.rows_
    return Members(*fitted, estimator._losses, estimator._validation)


def _set_attributes(estimator: AbstractEstimator, members: Members) -> None:
    estimator._num_built = estimator.num_members
    estimator.ensemble_, estimator.state_, estimator.rows_ = members[:3]
    estimator._losses, estimator._validation = members[3:]
    estimator.n_iter_ = members.losses.shape[1]
    estimator.loss_curve_ = np.nanmean(members.losses, axis=0)
    curves = members.validation
    estimator.validation_loss_curve_ = None if curves is None else np.nanmean(curves, axis=0)
