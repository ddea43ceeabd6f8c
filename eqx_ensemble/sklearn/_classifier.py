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
from ._base import AbstractEstimator, has_bag
from ._check import check_classes, check_parameters
from ._fit import fit_members, is_warm, predict_out_of_bag, predict_rows, validate_and_predict
from ._member import Classes


class EnsembleClassifier(ClassifierMixin, AbstractEstimator):
    """A scikit-learn classifier: a deep ensemble of any Equinox models.

    Trained as [`eqx_ensemble.sklearn.EnsembleRegressor`][], for two or more classes of any type. Its probabilities are
    the mean of the members'; the loss is the cross entropy.

    **Arguments:**

    - `make`: makes the network of one member, called as `make(in_size, out_size, key=key)`: any Equinox Module from
        `(in_size,)` to `(out_size,)`, such as `functools.partial(eqx.nn.MLP, width_size=32, depth=2)`. It may return
        `(module, state)`, as `equinox.nn.make_with_state` does; for batch normalisation, the axis name of the batch is
        `"batch"`; a network whose call takes `key` gets one for each row in training. By default a multilayer
        perceptron of `hidden_layer_sizes` and `activation`.
    - `num_members`: the number of members.
    - `hidden_layer_sizes`, `activation`: of the default network: the widths of its hidden layers, and `"relu"`,
        `"gelu"`, `"silu"`, `"tanh"`, `"logistic"` or `"identity"`.
    - `standardise`: whether to standardise features.
    - `optimiser`: `None` for `optax.adamw`, a function of a learning rate such as `optax.adam`, or an optax optimiser
        with a fixed learning rate.
    - `learning_rate`, `weight_decay`: of the optimiser; the latter for the default one only. Fits that differ in them
        share one compiled program.
    - `batch_size`: rows per step.
    - `max_iter`: the maximum number of epochs.
    - `class_weight`: weights of classes as a dict, or `"balanced"`, which multiply those of the rows.
    - `early_stopping`: hold out `validation_fraction` of the rows. Each member stops after `n_iter_no_change` epochs
        without an improvement of its validation loss by more than `tol`, and keeps its best weights. Otherwise all are
        trained for `max_iter` epochs on all rows.
    - `bootstrap`: train each member on rows drawn with replacement; the other rows give `oob_score_`.
    - `warm_start`: a further call of `fit` continues: if `num_members` has grown, it adds members and leaves the others
        unchanged; otherwise it trains all for up to `max_iter` further epochs. The standardisation of the first call is
        kept.
    - `random_state`: an integer, a `numpy.random.RandomState`, or `None`.
    - `verbose`: show a progress line.

    **Attributes:**

    - `ensemble_`: the trained [`eqx_ensemble.Ensemble`][], for all functions of this library. Its members take features
        in the unit of the data and return logits; `ensemble_[0].network` is the Module that `make` made. Members that
        diverged are excluded, with a warning.
    - `state_`: the stacked `equinox.nn.State` of stateful members, else `None`.
    - `rows_`: with `bootstrap`, the training rows of the members `(members, n)`, else `None`.
    - `n_iter_`: the number of epochs of the member that was trained longest.
    - `loss_curve_`, `validation_loss_curve_`: for each epoch, the mean over the members in training of their loss; the
        latter is `None` without `early_stopping`.
    - `classes_`: the classes, in the order of logits and probabilities.
    - `oob_score_`, `oob_decision_function_`: with `bootstrap`, the accuracy and the class probabilities of members that
        were not trained on the row. Rows that all members drew, and rows kept for validation, are NaN and do not count.
    - `input_scaler_`: the fitted `sklearn.preprocessing.StandardScaler`.
    - `n_features_in_`, `feature_names_in_`: as in all estimators of scikit-learn.

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
        warm_start: bool = False,
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
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    classes_: np.ndarray
    oob_decision_function_: np.ndarray

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "EnsembleClassifier":
        """Trains the members.

        **Arguments:**

        - `X`: features `(rows, features)`: an array, a data frame, or nested lists.
        - `y`: classes `(rows,)`: numbers, strings or booleans.
        - `sample_weight`: a weight for each row `(rows,)`, none negative, that multiplies its loss; only ratios matter.
            Rows of weight zero are excluded.

        **Returns:** the estimator.

        **Raises:** `TypeError` or `ValueError` for parameters and data that do not fit together;
        [`eqx_ensemble.train.DivergedError`][] if all members diverged.
        """
        check_parameters(self)
        warm = is_warm(self)
        X, y = validate_data(self, X, y, dtype=np.float64, reset=not warm)
        check_classification_targets(y)
        classes, indices = np.unique(y, return_inverse=True)
        check_classes(classes, self.classes_ if warm else None)
        self.classes_ = classes
        if self.class_weight is not None:
            given = _check_sample_weight(sample_weight, X, dtype=np.float64)
            sample_weight = given * compute_sample_weight(self.class_weight, y)
        rows = fit_members(self, X, indices, sample_weight, head=Classes(len(classes)))
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
