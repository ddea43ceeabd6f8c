from ._base import AbstractEstimator, device_scaler, scale, take_rows, unscale  # the first: it says what to install

# isort: split
import dataclasses
from functools import partial
from typing import Any, Literal, overload

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, column_or_1d

from .. import combine, conformal, uncertainty
from .._check import check_word
from ._member import GaussianHead, PointHead


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class EnsembleRegressor(RegressorMixin, AbstractEstimator):
    """A scikit-learn regressor: a deep ensemble of any Equinox models.

    Members differ by their initialisation and row orders, and with `bootstrap` by their rows. They are trained in
    float32 (float64 if JAX has 64-bit types enabled) on standardised features and targets.

    **Arguments:**

    - `make`: makes the network of one member from `(in_size,)` to `(out_size,)`, as `make(in_size, out_size, key=key)`,
        such as `functools.partial(eqx.nn.MLP, width_size=32, depth=2)`: [your own
        network](../guide/estimators.md#your-own-network). By default a multilayer perceptron.
    - `num_members`: the number of members.
    - `head`: `"gaussian"`, mean and variance with the negative log likelihood, or `"point"`, a number with the squared
        error. `out_size` is twice the number of targets (means before raw variances), or the number of targets.
    - `hidden_layer_sizes`, `activation`: of the default network: the widths of its hidden layers, and `"relu"`,
        `"gelu"`, `"silu"`, `"tanh"`, `"logistic"` or `"identity"`.
    - `standardise`: whether to standardise features and targets.
    - `optimiser`: `None` for `optax.adamw`, a function of a learning rate such as `optax.adam`, or an optax optimiser
        with a fixed learning rate.
    - `learning_rate`, `weight_decay`: of the optimiser; the latter for the default one only.
    - `batch_size`: rows per step.
    - `max_iter`: the maximum number of epochs.
    - `early_stopping`: hold out `validation_fraction` of the rows. Each member stops after `n_iter_no_change` epochs
        without an improvement of its validation loss by more than `tol`, and keeps its best weights.
    - `bootstrap`: train each member on rows drawn with replacement; the other rows give `oob_score_`.
    - `random_state`: an integer, a `numpy.random.RandomState`, or `None`.
    - `verbose`: show a progress line.

    **Attributes:**

    - `ensemble_`: the trained [`eqx_ensemble.Ensemble`][]. Its members take features and return a target, or with
        Gaussian heads `(mean, variance)`, in the units of the data; `ensemble_[0].network` is the Module that `make`
        made. Members that diverged are excluded, with a warning.
    - `rows_`: with `bootstrap`, the training rows of the members `(members, n)`, else `None`.
    - `n_iter_`: the number of epochs of the member that was trained longest.
    - `loss_curve_`, `validation_loss_curve_`: the mean loss of the members in training, by epoch; the latter is `None`
        without `early_stopping`.
    - `oob_score_`, `oob_prediction_`: with `bootstrap`, $R^2$ and the predictions of members that were not trained on
        the row; NaN for rows that all members drew, or that were kept for validation.
    - `input_scaler_`, `target_scaler_`: the fitted `sklearn.preprocessing.StandardScaler`s.
    - `n_features_in_`, `feature_names_in_`: as in all estimators of scikit-learn.

    ```python
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import cross_val_score

    x, y = load_diabetes(return_X_y=True, as_frame=True)
    model = ee.sklearn.EnsembleRegressor(max_iter=20, random_state=0)
    mean, std = model.fit(x[:400], y[:400]).predict(x[400:], return_std=True)
    lower, upper = model.predict_interval(x[400:], level=0.9)
    cross_val_score(model, x, y, cv=2)
    ```

    ??? cite
        [Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles](https://arxiv.org/abs/1612.01474)
    """

    head: Literal["gaussian", "point"] = "gaussian"

    target_scaler_: StandardScaler = dataclasses.field(init=False)
    oob_prediction_: np.ndarray = dataclasses.field(init=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "EnsembleRegressor":
        """Trains the members.

        **Arguments:**

        - `X`: features `(rows, features)`: an array, a data frame, or nested lists.
        - `y`: targets, numbers `(rows,)` or `(rows, targets)`; of one column, `(rows,)` with scikit-learn's warning.
        - `sample_weight`: a weight for each row `(rows,)`, none negative, that multiplies its loss; only ratios matter.
            Rows of weight zero are excluded.

        **Returns:** the estimator.

        **Raises:** `TypeError` or `ValueError` for parameters and data that do not fit together;
        [`eqx_ensemble.train.DivergedError`][] if all members diverged.
        """
        check_word(self.head, "head", ("gaussian", "point"))
        table, y = self._take_rows(X, y, multi_output=True, y_numeric=True)
        y = np.asarray(y, np.float64)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        split = self._split(table, sample_weight)
        self.target_scaler_ = self._fit_scaler(y[split.rows], split.weights[split.rows])
        kind = {"gaussian": GaussianHead, "point": PointHead}[self.head]
        head = kind(device_scaler(self.target_scaler_, y.shape[1:]))
        targets = scale(self.target_scaler_, y)
        self._train(table, targets, split, head)
        self.calibration_, self.scale_ = None, np.ones(y.shape[1:])
        if split.calibration is not None:
            own = take_rows(table, split.calibration)
            mean, std = self._moments(own)
            self.calibration_ = mean, std, targets[split.calibration]
            if self.head == "gaussian":
                errors = ((self.calibration_[2] - mean) / std) ** 2
                self.scale_ = np.sqrt(np.average(errors, axis=0, weights=split.weights[split.calibration]))
        if self.bootstrap:
            predictions = self._predict(X)
            means = predictions[0] if self.head == "gaussian" else predictions
            found, known = self._predict_out_of_bag(means, split)
            self.oob_prediction_ = unscale(self.target_scaler_, found)
            self.oob_score_ = float(r2_score(y[known], self.oob_prediction_[known])) if known.any() else np.nan
        return self

    @overload
    def predict(self, X: Any, *, return_std: Literal[False] = False) -> np.ndarray: ...
    @overload
    def predict(self, X: Any, *, return_std: Literal[True]) -> tuple[np.ndarray, np.ndarray]: ...
    @overload
    def predict(self, X: Any, *, return_std: bool) -> np.ndarray | tuple[np.ndarray, np.ndarray]: ...
    def predict(self, X: Any, *, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The mean of the ensemble's predictive distribution.

        **Arguments:**

        - `X`: features `(rows, features)`.
        - `return_std`: also return the standard deviation.

        **Returns:** the means, float64, of the shape of the targets; with `return_std` a pair with the standard
        deviations: of the mixture of Gaussian heads, or of point heads' predictions, without noise.
        """
        mean, std = self._moments(X)
        if not return_std:
            return unscale(self.target_scaler_, mean)
        scaler: Any = self.target_scaler_
        return unscale(self.target_scaler_, mean), std * self.scale_ * scaler.scale_.reshape(mean.shape[1:])

    def predict_interval(self, X: Any, *, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The central interval of the ensemble's predictive distribution.

        Its coverage is not guaranteed; [the guide](../guide/estimators.md#intervals) shows how to calibrate it.

        **Arguments:**

        - `X`: features `(rows, features)`.
        - `level`: the probability inside, a number between 0 and 1.

        **Returns:** the lower and the upper ends, each of the shape of the targets: quantiles of the mixture of
        Gaussian heads, or of point heads' predictions, which ignore the noise of targets and cover less than `level` of
        them.
        """
        if self.calibration_ is None:
            of_gaussians = lambda moments, weights: uncertainty.gaussian_mixture_interval(
                *moments, weights=weights, level=level
            )
            ends = self._predict(X, self._combine(of_gaussians, partial(uncertainty.interval, level=level)))
        else:
            mean, std = self._moments(X)
            shares = zip(*(x.reshape(len(x), -1).T for x in self.calibration_), strict=True)
            is_gaussian = self.head == "gaussian"
            radius = [
                float(conformal.split(own, target, level=level, scale=width if is_gaussian else None).radius)
                for own, width, target in shares
            ]
            half = np.reshape(radius, mean.shape[1:]) * (std if is_gaussian else 1)
            ends = mean - half, mean + half
        lower, upper = (unscale(self.target_scaler_, end) for end in ends)
        return lower, upper

    def _moments(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """The means and standard deviations of standardised targets."""
        moments = self._predict(X, self._combine(combine.gaussian, combine.moments))
        return np.asarray(moments.mean, np.float64), np.sqrt(np.asarray(moments.variance, np.float64))

    def _combine(self, of_gaussians: Any, of_points: Any) -> Any:
        """The combination that suits the predictions."""
        check_is_fitted(self)
        return of_gaussians if isinstance(self.ensemble_.stacked.head, GaussianHead) else of_points
