import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import combine, sweep
from .._build import build
from .._caller import caller
from .._check import check_word, missing_extra_message
from .._ensemble import Ensemble
from .._keys import own_key
from .._predict import predict
from .._progress import shown_line
from .._warnings import warn
from ..resample import Folds, bootstrap, held_out_mean, out_of_bag
from ..train import DivergedError, Status, Stopping, TrainState, Validation, every
from ..train._fit import fit
from ..train._run import Run, best_of
from ._member import (
    ACTIVATIONS,
    NUM_BLOCKS,
    AbstractHead,
    Member,
    Network,
    TableNetwork,
    average,
    loss,
    predict_standardised,
    score,
    score_of_average,
)

try:
    from sklearn.base import BaseEstimator
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted

    from ._rows import (
        LARGE,
        RowSplit,
        columns_of,
        device_scaler,
        encoder_of,
        fit_scaler,
        held_out_rows,
        hold_out,
        make_folds,
        scale,
        take_rows,
        take_table,
    )
except ImportError as error:  # or older than 1.6
    raise ImportError(missing_extra_message("sklearn", "scikit-learn", "sklearn")) from error


_MEMBERS, _WIDTHS = (8, 32), (64, 128)  # draws and widths for few rows, and for many
_STEPS, _EPOCHS = 3000, (8, 200)  # about so many steps, within so many epochs
_RANGES = {"learning_rate": sweep.LogUniform(3e-4, 5e-3), "weight_decay": sweep.LogUniform(1e-4, 1e-1)}
_SHAPES = {
    "depth": sweep.Choice([*range(NUM_BLOCKS + 1)]),
    "scale": sweep.LogUniform(0.01, 10.0),
    "dropout": sweep.Uniform(0.0, 0.3),
    "has_dropout": sweep.Choice([0.0, 1.0]),
}
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

    def _encode(self, table: Any) -> np.ndarray:
        """Numbers first, missing ones replaced by medians and marked, then a column for each category; scaled."""
        return scale(self.input_scaler_, np.asarray(self.encoder_.transform(table), np.float64))

    def _split(self, table: Any, sample_weight: Any, *, strata: np.ndarray | None = None) -> RowSplit:
        """Chooses the rows, and fits the encoder and the scaler of features to those to train by.

        Only ratios of weights matter. A row of weight zero is absent, also from batches.
        """
        self._check_parameters()
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
                rows, calibration = hold_out(rows, count, strata, seed)
            folds = make_folds(len(rows), self.validation_fraction, None if strata is None else strata[rows], seed)
        weights = weights / weights.max()  # the mean of large weights may overflow
        weights = weights / weights[rows].mean()
        known = take_rows(table, rows)
        self.encoder_ = encoder_of(table)
        encoded = np.asarray(self.encoder_.fit_transform(known), np.float64)
        self.input_scaler_ = fit_scaler(encoded, weights[rows], standardise=self.standardise)
        return RowSplit(rows, scale(self.input_scaler_, encoded), folds, calibration, weights, seed)

    def _check_parameters(self) -> None:
        """Raises for parameters of which one would be ignored, and for those that are no functions."""
        is_whole = isinstance(self.optimiser, optax.GradientTransformation)
        for name, of, ignores in (
            ("hidden_layer_sizes", "make", self.make is not None),
            ("weight_decay", "optimiser", self.optimiser is not None),
            ("learning_rate", "optimiser", is_whole),
        ):
            if ignores and getattr(self, name) is not None:
                raise TypeError(f"`{caller()}` cannot use `{name}` with this `{of}`: leave one of them out.")
        for name, what in (("make", "a function"), ("optimiser", "an optax optimiser, or a function that makes one")):
            own = getattr(self, name)
            if not (own is None or callable(own) or (name == "optimiser" and is_whole)):
                raise TypeError(f"`{caller()}` needs `{name}` to be {what}; got {own!r}.")

    def _train(self, y: np.ndarray, split: RowSplit, head: AbstractHead) -> None:
        """Trains and selects the members, for targets that are standardised, or indices of classes."""
        key, rows, folds, x = own_key(split.seed), split.rows, split.folds, split.features
        data = x, (y[rows], split.weights[rows].astype(x.dtype))
        is_large, num_folds = len(rows) >= LARGE, 1 if folds is None else len(folds.train)
        draws = _MEMBERS[is_large] if self.num_members is None else self.num_members
        num_members = draws * num_folds  # that of draw i in fold j is the member i * num_folds + j
        trained = np.arange(len(rows))[None] if folds is None else np.asarray(folds.train)
        num_rows = trained.shape[1]
        batch_size, steps, epochs = _sizes(num_rows, self.batch_size, self.max_iter)
        of_draws = lambda values: jax.tree.map(lambda x: jnp.repeat(x, num_folds), values)
        make, shapes = self._make_network(_WIDTHS[is_large], draws, key)
        scaler = device_scaler(self.input_scaler_, x.shape[1:])
        ensemble = build(
            lambda key, **own: Member(make, scaler, head, key=key, **own), num_members, zip=of_draws(shapes),
            shared=lambda member: (member.inputs, member.head), mesh=self.mesh, key=key,
        )  # fmt: skip
        train_data, own_rows = jax.tree.map(lambda x: x[trained[0]], data), None
        if num_folds > 1 or self.bootstrap:  # members differ in their rows
            train_data, own_rows = data, np.tile(trained, (draws, 1))
        if self.bootstrap:
            drawn = np.asarray(bootstrap(num_rows, num_members, key=key))
            own_rows = np.take_along_axis(np.tile(trained, (draws, 1)), drawn, axis=1)
        optimiser, hyper = self._make_optimiser(epochs * steps, draws, key)
        validation = callbacks = select = None
        # Of few rows, against overfitting, the best quarter is selected first.
        num_initial = 1 if is_large else max(draws // 4, 1)
        if folds is not None:
            select = _selection(data, folds, head, num_initial)
            validation = Validation(held_out_rows(data, folds, draws), score=score, mode="min", min_delta=self.tol)
            look = every(max(epochs // _LOOKS, 1), partial(_show_ensemble, select), at_end=False)
            callbacks = look if self.verbose else None
        run = fit(
            ensemble, loss, optimiser, train_data, rows=own_rows, epochs=epochs, batch_size=batch_size,
            validation=validation, patience=None if validation is None else self.n_iter_no_change,
            hyper=of_draws(hyper), history="epochs", mesh=self.mesh,
            stop=None if self.time_limit is None else Stopping(seconds=self.time_limit),
            callbacks=callbacks, progress=bool(self.verbose), key=key,
        )  # fmt: skip
        if run.interrupted:
            warn(f"`{caller()}` was interrupted: what there was is selected and calibrated.")
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
        own = {**(hyper or {}), **shapes}
        self.hyper_ = {name: np.asarray(values)[self.draws_] for name, values in own.items()}
        self.rows_ = rows[own_rows[members]] if self.bootstrap and own_rows is not None else None
        self.n_iter_, self.loss_curve_, self.validation_loss_curve_ = _curves(run, healthy, steps)

    def _make_network(self, width: int, num_members: int, key: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The constructor of a network, and what it takes for each member `(members,)`."""
        if self.make is not None:
            return self.make, {}
        check_word(self.activation, "activation", tuple(ACTIVATIONS))
        if self.hidden_layer_sizes is not None:
            sizes = tuple(map(int, np.atleast_1d(self.hidden_layer_sizes)))
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
        x = self._encode(take_table(self, X, reset=False))
        weights = None if combine is None else self.weights_
        options: dict[str, Any] = {"combine": combine, "weights": weights, "mesh": self.mesh, "progress": False}
        return predict(self.ensemble_, x, fn=predict_standardised, **options)

    def _predict_out_of_bag(self, predictions: Any, split: RowSplit) -> tuple[np.ndarray, Any]:
        """The mean over the members that did not draw a row, NaN if there is none, and which rows have one."""
        unseen = out_of_bag(self.rows_, predictions.shape[1])
        found = np.array(held_out_mean(predictions, unseen, weights=self.weights_).mean)
        trained = split.rows if split.folds is None else split.rows[np.asarray(split.folds.in_train).any(axis=0)]
        found[np.setdiff1d(np.arange(len(found)), trained)] = np.nan
        known = ~np.isnan(columns_of(found)).any(axis=1)
        if not known.any():
            warn("No row is out of bag for any member: `oob_score_` is NaN. Use more members or rows.")
        return found, known


def _sizes(num_rows: int, batch_size: int | None, max_iter: int | None) -> tuple[int, int, int]:
    """The rows of a batch, the steps of an epoch, and the most epochs."""
    wanted = 2 ** int(np.clip(np.log2(num_rows / 128), 5, 10)) if batch_size is None else batch_size
    size = min(wanted, num_rows)
    steps = -(-num_rows // size)
    return size, steps, int(np.clip(_STEPS // steps, *_EPOCHS)) if max_iter is None else max_iter


def _curves(run: Run[Any], healthy: np.ndarray, steps: int) -> tuple[int, np.ndarray, np.ndarray | None]:
    """The epochs, of so many steps, and the mean curves of the members that did not diverge, by epoch."""
    epochs = int(-(-np.max(run.train_state.step) // steps))
    # A long epoch has several losses.
    losses = run.history.loss[healthy].reshape(healthy.sum(), -(-run.history.step[-1] // steps), -1).mean(axis=2)
    curve = lambda values: np.nanmean(values[:, :epochs], axis=0)
    held_out = run.history.validation
    return epochs, curve(losses), None if held_out is None else curve(held_out[healthy])


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
