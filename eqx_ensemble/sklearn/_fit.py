import functools
from collections.abc import Callable
from typing import Any

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
from .._check import check_word
from .._ensemble import take
from .._predict import predict
from ..resample import bootstrap, out_of_bag_mean
from ..train import DivergedError, Status, Validation
from ..train._fit import fit
from ._base import AbstractEstimator
from ._member import (
    ACTIVATIONS,
    AbstractHead,
    MemberMaker,
    Network,
    OptimiserOfRate,
    Scaler,
    Scaling,
    call_network,
    default_optimiser,
    loss,
    stateful_loss,
)


def fit_members(estimator: Any, x: np.ndarray, y: np.ndarray, sample_weight: Any, *, head: AbstractHead) -> np.ndarray:
    """Trains the members, and sets the fitted attributes that both estimators have.

    **Returns:** the rows that members were trained on or could draw: those of nonzero weight, without the validation
    rows.
    """
    seed = int(check_random_state(estimator.random_state).randint(np.iinfo(np.int32).max))
    key = jax.random.key(seed)
    weights = check_weights(sample_weight, x)
    rows, held_out = np.flatnonzero(weights), None  # a row of weight zero is treated as absent, also in batches
    if estimator.early_stopping:
        classes = y if np.issubdtype(y.dtype, np.integer) else None
        rows, held_out = split_rows(rows, estimator.validation_fraction, strata=classes, seed=seed)
    estimator.input_scaler_ = fit_scaler(x[rows], weights[rows], standardise=estimator.standardise)
    inputs, targets = device_scaler(estimator.input_scaler_, x.shape[1:]), None
    if not np.issubdtype(y.dtype, np.integer):
        estimator.target_scaler_ = fit_scaler(y[rows], weights[rows], standardise=estimator.standardise)
        targets = device_scaler(estimator.target_scaler_, y.shape[1:])
        y = scale(estimator.target_scaler_, y)
    x = scale(estimator.input_scaler_, x)
    weights = weights / weights[rows].mean()
    some = lambda own: (x[own], y[own] if targets else y[own].astype(np.int32), weights[own].astype(x.dtype))
    estimator._maker = MemberMaker(maker_of(estimator), x.shape[1], head, Scaling(inputs, targets))
    made = build(estimator._maker, estimator.num_members, shared=lambda member: member.scaling, key=key)
    ensemble, state = made if isinstance(made, tuple) else (made, None)
    drawn = np.asarray(bootstrap(len(rows), estimator.num_members, key=key)) if estimator.bootstrap else None
    optimiser, hyper = optimiser_of(estimator)
    options: dict[str, Any] = {}
    if held_out is not None:
        options["validation"] = Validation(some(held_out), min_delta=estimator.tol)
        options["patience"] = estimator.n_iter_no_change
    run = fit(
        ensemble, loss if state is None else stateful_loss, optimiser, some(rows), epochs=estimator.max_iter,
        batch_size=min(estimator.batch_size, len(rows)), state=state, hyper=hyper, rows=drawn, history="epochs",
        progress=bool(estimator.verbose), key=key, **options,
    )  # fmt: skip
    healthy = run.status != Status.DIVERGED
    if not healthy.any():
        raise DivergedError(
            f"`{caller()}`: all members diverged. Lower `learning_rate`, or look for extreme values in the data.", run
        )
    estimator.ensemble_, estimator.state_ = take((run.ensemble, run.state), healthy)
    estimator.rows_ = None if drawn is None else rows[drawn[healthy]]
    steps = -(-len(rows) // min(estimator.batch_size, len(rows)))
    epochs = -(-run.history.step[-1] // steps)
    estimator.n_iter_ = int(-(-np.max(run.train_state.step) // steps))
    # A long epoch has several losses.
    losses = run.history.loss[healthy].reshape(healthy.sum(), epochs, -1).mean(axis=2)
    curve = lambda values: np.nanmean(values[:, : estimator.n_iter_], axis=0)
    estimator.loss_curve_ = curve(losses)
    estimator.validation_loss_curve_ = (
        None if run.history.validation is None else curve(run.history.validation[healthy])
    )
    return rows


def check_weights(sample_weight: Any, x: np.ndarray) -> np.ndarray:
    """The weights of all rows, of which only ratios matter; raises if some are negative, or all are zero."""
    weights = _check_sample_weight(sample_weight, x, dtype=np.float64)
    if (weights < 0).any() or not (weights > 0).any():
        raise ValueError(
            f"`{caller()}` needs `sample_weight` that is not negative, and nonzero for a row; got {weights.min():g} to "
            f"{weights.max():g}."
        )
    return np.ldexp(weights, -np.frexp(weights.max())[1])  # by a power of two, which rounds nothing


def split_rows(
    rows: np.ndarray, fraction: float, *, strata: np.ndarray | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows into training and validation rows, stratified by `strata` if each stratum has enough rows."""
    count = int(np.ceil(fraction * len(rows)))
    if strata is not None:
        strata = strata[rows]
        sizes = np.unique(strata, return_counts=True)[1]
        strata = strata if sizes.min() > 1 and len(sizes) <= min(count, len(rows) - count) else None
    train, held_out = train_test_split(rows, test_size=count, random_state=seed, stratify=strata)
    return np.asarray(train), np.asarray(held_out)


def maker_of(estimator: Any) -> Callable[..., Any]:
    """The constructor of a network: the user's, or that of the default one."""
    if estimator.make is not None:
        return estimator.make
    check_word(estimator.activation, "activation", tuple(ACTIVATIONS))
    sizes = tuple(map(int, estimator.hidden_layer_sizes))
    return functools.partial(Network, hidden_layer_sizes=sizes, activation=estimator.activation)


def optimiser_of(estimator: Any) -> tuple[Any, Any]:
    """The optimiser, and the hyper-parameters of all members."""
    optimiser = estimator.optimiser
    if isinstance(optimiser, optax.GradientTransformation):
        return optimiser, None
    numbers = {"learning_rate": estimator.learning_rate, "weight_decay": estimator.weight_decay}
    dtype = jax.dtypes.canonicalize_dtype(float)
    hyper = {name: jnp.full(estimator.num_members, value, dtype) for name, value in numbers.items()}
    return default_optimiser if optimiser is None else OptimiserOfRate(optimiser), hyper


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
    return Scaler(*(jnp.asarray(np.reshape(part, shape), dtype) for part in (mean, scale)))


def _columns(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1)


def validate_and_predict(estimator: AbstractEstimator, X: Any, combine: Callable[..., Any]) -> Any:
    """The combination of the members' predictions of standardised targets, or of logits."""
    check_is_fitted(estimator)
    rows: Any = validate_data(estimator, X, reset=False, dtype=np.float64)
    return predict_rows(estimator, rows, combine)


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
