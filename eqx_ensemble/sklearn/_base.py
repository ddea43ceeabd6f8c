import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import ArrayLike

from .._build import build
from .._caller import caller
from .._check import check_word, missing_extra_message
from .._ensemble import Ensemble
from .._keys import own_key
from .._predict import predict
from .._warnings import warn
from ..resample import bootstrap, held_out_mean, out_of_bag
from ..train import DivergedError, Status, Validation
from ..train._fit import fit
from ._member import ACTIVATIONS, AbstractHead, Member, Network, Scaler, loss, predict_standardised

try:
    from sklearn.base import BaseEstimator
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:  # or older than 1.6
    raise ImportError(missing_extra_message("sklearn", "scikit-learn", "sklearn")) from error


class RowSplit(NamedTuple):
    """The rows that members are trained on, those for validation, and the weights of all, of mean one in training."""

    rows: np.ndarray
    held_out: np.ndarray | None
    weights: np.ndarray
    seed: int


@dataclasses.dataclass(eq=False, repr=False)
class AbstractEstimator(BaseEstimator):
    """What both estimators have: parameters, fitted attributes, training and prediction."""

    make: Callable[..., Any] | None = None
    _: dataclasses.KW_ONLY
    num_members: int = 5
    hidden_layer_sizes: Sequence[int] = (64, 64)
    activation: str = "relu"
    standardise: bool = True
    optimiser: Any = None
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    batch_size: int = 32
    max_iter: int = 200
    early_stopping: bool = True
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    tol: float = 0.0
    bootstrap: bool = False
    random_state: Any = None
    verbose: bool | int = False

    ensemble_: Ensemble[Member] = dataclasses.field(init=False)
    rows_: np.ndarray | None = dataclasses.field(init=False)
    input_scaler_: StandardScaler = dataclasses.field(init=False)
    n_iter_: int = dataclasses.field(init=False)
    loss_curve_: np.ndarray = dataclasses.field(init=False)
    validation_loss_curve_: np.ndarray | None = dataclasses.field(init=False)
    oob_score_: float = dataclasses.field(init=False)

    def _split(self, x: np.ndarray, sample_weight: Any, *, strata: np.ndarray | None = None) -> RowSplit:
        """Chooses the validation rows, and fits the scaler of features.

        Only ratios of weights matter. A row of weight zero is absent, also from batches.
        """
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        weights = _check_sample_weight(sample_weight, x, dtype=np.float64)
        if (weights < 0).any() or not (weights > 0).any():
            raise ValueError(
                f"`{caller()}` needs `sample_weight` that is not negative, and nonzero for a row; got "
                f"{weights.min():g} to {weights.max():g}."
            )
        rows: Any = np.flatnonzero(weights)
        held_out: Any = None
        if self.early_stopping:
            count = int(np.ceil(self.validation_fraction * len(rows)))
            if strata is not None:  # if each has enough rows
                strata, sizes = strata[rows], np.unique(strata[rows], return_counts=True)[1]
                strata = strata if sizes.min() > 1 and len(sizes) <= min(count, len(rows) - count) else None
            rows, held_out = train_test_split(rows, test_size=count, random_state=seed, stratify=strata)
        weights = weights / weights.max()  # the mean of large weights may overflow
        weights = weights / weights[rows].mean()
        self.input_scaler_ = self._fit_scaler(x[rows], weights[rows])
        return RowSplit(rows, held_out, weights, seed)

    def _fit_scaler(self, values: np.ndarray, weights: np.ndarray) -> StandardScaler:
        """Means and standard deviations of the columns, in 64 bits; 0 and 1 without `standardise`."""
        scaler: Any = StandardScaler().fit(_columns(values), sample_weight=weights)
        if not self.standardise:
            scaler.mean_, scaler.scale_ = np.zeros_like(scaler.mean_), np.ones_like(scaler.scale_)
        return scaler

    def _train(self, x: np.ndarray, y: np.ndarray, split: RowSplit, head: AbstractHead) -> None:
        """Trains the members, for targets that are standardised, or indices of classes."""
        key, x = own_key(split.seed), scale(self.input_scaler_, x)
        some = lambda rows: (x[rows], y[rows], split.weights[rows].astype(x.dtype))
        make = functools.partial(Member, self._make_network(), device_scaler(self.input_scaler_, x.shape[1:]), head)
        ensemble = build(
            lambda key: make(key=key), self.num_members, shared=lambda member: (member.inputs, member.head), key=key
        )
        drawn = np.asarray(bootstrap(len(split.rows), self.num_members, key=key)) if self.bootstrap else None
        optimiser, hyper = self._make_optimiser()
        validation = None if split.held_out is None else Validation(some(split.held_out), min_delta=self.tol)
        batch_size = min(self.batch_size, len(split.rows))
        run = fit(
            ensemble, loss, optimiser, some(split.rows), epochs=self.max_iter, batch_size=batch_size,
            validation=validation, patience=None if validation is None else self.n_iter_no_change, hyper=hyper,
            rows=drawn, history="epochs", progress=bool(self.verbose), key=key,
        )  # fmt: skip
        healthy = run.status != Status.DIVERGED
        if not healthy.any():
            raise DivergedError(
                f"`{caller()}`: all members diverged. Lower `learning_rate`, or look for extreme values in the data.",
                run,
            )
        self.ensemble_ = run.ensemble[healthy]
        self.rows_ = None if drawn is None else split.rows[drawn[healthy]]
        steps = -(-len(split.rows) // batch_size)
        self.n_iter_ = int(-(-np.max(run.train_state.step) // steps))
        # A long epoch has several losses.
        losses = run.history.loss[healthy].reshape(healthy.sum(), -(-run.history.step[-1] // steps), -1).mean(axis=2)
        curve = lambda values: np.nanmean(values[:, : self.n_iter_], axis=0)
        self.loss_curve_ = curve(losses)
        held_out_loss = run.history.validation
        self.validation_loss_curve_ = None if held_out_loss is None else curve(held_out_loss[healthy])

    def _make_network(self) -> Callable[..., Any]:
        """The constructor of a network: the user's, or that of the default one."""
        if self.make is not None:
            return self.make
        check_word(self.activation, "activation", tuple(ACTIVATIONS))
        sizes = tuple(map(int, self.hidden_layer_sizes))
        return functools.partial(Network, hidden_layer_sizes=sizes, activation=self.activation)

    def _make_optimiser(self) -> tuple[Any, Any]:
        """The optimiser, and the hyperparameters of all members, which are traced: a grid of them compiles once."""
        if isinstance(self.optimiser, optax.GradientTransformation):
            return self.optimiser, None
        numbers = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        hyper = {name: jnp.full(self.num_members, value, float) for name, value in numbers.items()}
        return _optimiser_of_hyper(self.optimiser), hyper

    def _predict(self, X: Any, combine: Callable[..., Any] | None = None) -> Any:
        """The combination of the members' predictions of standardised targets, or of logits."""
        check_is_fitted(self)
        rows: Any = validate_data(self, X, reset=False, dtype=np.float64)
        x = scale(self.input_scaler_, rows)
        return predict(self.ensemble_, x, fn=predict_standardised, combine=combine, progress=False)

    def _predict_out_of_bag(self, predictions: Any, split: RowSplit) -> tuple[np.ndarray, Any]:
        """The mean over the members that did not draw a row, NaN if there is none, and which rows have one."""
        assert self.rows_ is not None
        found = np.array(held_out_mean(predictions, out_of_bag(self.rows_, predictions.shape[1])).mean)
        found[np.setdiff1d(np.arange(len(found)), split.rows)] = np.nan
        known = ~np.isnan(_columns(found)).any(axis=1)
        if not known.any():
            warn("No row is out of bag for any member: `oob_score_` is NaN. Use more members or rows.")
        return found, known


@functools.cache  # equal functions share compiled programs
def _optimiser_of_hyper(make: Callable[..., Any] | None) -> Callable[[Any], optax.GradientTransformation]:
    if make is None:
        return lambda hyper: optax.adamw(hyper["learning_rate"], weight_decay=hyper["weight_decay"])
    return lambda hyper: make(hyper["learning_rate"])


def scale(scaler: StandardScaler, values: np.ndarray) -> np.ndarray:
    """Standardises in 64 bits, then casts to the dtype of the members."""
    scaled = np.asarray(scaler.transform(_columns(values))).reshape(values.shape)
    return scaled.astype(jax.dtypes.canonicalize_dtype(float))


def unscale(scaler: StandardScaler, values: ArrayLike) -> np.ndarray:
    """The inverse of `scale`, in 64 bits: the dtype of the members may lack the precision for a large offset."""
    exact = np.asarray(values, np.float64)
    return np.asarray(scaler.inverse_transform(_columns(exact))).reshape(exact.shape)


def device_scaler(scaler: Any, shape: tuple[int, ...]) -> Scaler:
    """The same standardisation as a Module, for members that are called directly."""
    return Scaler(jnp.asarray(scaler.mean_.reshape(shape), float), jnp.asarray(scaler.scale_.reshape(shape), float))


def _columns(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1)
