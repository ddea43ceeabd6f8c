from ._base import AbstractEstimator, take_rows  # the first: it says what to install

# isort: split
import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight

from .. import calibrate, combine
from .._caller import caller
from ._member import Classes


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class EnsembleClassifier(ClassifierMixin, AbstractEstimator):
    """A scikit-learn classifier: a deep ensemble of any Equinox models.

    For two or more classes of any type. The loss is the cross entropy; probabilities are the mean of the members'.

    **Arguments:**

    - `make`, `num_members`, `hidden_layer_sizes`, `activation`, `optimiser`, `learning_rate`, `weight_decay`,
        `batch_size`, `max_iter`, `early_stopping`, `validation_fraction`, `n_iter_no_change`, `tol`, `bootstrap`,
        `random_state`, `verbose`: as for [`eqx_ensemble.sklearn.EnsembleRegressor`][];
        `out_size` is the number of classes.
    - `standardise`: whether to standardise features.
    - `class_weight`: weights of classes as a dict, or `"balanced"`, which multiply those of the rows.

    **Attributes:**

    - `ensemble_`: the trained [`eqx_ensemble.Ensemble`][]. Its members take features in the unit of the data and return
        logits; `ensemble_[0].network` is the Module that `make` made. Members that diverged are excluded, with a
        warning.
    - `classes_`: the classes, in the order of logits and probabilities.
    - `oob_score_`, `oob_decision_function_`: with `bootstrap`, the accuracy and the class probabilities of members that
        were not trained on the row; NaN for rows that all members drew, or that were kept for validation.
    - `rows_`, `n_iter_`, `loss_curve_`, `validation_loss_curve_`, `input_scaler_`, `n_features_in_`,
        `feature_names_in_`: as of [`eqx_ensemble.sklearn.EnsembleRegressor`][].

    ```python
    from sklearn.datasets import load_iris

    x, y = load_iris(return_X_y=True, as_frame=True)
    model = ee.sklearn.EnsembleClassifier(max_iter=20, bootstrap=True, random_state=0).fit(x, y)
    model.predict_proba(x).shape  # (150, 3)
    model.oob_score_, model.ensemble_
    ```
    """

    class_weight: Any = None
    _least_calibration: ClassVar[int] = 100

    classes_: np.ndarray = dataclasses.field(init=False)
    temperature_: float = dataclasses.field(init=False)
    oob_decision_function_: np.ndarray = dataclasses.field(init=False)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "EnsembleClassifier":
        """Trains the members.

        **Arguments:**

        - `X`, `sample_weight`: as for [`eqx_ensemble.sklearn.EnsembleRegressor.fit`][].
        - `y`: classes `(rows,)`: numbers, strings or booleans.

        **Returns:** the estimator.

        **Raises:** as [`eqx_ensemble.sklearn.EnsembleRegressor.fit`][].
        """
        table, y = self._take_rows(X, y)
        check_classification_targets(y)
        self.classes_, indices = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"`{caller()}` needs two or more classes, got one class: {self.classes_.tolist()}.")
        if self.class_weight is not None:
            given = _check_sample_weight(sample_weight, table, dtype=np.float64)
            sample_weight = given * compute_sample_weight(self.class_weight, y)
        split = self._split(table, sample_weight, strata=indices)
        self._train(table, indices.astype(np.int32), split, Classes(len(self.classes_)))
        self.temperature_ = 1.0
        if split.calibration is not None:
            own = take_rows(table, split.calibration)
            logs, labels, weights = self.predict_log_proba(own)[None], indices[split.calibration], split.weights
            if not (logs[0].argmax(axis=1) == labels).all():  # else the likelihood has no maximum
                fitted = calibrate.temperature(
                    logs, labels, pool="mixture", row_weights=weights[split.calibration].astype(logs.dtype)
                )
                self.temperature_ = float(fitted.temperature[0])
        if self.bootstrap:
            found, known = self._predict_out_of_bag(jax.nn.softmax(self._predict(X)), split)
            self.oob_decision_function_, self.oob_score_ = found, np.nan
            if known.any():
                self.oob_score_ = float(accuracy_score(indices[known], found[known].argmax(axis=1)))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The most likely class of each row of features."""
        best = self.predict_log_proba(X).argmax(axis=1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities `(rows, classes)`, the mean of the members', in the dtype of the members."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Log-probabilities `(rows, classes)`, accurate even where probabilities underflow."""
        return np.asarray(self._predict(X, combine.mixture))
