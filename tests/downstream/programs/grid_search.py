"""A grid search of scikit-learn over our estimators, in this process and in two others that joblib starts."""

import numpy as np
from sklearn.model_selection import GridSearchCV, cross_val_predict

import eqx_ensemble as ee


def main():
    rows = np.random.default_rng(0).normal(size=(40, 3))
    targets = rows[:, 0] + 0.1 * rows[:, 1]
    small = {"num_members": 2, "hidden_layer_sizes": (4,), "max_iter": 2, "early_stopping": False, "random_state": 0}
    found = []
    for jobs in (1, 2):
        rates = {"learning_rate": [1e-3, 1e-2]}
        grid = GridSearchCV(ee.sklearn.EnsembleRegressor(**small), rates, cv=2, n_jobs=jobs, error_score="raise")
        grid.fit(rows, targets)
        found.append((grid.cv_results_["mean_test_score"], grid.predict(rows)))
        classes = ee.sklearn.EnsembleClassifier(**small)
        found[-1] += (cross_val_predict(classes, rows, targets > 0, cv=2, n_jobs=jobs, method="predict_proba"),)
    for first, second in zip(*found, strict=True):
        np.testing.assert_array_equal(first, second)
    print("grid search: equal")


if __name__ == "__main__":
    main()
