# isort: split
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, validate_data

from .. import combine
from .._caller import caller
from ._base import AbstractEstimator, has_bag
from ._fit import fit_members, predict_out_of_bag, predict_rows, validate_and_predict
from ._member import Classes


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
    - `state_`, `rows_`, `n_iter_`, `loss_curve_`, `validation_loss_curve_`, `input_scaler_`, `n_features_in_`,
        `feature_names_in_`: as of [`eqx_ensemble.sklearn.EnsembleRegressor`][].

    ```python
    from sklearn.datasets import load_iris

    x, y = load_iris(return_X_y=True, as_frame=True)
    model = ee.sklearn.EnsembleClassifier(max_iter=20, bootstrap=True, random_state=0).fit(x, y)
    model.predict_proba(x).shape  # (150, 3)
    model.oob_score_, model.ensemble_
    ```
    """

    def __init__(
        self,
        make: Callable[..., Any] | None = None,
        *,
        num_members: int = 5,
        hidden_layer_sizes: Sequence[int] = (64, 64),
        activation: str = "relu",
        standardise: bool = True,
        optimiser: Any = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-4,
        batch_size: int = 32,
        max_iter: int = 200,
        class_weight: Any = None,
        early_stopping: bool = True,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 0.0,
        bootstrap: bool = False,
        random_state: Any = None,
        verbose: bool | int = False,
    ):
        self.make = make
        self.num_members = num_members
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.standardise = standardise
        self.optimiser = optimiser
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.class_weight = class_weight
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.bootstrap = bootstrap
        self.random_state = random_state
        self.verbose = verbose

    classes_: np.ndarray
    oob_decision_function_: np.ndarray

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "EnsembleClassifier":
        """Trains the members.

        **Arguments:**

        - `X`, `sample_weight`: as for [`eqx_ensemble.sklearn.EnsembleRegressor.fit`][].
        - `y`: classes `(rows,)`: numbers, strings or booleans.

        **Returns:** the estimator.

        **Raises:** as [`eqx_ensemble.sklearn.EnsembleRegressor.fit`][].
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, indices = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"`{caller()}` needs two or more classes, got one class: {self.classes_.tolist()}.")
        if self.class_weight is not None:
            given = _check_sample_weight(sample_weight, X, dtype=np.float64)
            sample_weight = given * compute_sample_weight(self.class_weight, y)
        rows = fit_members(self, X, indices, sample_weight, head=Classes(len(self.classes_)))
        if self.rows_ is not None:
            found = predict_out_of_bag(jax.nn.softmax(predict_rows(self, X)), self.rows_, rows)
            self.oob_decision_function_ = found
            known = has_bag(found)
            best = found[known].argmax(axis=1) if known.any() else np.zeros(0, int)
            self.oob_score_ = float(accuracy_score(indices[known], best)) if known.any() else np.nan
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
        return np.asarray(validate_and_predict(self, X, combine.mixture))
