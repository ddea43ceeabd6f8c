from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted, validate_data

from .._predict import predict
from ..resample import out_of_bag_mean
from ._base import AbstractEstimator
from ._data import scale
from ._member import call_network


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
