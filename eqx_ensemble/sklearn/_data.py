from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from ._check import check_validation_fraction
from ._heads import Scaler


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
