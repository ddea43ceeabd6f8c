"""Tables and their rows: encoding, scaling, and which rows train, select and calibrate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.validation import check_X_y, validate_data

from .._caller import caller
from .._marks import Each
from .._warnings import warn
from ..resample import Folds, from_splits
from ._member import Scaler

LARGE = 2000  # rows: from so many, one part of them selects members, else five folds
_FOLDS, _FRACTION = 5, 0.15
_CATEGORIES = 64  # of a column; rarer ones are one


class RowSplit(NamedTuple):
    """The rows to train and select members, their folds, and the rows to calibrate; `None` for none.

    The weights of all rows have mean one in training.
    """

    rows: np.ndarray
    features: np.ndarray  # of `rows`, encoded and scaled
    folds: Folds | None
    calibration: np.ndarray | None
    weights: np.ndarray
    seed: int


def take_rows(table: Any, rows: np.ndarray) -> Any:
    """Some rows of a data frame or an array."""
    return table.iloc[rows] if hasattr(table, "columns") else table[rows]


def hold_out(rows: np.ndarray, count: int, strata: np.ndarray | None, seed: int) -> tuple[Any, Any]:
    """The rows without so many that are held out, and these; of classes as many as there are, if each has enough."""
    if strata is not None:
        strata, sizes = strata[rows], np.unique(strata[rows], return_counts=True)[1]
        strata = strata if sizes.min() > 1 and len(sizes) <= min(count, len(rows) - count) else None
    kept, held_out = train_test_split(rows, test_size=count, random_state=seed, stratify=strata)
    return kept, held_out


def encoder_of(table: Any) -> ColumnTransformer:
    """Numbers with medians for missing ones and a mark for each column that misses some; a column per category."""
    numbers: Any = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    if not hasattr(table, "columns"):
        return ColumnTransformer([("numbers", numbers, list(range(table.shape[1])))])
    kinds = {name: table[name].dtype.kind for name in table.columns}
    if times := [name for name, kind in kinds.items() if kind in "mM"]:
        raise TypeError(
            f"`{caller()}` takes columns of numbers and of categories; {times} hold times.\n"
            "Make numbers of them, such as `X['date'].dt.dayofyear`."
        )
    names = [name for name, kind in kinds.items() if kind in "biuf"]
    others = [name for name in kinds if name not in names]
    if many := {name: count for name in others if (count := table[name].nunique()) > _CATEGORIES}:
        warn(
            f"`{caller()}` got many categories in columns, {many}: all but the {_CATEGORIES - 1} most frequent ones "
            "share one column.\nAre they numbers, dates, or names of rows?"
        )
    categories = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=_CATEGORIES, sparse_output=False)
    return ColumnTransformer([("numbers", numbers, names), ("categories", categories, others)])


def take_table(estimator: Any, X: Any, y: Any = "no_validation", *, reset: bool = True, **options: Any) -> Any:
    """The table, and the targets if there are any, checked: a data frame as it is, else an array of numbers."""
    if not hasattr(X, "columns"):
        how: Any = {"dtype": np.float64, "ensure_all_finite": "allow-nan", **options}
        return validate_data(estimator, X, y, reset=reset, **how)
    validate_data(estimator, X, reset=reset, skip_check_array=True)
    return X if isinstance(y, str) else (X, check_X_y(np.zeros((len(X), 1)), y, **options)[1])


def make_folds(num_rows: int, fraction: float | None, strata: np.ndarray | None, seed: int) -> Folds:
    """One split into rows to train and rows to stop and select by, or the folds of a cross-validation."""
    if num_rows < 2:
        raise ValueError(f"`{caller()}` needs 2 rows or more for `early_stopping`, got {num_rows} sample.")
    if num_rows >= LARGE or fraction is not None:
        count = int(np.ceil((_FRACTION if fraction is None else fraction) * num_rows))
        splits = [hold_out(np.arange(num_rows), count, strata, seed)]
    else:
        num_folds = min(_FOLDS, num_rows)
        kind = KFold if strata is None or np.bincount(strata).min() < num_folds else StratifiedKFold
        splits = kind(num_folds, shuffle=True, random_state=seed).split(np.zeros(num_rows), strata)
    return from_splits(splits, num_rows, uneven="trim")


def held_out_rows(data: Any, folds: Folds, draws: int) -> Any:
    """The rows by which each member is stopped; the weights of rows that fill up a short fold are zero."""
    if len(folds.test) == 1:
        return jax.tree.map(lambda x: x[folds.test[0]], data)
    x, (y, weights) = jax.tree.map(lambda x: jnp.asarray(x)[folds.test], data)
    of_folds = x, (y, weights * folds.valid.astype(weights.dtype))
    return Each(jax.tree.map(lambda x: jnp.tile(x, (draws, *[1] * (x.ndim - 1))), of_folds))


def fit_scaler(values: np.ndarray, weights: np.ndarray, *, standardise: bool) -> StandardScaler:
    """Means and standard deviations of the columns, in 64 bits; 0 and 1 without `standardise`."""
    scaler: Any = StandardScaler().fit(columns_of(values), sample_weight=weights)
    if not standardise:
        scaler.mean_, scaler.scale_ = np.zeros_like(scaler.mean_), np.ones_like(scaler.scale_)
    return scaler


def scale(scaler: StandardScaler, values: np.ndarray) -> np.ndarray:
    """Standardises in 64 bits, then casts to the dtype of the members."""
    scaled = np.asarray(scaler.transform(columns_of(values))).reshape(values.shape)
    return scaled.astype(jax.dtypes.canonicalize_dtype(float))


def unscale(scaler: Any, values: ArrayLike) -> np.ndarray:
    """The inverse of `scale`, in 64 bits: the dtype of the members may lack the precision for a large offset."""
    exact = np.asarray(values, np.float64)
    return (columns_of(exact) * scaler.scale_ + scaler.mean_).reshape(exact.shape)  # values may be infinite


def device_scaler(scaler: Any, shape: tuple[int, ...]) -> Scaler:
    """The same standardisation as a Module, for members that are called directly."""
    return Scaler(jnp.asarray(scaler.mean_.reshape(shape), float), jnp.asarray(scaler.scale_.reshape(shape), float))


def columns_of(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1)
