from ._base import AbstractEstimator  # the first: it says what to install

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
from .._caller import caller
from .._check import check_word
from .._warnings import warn
from ._member import GaussianHead, PointHead
from ._rows import RowSplit, device_scaler, fit_scaler, scale, take_rows, take_table, unscale


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class EnsembleRegressor(RegressorMixin, AbstractEstimator):
    """A scikit-learn regressor: one call from a table to a calibrated ensemble of networks.

    `fit` takes a data frame with numbers, categories and missing values, or an array. Without arguments, it trains 32
    networks (8 for fewer than 2,000 rows) in one stack, each with a random learning rate, weight decay, dropout and
    depth, stops each by itself, selects the best weighted mean of them on held-out rows
    ([`eqx_ensemble.combine.greedy`][]), and calibrates it on rows that were used for neither. What you give is the same
    for all members; what is `None` is drawn for each, or follows from the number of rows. Ctrl-C, or `time_limit`, ends
    training, and what there is is selected and calibrated.

    **Arguments:**

    *Members:*

    - `make`: makes the network of one member from `(in_size,)` to `(out_size,)`, as `make(in_size, out_size, key=key)`,
        such as `functools.partial(eqx.nn.MLP, width_size=32, depth=2)`: [your own
        network](../guide/estimators.md#your-own-network).
    - `num_members`: how many draws of hyperparameters.
    - `head`: `"gaussian"`, a mean and a variance, or `"point"`, a number. Both train means by the squared error.
        `out_size` is twice the number of targets (means before raw variances), or the number of targets.
    - `hidden_layer_sizes`: a plain multilayer perceptron with these widths. By default residual networks of 0 to 3
        blocks, 128 wide (64 for fewer than 2,000 rows), with waves of the numbers as further inputs.
    - `activation`: `"relu"`, `"gelu"`, `"silu"`, `"tanh"`, `"logistic"` or `"identity"`.
    - `standardise`: whether to standardise features and targets.

    *Training:*

    - `optimiser`: `None` for `optax.adamw` with a cosine schedule, a function of a learning rate such as `optax.adam`,
        or an optax optimiser with a fixed learning rate.
    - `learning_rate`, `weight_decay`: of the optimiser; the latter for the default one only. By default log-uniform
        from 3e-4 to 5e-3, and from 1e-4 to .1.
    - `batch_size`: rows per step, by default 32 to 1,024. `max_iter`: the maximum number of epochs, by default for
        about 3,000 steps in 8 to 200 epochs.
    - `time_limit`: seconds after which training ends, at an epoch's end, with compilation but without what follows;
        the first epoch is always trained. Results then depend on the machine.
    - `bootstrap`: train each member on rows drawn with replacement; the other rows give `oob_score_`.

    *Held-out rows:*

    - `early_stopping`: stop each member after `n_iter_no_change` epochs without an improvement of its score on held-out
        rows by more than `tol`, and keep its best weights. `False` trains on all rows, without selection and
        calibration.
    - `validation_fraction`: the part of the rows that is held out to stop and select. By default .15; for fewer than
        2,000 rows all: each draw is trained once in each of five folds, and all five networks are members.
    - `select`: `False` weights all members equally.
    - `calibration_fraction`: the part of the rows to calibrate on, if that is at least 20 rows (classes: 100).

    *Others:*

    - `mesh`: the devices, as for [`eqx_ensemble.fit`][].
    - `random_state`: an integer, a `numpy.random.RandomState`, or `None`.
    - `verbose`: show a progress line with the best member and the ensemble so far.

    **Attributes:**

    - `ensemble_`: the trained [`eqx_ensemble.Ensemble`][] of the selected members. They take features of
        `encoder_.transform(X)` and return a target, or with Gaussian heads `(mean, variance)`, in the units of the
        data; `ensemble_[0].network` is the Module that `make` made. Diverged members are excluded, with a warning.
    - `weights_`: their weights `(members,)`, of sum one; `draws_`: the draw of each; `hyper_`: what was drawn for them,
        arrays `(members,)` by name.
    - `validation_score_`, `validation_scores_`: the score on held-out rows, in units of standardised targets, of the
        ensemble, and of each draw `(num_members,)`; `None` without held-out rows.
    - `encoder_`: the fitted `sklearn.compose.ColumnTransformer`: medians for missing numbers, one column for each
        category, and one for each column of numbers with missing ones.
    - `calibration_`: of the calibration rows the means, standard deviations and targets, standardised, or `None`.
        `std_scale_`: the factor of standard deviations that they suggest.
    - `rows_`: with `bootstrap`, the training rows of the members `(members, n)`, else `None`.
    - `n_iter_`: the number of epochs of the member that was trained longest.
    - `loss_curve_`, `validation_loss_curve_`: the mean loss of all members in training, and their mean score on
        held-out rows, by epoch; the latter is `None` without `early_stopping`.
    - `oob_score_`, `oob_prediction_`: with `bootstrap`, $R^2$ and the predictions of members that were not trained on
        the row; NaN for rows that all members drew, or that no member is trained on.
    - `input_scaler_`, `target_scaler_`: the fitted `sklearn.preprocessing.StandardScaler`s.
    - `n_features_in_`, `feature_names_in_`: as in all estimators of scikit-learn.

    ```python
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import cross_val_score

    x, y = load_diabetes(return_X_y=True, as_frame=True)
    model = ee.sklearn.EnsembleRegressor(num_members=2, max_iter=20, random_state=0)
    mean, std = model.fit(x[:400], y[:400]).predict(x[400:], return_std=True)
    lower, upper = model.predict_interval(x[400:], level=0.9)
    cross_val_score(model, x, y, cv=2)
    ```

    ??? cite
        [Deep ensembles](https://arxiv.org/abs/1612.01474) (Lakshminarayanan et al. 2017);
        [TabPack](https://arxiv.org/abs/2607.05380) (Gorishniy et al. 2026), from which the idea is: draw, train in one
        stack, select; [ensemble selection](https://doi.org/10.1145/1015330.1015432) (Caruana et al. 2004); [waves of
        numbers](https://arxiv.org/abs/2203.05556) (Gorishniy et al. 2022).
    """

    head: Literal["gaussian", "point"] = "gaussian"

    target_scaler_: StandardScaler = dataclasses.field(init=False)
    calibration_: tuple[np.ndarray, np.ndarray, np.ndarray] | None = dataclasses.field(init=False)
    std_scale_: np.ndarray = dataclasses.field(init=False)
    oob_prediction_: np.ndarray = dataclasses.field(init=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "EnsembleRegressor":
        """Trains the members.

        **Arguments:**

        - `X`: features `(rows, features)`: a data frame, whose columns of text, categories and objects are categories;
            or an array or nested lists of numbers. NaN is a missing value.
        - `y`: targets, numbers `(rows,)` or `(rows, targets)`; of one column, `(rows,)` with scikit-learn's warning.
        - `sample_weight`: a weight for each row `(rows,)`, none negative, that multiplies its loss; only ratios matter.
            Rows of weight zero are excluded.

        **Returns:** the estimator.

        **Raises:** `TypeError` or `ValueError` for parameters and data that do not fit together;
        [`eqx_ensemble.train.DivergedError`][] if all members diverged.
        """
        check_word(self.head, "head", ("gaussian", "point"))
        table, y = take_table(self, X, y, multi_output=True, y_numeric=True)
        y = np.asarray(y, np.float64)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        split = self._split(table, sample_weight)
        self.target_scaler_ = fit_scaler(y[split.rows], split.weights[split.rows], standardise=self.standardise)
        kind = {"gaussian": GaussianHead, "point": PointHead}[self.head]
        head = kind(device_scaler(self.target_scaler_, y.shape[1:]))
        self._train(scale(self.target_scaler_, y), split, head)
        self._calibrate(table, scale(self.target_scaler_, y), split)
        if self.bootstrap:
            predictions = self._predict(X)
            means = predictions[0] if self.head == "gaussian" else predictions
            found, known = self._predict_out_of_bag(means, split)
            self.oob_prediction_ = unscale(self.target_scaler_, found)
            self.oob_score_ = float(r2_score(y[known], self.oob_prediction_[known])) if known.any() else np.nan
        return self

    def _calibrate(self, table: Any, y: np.ndarray, split: RowSplit) -> None:
        """The factor of standard deviations, and what intervals are computed from."""
        self.calibration_, self.std_scale_ = None, np.ones(y.shape[1:])
        if (rows := split.calibration) is not None:
            mean, std = self._moments(take_rows(table, rows))
            self.calibration_ = mean, std, y[rows]
            if self._is_gaussian:
                square = ((y[rows] - mean) / std) ** 2
                self.std_scale_ = np.sqrt(np.average(square, axis=0, weights=split.weights[rows]))

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
        deviations: of the mixture of Gaussian heads, times `std_scale_`, or of point heads' predictions, without noise.
        """
        mean, std = self._moments(X)
        if not return_std:
            return unscale(self.target_scaler_, mean)
        scaler: Any = self.target_scaler_
        return unscale(self.target_scaler_, mean), std * self.std_scale_ * scaler.scale_.reshape(mean.shape[1:])

    def predict_interval(self, X: Any, *, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Intervals that contain a new target with a probability.

        With calibration rows they are those of [`eqx_ensemble.conformal.split`][]: means plus and minus a multiple of
        the standard deviations (of point heads, a number). They contain the targets of new rows with probability
        `level` or more if all rows are exchangeable. Without, they are quantiles of the mixture of Gaussian heads, or
        of point heads' predictions, which ignore the noise of targets and contain fewer than `level` of them.

        **Arguments:**

        - `X`: features `(rows, features)`.
        - `level`: the probability inside, a number between 0 and 1.

        **Returns:** the lower and the upper ends, each of the shape of the targets. They are infinite, with a warning,
        for a `level` that so few calibration rows cannot show.
        """
        check_is_fitted(self)
        if self.calibration_ is None:
            if self.early_stopping and self.calibration_fraction:
                warn(f"`{caller()}`: too few rows were given to `fit` to calibrate intervals; they may cover too few.")
            of_gaussians = lambda moments, **options: uncertainty.gaussian_mixture_interval(*moments, **options)
            find = of_gaussians if self._is_gaussian else uncertainty.interval
            ends = self._predict(X, partial(find, level=level))
        else:
            mean, std = self._moments(X)
            known, stds, targets = (x.reshape(len(x), -1).T for x in self.calibration_)
            if not self._is_gaussian:
                std, stds = np.ones_like(std), np.ones_like(stds)
            of_target = lambda *own: float(conformal.split(*own[:2], level=level, scale=own[2]).radius)
            radius = [*map(of_target, known, targets, stds)]
            half = np.reshape(radius, mean.shape[1:]) * std
            ends = mean - half, mean + half
        return unscale(self.target_scaler_, ends[0]), unscale(self.target_scaler_, ends[1])

    def _moments(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """The means and standard deviations of standardised targets."""
        check_is_fitted(self)
        moments = self._predict(X, combine.gaussian if self._is_gaussian else combine.moments)
        return np.asarray(moments.mean, np.float64), np.sqrt(np.asarray(moments.variance, np.float64))

    @property
    def _is_gaussian(self) -> bool:
        """Whether members predict a variance, also if `head` has been changed since."""
        return isinstance(self.ensemble_.stacked.head, GaussianHead)
