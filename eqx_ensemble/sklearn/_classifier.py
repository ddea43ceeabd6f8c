from ._base import AbstractEstimator  # the first: it says what to install

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
from .._warnings import warn
from ._member import Classes
from ._rows import take_rows, take_table


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class EnsembleClassifier(ClassifierMixin, AbstractEstimator):
    """A scikit-learn classifier: one call from a table to a calibrated ensemble of networks.

    For two or more classes of any type. The loss is the cross entropy; probabilities are the weighted mean of the
    members', to the power of `1 / temperature_` and normalised. [`eqx_ensemble.sklearn.EnsembleRegressor`][] tells how
    members are drawn, stopped, selected and calibrated.

    **Arguments:**

    - `make`, `num_members`, `hidden_layer_sizes`, `activation`, `standardise`, `optimiser`, `learning_rate`,
        `weight_decay`, `batch_size`, `max_iter`, `time_limit`, `bootstrap`, `early_stopping`, `validation_fraction`,
        `n_iter_no_change`, `tol`, `select`, `calibration_fraction`, `mesh`, `random_state`, `verbose`: as for
        [`eqx_ensemble.sklearn.EnsembleRegressor`][]; `out_size` is the number of classes.
    - `class_weight`: weights of classes as a dict, or `"balanced"`, which multiply those of the rows.

    **Attributes:**

    - `ensemble_`: the trained [`eqx_ensemble.Ensemble`][] of the selected members. They take features of
        `encoder_.transform(X)` and return logits; `ensemble_[0].network` is the Module that `make` made.
    - `classes_`: the classes, in the order of logits and probabilities.
    - `temperature_`: fitted to the calibration rows ([`eqx_ensemble.calibrate.temperature`][]); 1 without.
    - `oob_score_`, `oob_decision_function_`: with `bootstrap`, the accuracy and the class probabilities, before
        calibration, of members that were not trained on the row; NaN for rows that all members drew, or that no member
        is trained on.
    - `weights_`, `draws_`, `hyper_`, `validation_score_`, `validation_scores_`, `encoder_`, `rows_`, `n_iter_`,
        `loss_curve_`, `validation_loss_curve_`, `input_scaler_`, `n_features_in_`, `feature_names_in_`: as of
        [`eqx_ensemble.sklearn.EnsembleRegressor`][]; scores are mean negative log probabilities in nats.

    ```python
    from sklearn.datasets import load_iris

    x, y = load_iris(return_X_y=True, as_frame=True)
    model = ee.sklearn.EnsembleClassifier(num_members=2, max_iter=20, bootstrap=True, random_state=0).fit(x, y)
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
        table, y = take_table(self, X, y)
        check_classification_targets(y)
        self.classes_, indices = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"`{caller()}` needs two or more classes, got one class: {self.classes_.tolist()}.")
        if self.class_weight is not None:
            given = _check_sample_weight(sample_weight, table, dtype=np.float64)
            sample_weight = given * compute_sample_weight(self.class_weight, y)
        split = self._split(table, sample_weight, strata=indices)
        self._train(indices.astype(np.int32), split, Classes(len(self.classes_)))
        self.temperature_ = 1.0
        if split.calibration is not None:
            own = take_rows(table, split.calibration)
            logs, labels, weights = self.predict_log_proba(own)[None], indices[split.calibration], split.weights
            options: Any = {"pool": "mixture", "row_weights": weights[split.calibration].astype(logs.dtype)}
            if not (logs[0].argmax(axis=1) == labels).all():  # else the likelihood has no maximum
                try:
                    self.temperature_ = float(calibrate.temperature(logs, labels, **options).temperature[0])
                except ValueError as error:
                    warn(f"`{caller()}` leaves probabilities as they are. {error}")
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
        """Class probabilities `(rows, classes)`, calibrated, in the dtype of the members."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Log-probabilities `(rows, classes)`, accurate even where probabilities underflow."""
        logs = self._predict(X, combine.mixture)
        return np.asarray(logs if self.temperature_ == 1 else jax.nn.log_softmax(logs / self.temperature_))
