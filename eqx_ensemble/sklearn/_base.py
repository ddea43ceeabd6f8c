from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.preprocessing import StandardScaler

from .._ensemble import Ensemble
from .._version import __version__
from .._warnings import warn
from ._member import MakeNetwork, Member, MemberMaker
from ._pickling import restore_ensemble, take_weights

_VERSION = "_eqx_ensemble_version"


class AbstractEstimator(BaseEstimator):
    """The base of the two estimators: parameters, fitted attributes, pickling and copying."""

    make: MakeNetwork | None
    num_members: int
    hidden_layer_sizes: Sequence[int]
    activation: str
    standardise: bool
    optimiser: Any
    learning_rate: float
    weight_decay: float
    batch_size: int
    max_iter: int
    early_stopping: bool
    validation_fraction: float
    n_iter_no_change: int
    tol: float
    bootstrap: bool
    warm_start: bool
    random_state: Any
    verbose: bool | int

    ensemble_: Ensemble[Member]
    state_: Any
    rows_: np.ndarray | None
    input_scaler_: StandardScaler
    target_scaler_: StandardScaler  # of regressors
    n_iter_: int
    loss_curve_: np.ndarray
    validation_loss_curve_: np.ndarray | None
    oob_score_: float

    _maker: MemberMaker
    _seed: int
    _num_built: int
    _losses: np.ndarray
    _validation: np.ndarray | None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {**super().__getstate__()}  # pyright: ignore[reportGeneralTypeIssues]
        if "ensemble_" in state:
            state["ensemble_"] = take_weights(state["ensemble_"], state.pop("state_"))
        return state | {_VERSION: __version__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        version = state.pop(_VERSION, "an unknown version")
        if version != __version__:
            warn(
                f"`{type(self).__name__}` was pickled with eqx_ensemble {version}, and this is {__version__}: "
                "predictions may differ, or fail. Fit it again, or install that version."
            )
        if "ensemble_" in state:
            state["ensemble_"], state["state_"] = restore_ensemble(state["_maker"], state["ensemble_"])
        super().__setstate__(state)


def has_bag(prediction: np.ndarray) -> np.ndarray:
    """A mask of the rows with an out-of-bag prediction. Warns if there are none."""
    found = np.asarray(~np.isnan(prediction.reshape(len(prediction), -1)).any(axis=1))
    if not found.any():
        warn("No row is out of bag for any member: `oob_score_` is NaN. Use more members or rows.")
    return found
