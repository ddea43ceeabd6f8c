import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import ArrayLike

from .. import combine, sweep
from .._build import build
from .._caller import caller
from .._check import check_word, missing_extra_message
from .._ensemble import Ensemble
from .._keys import own_key
from .._marks import Each
from .._predict import predict
from .._progress import shown_line
from .._warnings import warn
from ..resample import Folds, bootstrap, from_splits, held_out_mean, out_of_bag
from ..train import DivergedError, Status, Stopping, TrainState, Validation, every
from ..train._fit import fit
from ..train._run import best_of
from ._member import (
    ACTIVATIONS,
    NUM_BLOCKS,
    AbstractHead,
    Member,
    Network,
    Scaler,
    TableNetwork,
    average,
    loss,
    predict_standardised,
    score,
    score_of_average,
)

try:
    from sklearn.base import BaseEstimator
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.model_selection import KFold, StratifiedKFold, train_test_split
    from sklearn.preprocessing import OneHotEncoder, StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, check_X_y, validate_data
except ImportError as error:  # or older than 1.6
    raise ImportError(missing_extra_message("sklearn", "scikit-learn", "sklearn")) from error


class RowSplit(NamedTuple):
    """The rows to train and select members, their folds, and the rows to calibrate; `None` for none.

    The weights of all rows have mean one in training.
    """

    rows: np.ndarray
    folds: Folds | None
    calibration: np.ndarray | None
    weights: np.ndarray
    seed: int


_LARGE, _MEMBERS, _WIDTHS = 2000, (8, 32), (64, 128)  # draws and widths for fewer rows, and for more
_FOLDS, _FRACTION = 5, 0.15  # of fewer rows folds, of more a part, by which members are stopped and selected
_STEPS, _EPOCHS = 3000, (8, 200)  # about so many steps, within so many epochs
_RANGES = {"learning_rate": sweep.LogUniform(3e-4, 5e-3), "weight_decay": sweep.LogUniform(1e-4, 1e-1)}
_SHAPES = {
    "depth": sweep.Choice([*range(NUM_BLOCKS + 1)]),
    "scale": sweep.LogUniform(0.01, 10.0),
    "dropout": sweep.Uniform(0.0, 0.3),
    "has_dropout": sweep.Choice([0.0, 1.0]),
}
_CATEGORIES = 64  # of a column; rarer ones are one
_LOOKS = 20  # of a run, at most, at the ensemble so far


@dataclasses.dataclass(eq=False, repr=False)
class AbstractEstimator(BaseEstimator):
    """What both estimators have: parameters, fitted attributes, training and prediction."""

    make: Callable[..., Any] | None = None
    _: dataclasses.KW_ONLY
    num_members: int | None = None
    hidden_layer_sizes: Sequence[int] | None = None
    activation: str = "relu"
    standardise: bool = True
    optimiser: Any = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    batch_size: int | None = None
    max_iter: int | None = None
    time_limit: float | None = None
    early_stopping: bool = True
    validation_fraction: float | None = None
    n_iter_no_change: int = 16
    tol: float = 0.0
    select: bool = True
    calibration_fraction: float = 0.1
    bootstrap: bool = False
    mesh: Any = None
    random_state: Any = None
    verbose: bool | int = False

    _least_calibration: ClassVar[int] = 20

    ensemble_: Ensemble[Member] = dataclasses.field(init=False)
    weights_: np.ndarray = dataclasses.field(init=False)
    draws_: np.ndarray = dataclasses.field(init=False)
    hyper_: dict[str, np.ndarray] = dataclasses.field(init=False)
    validation_score_: float | None = dataclasses.field(init=False)
    validation_scores_: np.ndarray | None = dataclasses.field(init=False)
    rows_: np.ndarray | None = dataclasses.field(init=False)
    encoder_: Any = dataclasses.field(init=False)
    input_scaler_: StandardScaler = dataclasses.field(init=False)
    n_iter_: int = dataclasses.field(init=False)
    loss_curve_: np.ndarray = dataclasses.field(init=False)
    validation_loss_curve_: np.ndarray | None = dataclasses.field(init=False)
    oob_score_: float = dataclasses.field(init=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.categorical = True
        return tags

    def _take_rows(self, X: Any, y: Any, **options: Any) -> tuple[Any, Any]:
        """The table and the targets to train by."""
        if not hasattr(X, "iloc"):
            x: Any
            x, y = validate_data(self, X, y, dtype=np.float64, ensure_all_finite="allow-nan", **options)
            return x, y
        validate_data(self, X, skip_check_array=True)
        _, y = check_X_y(np.zeros((len(X), 1)), y, **options)
        return X, y

    def _encode(self, table: Any) -> np.ndarray:
        """Numbers first, missing ones replaced by medians and marked, then a column for each category."""
        return np.asarray(self.encoder_.transform(table), np.float64)

    def _split(self, table: Any, sample_weight: Any, *, strata: np.ndarray | None = None) -> RowSplit:
        """Chooses the rows, and fits the encoder and the scaler of features to those to train by.

        Only ratios of weights matter. A row of weight zero is absent, also from batches.
        """
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        weights = _check_sample_weight(sample_weight, table, dtype=np.float64)
        if (weights < 0).any() or not (weights > 0).any():
            raise ValueError(
                f"`{caller()}` needs `sample_weight` that is not negative, and nonzero for a row; got "
                f"{weights.min():g} to {weights.max():g}."
            )
        rows: Any = np.flatnonzero(weights)
        folds = calibration = None
        if self.early_stopping:
            if (count := int(self.calibration_fraction * len(rows))) >= self._least_calibration:
                rows, calibration = _hold_out(rows, count, strata, seed)
            folds = self._make_folds(None if strata is None else strata[rows], len(rows), seed)
        weights = weights / weights.max()  # the mean of large weights may overflow
        weights = weights / weights[rows].mean()
        self.encoder_ = _encoder(table).fit(take_rows(table, rows))
        self.input_scaler_ = self._fit_scaler(self._encode(take_rows(table, rows)), weights[rows])
        return RowSplit(rows, folds, calibration, weights, seed)

    def _make_folds(self, strata: np.ndarray | None, num_rows: int, seed: int) -> Folds:
        """One split into rows to train and rows to stop and select by, or the folds of a cross-validation."""
        if num_rows >= _LARGE or self.validation_fraction is not None:
            fraction = _FRACTION if self.validation_fraction is None else self.validation_fraction
            splits = [_hold_out(np.arange(num_rows), int(np.ceil(fraction * num_rows)), strata, seed)]
        else:
            kind = KFold if strata is None or np.bincount(strata).min() < _FOLDS else StratifiedKFold
            splits = kind(_FOLDS, shuffle=True, random_state=seed).split(np.zeros(num_rows), strata)
        return from_splits(splits, num_rows, uneven="trim")

    def _fit_scaler(self, values: np.ndarray, weights: np.ndarray) -> StandardScaler:
        """Means and standard deviations of the columns, in 64 bits; 0 and 1 without `standardise`."""
        scaler: Any = StandardScaler().fit(_columns(values), sample_weight=weights)
        if not self.standardise:
            scaler.mean_, scaler.scale_ = np.zeros_like(scaler.mean_), np.ones_like(scaler.scale_)
        return scaler

    def _train(self, table: Any, y: np.ndarray, split: RowSplit, head: AbstractHead) -> None:
        """Trains and selects the members, for targets that are standardised, or indices of classes."""
        key, rows, folds = own_key(split.seed), split.rows, split.folds
        x = scale(self.input_scaler_, self._encode(take_rows(table, rows)))
        data = x, (y[rows], split.weights[rows].astype(x.dtype))
        is_large, num_folds = len(rows) >= _LARGE, 1 if folds is None else len(folds.train)
        draws = _MEMBERS[is_large] if self.num_members is None else self.num_members
        num_members = draws * num_folds  # that of draw i in fold j is the member i * num_folds + j
        trained = np.arange(len(rows))[None] if folds is None else np.asarray(folds.train)
        num_rows = trained.shape[1]
        wanted = 2 ** int(np.clip(np.log2(num_rows / 128), 5, 10)) if self.batch_size is None else self.batch_size
        batch_size = min(wanted, num_rows)
        steps = -(-num_rows // batch_size)
        epochs = int(np.clip(_STEPS // steps, *_EPOCHS)) if self.max_iter is None else self.max_iter
        of_draws = lambda values: jax.tree.map(lambda x: jnp.repeat(x, num_folds), values)
        make, shapes = self._make_network(_WIDTHS[is_large], draws, key)
        scaler = device_scaler(self.input_scaler_, x.shape[1:])
        ensemble = build(
            lambda key, **own: Member(make, scaler, head, key=key, **own), num_members, zip=of_draws(shapes),
            shared=lambda member: (member.inputs, member.head), mesh=self.mesh, key=key,
        )  # fmt: skip
        own_rows = np.tile(trained, (draws, 1))
        if self.bootstrap:
            own_rows = np.take_along_axis(own_rows, np.asarray(bootstrap(num_rows, num_members, key=key)), axis=1)
        has_own = num_folds > 1 or self.bootstrap
        optimiser, hyper = self._make_optimiser(epochs * steps, draws, key)
        validation = callbacks = select = None
        # Of few rows, against overfitting, the best quarter is selected first.
        num_initial = 1 if is_large else max(draws // 4, 1)
        if folds is not None:
            select = _selection(data, folds, head, num_initial)
            validation = Validation(_held_out(data, folds, draws), score=score, mode="min", min_delta=self.tol)
            look = every(max(epochs // _LOOKS, 1), partial(_show_ensemble, select), at_end=False)
            callbacks = look if self.verbose else None
        run = fit(
            ensemble, loss, optimiser, data if has_own else jax.tree.map(lambda x: x[trained[0]], data),
            rows=own_rows if has_own else None, epochs=epochs, batch_size=batch_size,
            validation=validation, patience=None if validation is None else self.n_iter_no_change,
            hyper=of_draws(hyper), history="epochs", mesh=self.mesh,
            stop=None if self.time_limit is None else Stopping(seconds=self.time_limit),
            callbacks=callbacks, progress=bool(self.verbose), key=key,
        )  # fmt: skip
        healthy = run.status != Status.DIVERGED
        if not healthy.any():
            raise DivergedError(
                f"`{caller()}`: all members diverged. Lower `learning_rate`, or look for extreme values in the data.",
                run,
            )
        weights = np.full(draws, 1 / draws)
        self.validation_score_ = self.validation_scores_ = None
        if select is not None:
            found, self.validation_scores_ = select(run.ensemble, healthy)
            self.validation_score_ = float(np.min(found.scores[num_initial - 1 :]))
            if self.select and np.isfinite(self.validation_score_):
                weights = np.asarray(found.weights)
        weights = np.repeat(weights / num_folds, num_folds) * healthy
        members = np.flatnonzero(weights)
        self.weights_, self.ensemble_ = weights[members] / weights.sum(), run.ensemble[members]
        self.draws_ = members // num_folds
        drawn = of_draws({**(hyper or {}), **shapes})
        self.hyper_ = {name: np.asarray(values)[members] for name, values in drawn.items()}
        self.rows_ = rows[own_rows[members]] if self.bootstrap else None
        self.n_iter_ = int(-(-np.max(run.train_state.step) // steps))
        # A long epoch has several losses.
        losses = run.history.loss[healthy].reshape(healthy.sum(), -(-run.history.step[-1] // steps), -1).mean(axis=2)
        curve = lambda values: np.nanmean(values[:, : self.n_iter_], axis=0)
        self.loss_curve_ = curve(losses)
        held_out_loss = run.history.validation
        self.validation_loss_curve_ = None if held_out_loss is None else curve(held_out_loss[healthy])

    def _make_network(self, width: int, num_members: int, key: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The constructor of a network, and what it takes for each member `(members,)`."""
        if self.make is not None:
            return self.make, {}
        check_word(self.activation, "activation", tuple(ACTIVATIONS))
        if self.hidden_layer_sizes is not None:
            sizes = tuple(map(int, self.hidden_layer_sizes))
            return partial(Network, hidden_layer_sizes=sizes, activation=self.activation), {}
        shapes = sweep.draw(_SHAPES, num_members, key=key)
        shapes["dropout"] = shapes["dropout"] * shapes.pop("has_dropout")
        num_numbers = self.encoder_.output_indices_["numbers"].stop
        return partial(TableNetwork, num_numbers=num_numbers, width=width, activation=self.activation), shapes

    def _make_optimiser(self, num_steps: int, num_members: int, key: Any) -> tuple[Any, Any]:
        """The optimiser, and the hyperparameters of all members, which are traced: a grid of them compiles once."""
        if isinstance(self.optimiser, optax.GradientTransformation):
            return self.optimiser, None
        given = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        fixed = {name: jnp.full(num_members, value, float) for name, value in given.items() if value is not None}
        return _optimiser_of_hyper(self.optimiser, num_steps), sweep.draw(_RANGES, num_members, key=key) | fixed

    def _predict(self, X: Any, combine: Callable[..., Any] | None = None) -> Any:
        """The combination of the members' predictions of standardised targets, or of logits."""
        check_is_fitted(self)
        is_frame = hasattr(X, "iloc")
        how: Any = {"skip_check_array": True} if is_frame else {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
        table = validate_data(self, X, reset=False, **how)
        x = scale(self.input_scaler_, self._encode(table))
        weights = None if combine is None else self.weights_
        options: dict[str, Any] = {"combine": combine, "weights": weights, "mesh": self.mesh, "progress": False}
        return predict(self.ensemble_, x, fn=predict_standardised, **options)

    def _predict_out_of_bag(self, predictions: Any, split: RowSplit) -> tuple[np.ndarray, Any]:
        """The mean over the members that did not draw a row, NaN if there is none, and which rows have one."""
        unseen = out_of_bag(self.rows_, predictions.shape[1])
        found = np.array(held_out_mean(predictions, unseen, weights=self.weights_).mean)
        trained = split.rows if split.folds is None else split.rows[np.asarray(split.folds.in_train).any(axis=0)]
        found[np.setdiff1d(np.arange(len(found)), trained)] = np.nan
        known = ~np.isnan(_columns(found)).any(axis=1)
        if not known.any():
            warn("No row is out of bag for any member: `oob_score_` is NaN. Use more members or rows.")
        return found, known


@functools.cache  # equal functions share compiled programs
def _optimiser_of_hyper(
    make: Callable[..., Any] | None, num_steps: int
) -> Callable[[Any], optax.GradientTransformation]:
    if make is not None:
        return lambda hyper: make(hyper["learning_rate"])

    def adamw(hyper: Any) -> optax.GradientTransformation:
        rate = optax.cosine_decay_schedule(hyper["learning_rate"], num_steps)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=hyper["weight_decay"]))

    return adamw


def _held_out(data: Any, folds: Folds, draws: int) -> Any:
    """The rows by which each member is stopped; the weights of rows that fill up a short fold are zero."""
    if len(folds.test) == 1:
        return jax.tree.map(lambda x: x[folds.test[0]], data)
    x, (y, weights) = jax.tree.map(lambda x: jnp.asarray(x)[folds.test], data)
    of_folds = x, (y, weights * folds.valid.astype(weights.dtype))
    return Each(jax.tree.map(lambda x: jnp.tile(x, (draws, *[1] * (x.ndim - 1))), of_folds))


def _selection(data: Any, folds: Folds, head: AbstractHead, num_initial: int) -> Callable[..., Any]:
    """Greedy selection of draws by predictions for held-out rows, with the score of each draw alone."""
    in_test = np.asarray(folds.in_test)
    held = np.flatnonzero(in_test.any(axis=0))
    fold, rows = in_test[:, held].argmax(axis=0), np.arange(len(held))
    x, targets = jax.tree.map(lambda x: x[held], data)
    score_of = lambda mean: score_of_average(head)(mean, targets)  # one function, which is compiled once

    def select(ensemble: Any, healthy: np.ndarray) -> tuple[combine.Greedy, np.ndarray]:
        predictions = predict(ensemble, x, fn=average, progress=False)
        of_folds = predictions.reshape(-1, len(in_test), *predictions.shape[1:])
        of_draws = jnp.stack([own[fold, rows] for own in of_folds])
        # A draw that diverged in a fold has no prediction there.
        of_draws = of_draws.at[~healthy.reshape(len(of_draws), -1).all(axis=1)].set(jnp.nan)
        found = combine.greedy(of_draws, score_of, num_steps=2 * len(of_draws), num_initial=num_initial)
        return found, np.asarray(jax.vmap(score_of)(of_draws))

    return select


def _show_ensemble(select: Callable[..., Any], state: TrainState) -> None:
    """Tells in the progress line how good the ensemble is so far."""
    if (line := shown_line()) is not None:
        found, _ = select(best_of(state)[0], np.ones(state.num_members, bool))
        line.note = f", ensemble {np.nanmin(found.scores):.4g}"


def take_rows(table: Any, rows: np.ndarray) -> Any:
    """Some rows of a data frame or an array."""
    return table.iloc[rows] if hasattr(table, "iloc") else table[rows]


def _hold_out(rows: np.ndarray, count: int, strata: np.ndarray | None, seed: int) -> tuple[Any, Any]:
    """The rows without so many that are held out, and these; of classes as many as there are, if each has enough."""
    if strata is not None:
        strata, sizes = strata[rows], np.unique(strata[rows], return_counts=True)[1]
        strata = strata if sizes.min() > 1 and len(sizes) <= min(count, len(rows) - count) else None
    kept, held_out = train_test_split(rows, test_size=count, random_state=seed, stratify=strata)
    return kept, held_out


def _encoder(table: Any) -> ColumnTransformer:
    """Numbers with medians for missing ones and a mark for each column that misses some; a column per category."""
    numbers: Any = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    if not hasattr(table, "iloc"):
        return ColumnTransformer([("numbers", numbers, list(range(table.shape[1])))])
    kinds = {name: table[name].dtype.kind for name in table.columns}
    if times := [name for name, kind in kinds.items() if kind in "mM"]:
        raise TypeError(
            f"`{caller()}` takes columns of numbers and of categories; {times} hold times.\n"
            "Make numbers of them, such as `X['date'].dt.dayofyear`."
        )
    names = [name for name, kind in kinds.items() if kind in "biuf"]
    others = [name for name in kinds if name not in names]
    categories = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=_CATEGORIES, sparse_output=False)
    return ColumnTransformer([("numbers", numbers, names), ("categories", categories, others)])


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
