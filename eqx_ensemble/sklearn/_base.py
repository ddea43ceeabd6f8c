import functools
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.preprocessing import StandardScaler

from .._check import check_version, is_key, missing_extra_message
from .._ensemble import Ensemble
from .._load import evaluate_make
from .._version import __version__
from .._warnings import warn
from ._member import MakeNetwork, Member, MemberMaker


class Weights(NamedTuple):
    """The arrays of an ensemble, by path. The rest, including functions, is made again by the `MemberMaker`."""

    stacked: dict[str, Any]
    shared: dict[str, Any]
    state: dict[str, Any]
    ids: np.ndarray


def take_weights(ensemble: Ensemble, state: Any) -> Weights:
    """The part of an ensemble to pickle: functions such as `jax.nn.relu` cannot be pickled."""
    return Weights(_arrays(ensemble.arrays), _arrays(ensemble.shared), _arrays(state), np.asarray(ensemble.ids))


def restore_ensemble(maker: MemberMaker, weights: Weights) -> tuple[Ensemble, Any]:
    """The ensemble and its state, from the shapes of a member and the arrays."""
    made = evaluate_make(maker)
    member, state = made if isinstance(made, tuple) else (made, None)
    keyed, treedef = jtu.tree_flatten_with_path(member)
    stacked, shared = [], []
    for path, leaf in keyed:
        text = jtu.keystr(path)
        stacked.append(_array(weights.stacked.get(text)))
        is_array_like = is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
        shared.append(_array(weights.shared.get(text)) if is_array_like else leaf)
    if state is not None:
        keyed, structure = jtu.tree_flatten_with_path(state)
        state = jtu.tree_unflatten(structure, [_array(weights.state[jtu.keystr(path)]) for path, _ in keyed])
    own, common = (jtu.tree_unflatten(treedef, leaves) for leaves in (stacked, shared))
    return Ensemble(own, common, jnp.asarray(weights.ids)), state


def _arrays(tree: Any) -> dict[str, Any]:
    leaves = jtu.tree_leaves_with_path(eqx.filter(tree, is_array))
    return {jtu.keystr(path): _plain(leaf) for path, leaf in leaves}


def _plain(leaf: Any) -> Any:
    """A NumPy array; for keys, their data with the name of the generator."""
    return (str(jax.random.key_impl(leaf)), np.asarray(jax.random.key_data(leaf))) if is_key(leaf) else np.asarray(leaf)


def _array(value: Any) -> Any:
    if value is None:
        return None
    return jax.random.wrap_key_data(value[1], impl=value[0]) if isinstance(value, tuple) else jnp.asarray(value)


# The estimators inherit from scikit-learn's classes, so their import needs it.
if importlib.util.find_spec("sklearn") is None:
    raise ImportError(missing_extra_message("sklearn", "scikit-learn", "sklearn"))
check_version("scikit-learn", (1, 6), what="sklearn", extra="sklearn")


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
    method: Any

    posterior_: Any
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
    _method: Any
    _few_rows: tuple[np.ndarray, np.ndarray]

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {**super().__getstate__()}  # pyright: ignore[reportGeneralTypeIssues]
        if "ensemble_" in state:
            state["ensemble_"] = take_weights(state["ensemble_"], state.pop("state_"))
        if "posterior_" in state:
            state["posterior_"] = _bytes_of(state["posterior_"])
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
        if "posterior_" in state:
            load = functools.partial(state["_method"].load, make=state["_maker"].networks(), data=state["_few_rows"])
            state["posterior_"] = _load_bytes(state["posterior_"], load)
        super().__setstate__(state)


def _bytes_of(posterior: Any) -> bytes:
    """A saved posterior: functions that pickle cannot take are not part of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "posterior.eqx")
        posterior.save(path)
        return path.read_bytes()


def _load_bytes(data: bytes, load: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "posterior.eqx")
        path.write_bytes(data)
        return load(path)


def has_bag(prediction: np.ndarray) -> np.ndarray:
    """Which rows have an out-of-bag prediction. Warns if there are none."""
    found = np.asarray(~np.isnan(prediction.reshape(len(prediction), -1)).any(axis=1))
    if not found.any():
        warn("No row is out of bag for any member: `oob_score_` is NaN. Use more members or rows.")
    return found
