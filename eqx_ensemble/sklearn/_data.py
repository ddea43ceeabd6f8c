from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, validate_data

from .._predict import predict
from ..resample import out_of_bag_mean
from ._base import AbstractEstimator
from ._check import check_validation_fraction
from ._heads import Scaler
from ._member import call_network


class Table(NamedTuple):
    """Rows to train on: features, targets (numbers, or indices of classes) and weights."""

    x: np.ndarray
    y: np.ndarray
    weights: np.ndarray

    def take(self, rows: np.ndarray) -> "Table":
        """Some of the rows."""
        return Table(*(part[rows] for part in self))


def split_rows(
    rows: np.ndarray, fraction: float, *, strata: np.ndarray | None, seed: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows into training and validation rows, stratified by `strata` if each stratum has enough rows."""
    count = check_validation_fraction(fraction, len(rows), name=name)
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
    return predict(
        estimator.ensemble_, scale(estimator.input_scaler_, x), fn=call_network, combine=combine,
        state=estimator.state_, progress=False,
    )  # fmt: skip


def predict_out_of_bag(predictions: Any, drawn: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The mean over the members that did not draw a row; NaN if all did, or if members could not draw it."""
    found = np.array(out_of_bag_mean(predictions, drawn).mean)
    found[~np.isin(np.arange(len(found)), rows)] = np.nan
    return found
