import importlib.util
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.preprocessing import StandardScaler

from .._check import check_version, is_key, missing_extra_message
from .._ensemble import Ensemble
from .._warnings import warn
from ._member import Member, MemberMaker

# The estimators inherit from scikit-learn's classes, so their import needs it.
if importlib.util.find_spec("sklearn") is None:
    raise ImportError(missing_extra_message("sklearn", "scikit-learn", "sklearn"))
check_version("scikit-learn", (1, 6), what="sklearn", extra="sklearn")


class AbstractEstimator(BaseEstimator):
    """The base of the two estimators: fitted attributes, and how they are pickled.

    Functions such as `jax.nn.relu` cannot be pickled. Of an ensemble only the arrays are; `make` gives the rest again.
    """

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

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {**super().__getstate__()}  # pyright: ignore[reportGeneralTypeIssues]
        if "ensemble_" in state:
            tree = eqx.filter((state["ensemble_"].stacked, state.pop("state_")), eqx.is_array)
            state["ensemble_"] = [_plain(x) for x in jax.tree.leaves(tree)], state["ensemble_"].axes
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "ensemble_" in state:
            arrays, axes = state["ensemble_"]
            made = eqx.filter_eval_shape(state["_maker"], jax.random.key(0))
            like = made if isinstance(made, tuple) else (made, None)
            shapes, rest = eqx.partition(like, lambda x: isinstance(x, jax.ShapeDtypeStruct))
            leaves = jax.tree.unflatten(jax.tree.structure(shapes), map(_array, arrays))
            stacked, state["state_"] = eqx.combine(leaves, rest)
            state["ensemble_"] = Ensemble(stacked, axes)
        super().__setstate__(state)


def _plain(x: Any) -> Any:
    """A NumPy array; for keys, their data with the name of the generator."""
    return (str(jax.random.key_impl(x)), np.asarray(jax.random.key_data(x))) if is_key(x) else np.asarray(x)


def _array(x: Any) -> Any:
    return jax.random.wrap_key_data(x[1], impl=x[0]) if isinstance(x, tuple) else jnp.asarray(x)


def has_bag(prediction: np.ndarray) -> np.ndarray:
    """Which rows have an out-of-bag prediction. Warns if there are none."""
    found = np.asarray(~np.isnan(prediction.reshape(len(prediction), -1)).any(axis=1))
    if not found.any():
        warn("No row is out of bag for any member: `oob_score_` is NaN. Use more members or rows.")
    return found
