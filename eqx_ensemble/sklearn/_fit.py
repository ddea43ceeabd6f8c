from typing import Any

import jax
import numpy as np
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight

from .._ensemble import Ensemble
from ._base import AbstractEstimator
from ._check import check_growth, check_same_draws, check_same_kind, check_same_rows, check_sample_weight
from ._data import Table, device_scaler, fit_scaler, scale, split_rows
from ._heads import AbstractHead
from ._member import Scaling
from ._train import Members, add_members, build_members, draw_rows, extend_curves, make_maker, train_members


def is_warm(estimator: AbstractEstimator) -> bool:
    """Whether `fit` continues from an earlier one."""
    return estimator.warm_start and hasattr(estimator, "ensemble_")


def fit_members(
    estimator: AbstractEstimator, x: np.ndarray, y: np.ndarray, sample_weight: Any, *, head: AbstractHead, name: str
) -> np.ndarray:
    """Trains the members, and sets the fitted attributes that both estimators have.

    **Returns:** the rows that members were trained on or could draw: those of nonzero weight, without the validation
    rows.
    """
    warm = is_warm(estimator)
    if not warm:
        estimator._seed = int(check_random_state(estimator.random_state).randint(np.iinfo(np.int32).max))
    classes = y if np.issubdtype(y.dtype, np.integer) else None
    weights = None if sample_weight is None else _check_sample_weight(sample_weight, x, dtype=np.float64)
    check_sample_weight(weights, name=name)
    # A row of weight zero is treated as absent, also in batches.
    rows = np.arange(len(x)) if weights is None else np.flatnonzero(weights > 0)
    held_out = None
    if estimator.early_stopping:
        rows, held_out = split_rows(
            rows, estimator.validation_fraction, strata=classes, seed=estimator._seed, name=name
        )
    weights = np.ones(len(x)) if weights is None else weights
    if warm:
        check_same_kind(head, estimator._maker.head, name=name)
    else:
        _fit_scalers(estimator, Table(x, y, weights).take(rows), head)
    table = _standardise(estimator, Table(x, y, weights / weights[rows].mean()))
    members = _train(estimator, table, rows, held_out, warm=warm, name=name)
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
    estimator: AbstractEstimator, table: Table, rows: np.ndarray, held_out: np.ndarray | None, *, warm: bool, name: str
) -> Members:
    data, validation = table.take(rows), None if held_out is None else table.take(held_out)
    key = jax.random.key(estimator._seed)
    wanted, built = estimator.num_members, estimator._num_built if warm else 0
    check_growth(wanted, built, name=name)

    def train(ensemble: Ensemble, state: Any, drawn: np.ndarray | None, key: jax.Array) -> Members:
        trained = train_members(estimator, ensemble, state, data, validation, rows=drawn, key=key, name=name)
        return trained if drawn is None else trained._replace(rows=rows[trained.rows])

    before = _members(estimator) if warm else None
    if before is not None and wanted == built:
        drawn = draw_rows(estimator, len(rows), np.asarray(before.ensemble.ids), key=key)
        if drawn is not None:
            check_same_draws(rows[drawn], before.rows, name=name)
        # Further epochs, with new row orders.
        key = jax.random.fold_in(key, before.losses.shape[1])
        return extend_curves(before, train(before.ensemble, before.state, drawn, key))
    ids = range(built, wanted)
    drawn = draw_rows(estimator, len(rows), np.asarray(ids), key=key)
    if before is not None and before.rows is not None and drawn is not None:
        check_same_rows(drawn.shape[1], before.rows, name=name)
    after = train(*build_members(estimator._maker, ids, data.x, key=key, name=name), drawn, key)
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
