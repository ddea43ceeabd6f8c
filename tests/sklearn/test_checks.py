"""The checks that scikit-learn has for estimators of other packages."""

import jax
import pytest

pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from eqx_ensemble.sklearn import EnsembleClassifier, EnsembleRegressor  # noqa: E402

SMALL = {"num_members": 2, "hidden_layer_sizes": (8,), "learning_rate": 0.05, "max_iter": 20, "batch_size": 256}
SMALL["early_stopping"] = False
DRAWS = "a bootstrap draws rows, of which there are more when rows are repeated"


def expected_failures(estimator):
    return {"check_sample_weight_equivalence_on_dense_data": DRAWS} if estimator.bootstrap else {}


def checks(*estimators):
    """Weights and repeated rows are compared to 1e-7, for which members need 64 bits."""

    @pytest.mark.usefixtures("unhooked")  # a constructor takes anything, and `fit` complains
    @pytest.mark.filterwarnings("ignore:No row is out of bag")
    @parametrize_with_checks(list(estimators), expected_failed_checks=expected_failures)
    def run(estimator, check):
        with jax.enable_x64("sample_weight_equivalence" in check.func.__name__):
            check(estimator)

    return run


test_checks_of_scikit_learn = pytest.mark.slow(
    checks(EnsembleRegressor(**SMALL), EnsembleClassifier(**SMALL, bootstrap=True))
)
