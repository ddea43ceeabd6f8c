"""Estimators: `EnsembleRegressor` and `EnsembleClassifier` beside those of scikit-learn, on data that packages carry.

Five-fold cross-validation, every estimator on the same folds. Networks have one architecture, optimiser, batch size and
rule of early stopping, here and in scikit-learn. Trees have the defaults of scikit-learn. Nothing was tuned for a data
set. Our first fit of a shape compiles: the first fold is fitted once before.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from _measure import Report, Timing, compared, script
from sklearn import datasets, ensemble, neural_network
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import eqx_ensemble as ee

OURS, TREES = "eqx_ensemble", 100


class Task(NamedTuple):
    """A data set; the targets are classes, or numbers."""

    name: str
    x: np.ndarray
    y: np.ndarray
    classes: bool


def measure(quick: bool) -> Report:
    report = Report("Estimators")
    tasks = [Task("wine", *datasets.load_wine(return_X_y=True), classes=True)]
    if not quick:
        tasks += [
            Task("diabetes", *datasets.load_diabetes(return_X_y=True), classes=False),
            Task("breast cancer", *datasets.load_breast_cancer(return_X_y=True), classes=True),
            Task("digits", *datasets.load_digits(return_X_y=True), classes=True),
            _fair(),
        ]
    for task in tasks:
        _compare(report, task, quick=quick)
    return report


def _fair() -> Task:
    """Survey data: the logarithm of time spent in affairs, from eight answers of 2,000 women, drawn of 6,366."""
    from statsmodels.datasets import fair

    data = fair.load_pandas().data.sample(2000, random_state=0)
    x, y = data.drop(columns="affairs").to_numpy(float), np.log1p(data["affairs"].to_numpy(float))
    return Task("fair", x, y, classes=False)


def _contenders(task: Task, epochs: int) -> dict[str, Any]:
    shared: dict[str, Any] = {"hidden_layer_sizes": (64, 64), "batch_size": 128, "max_iter": epochs, "random_state": 0}
    shared |= {"early_stopping": True, "validation_fraction": 0.1, "n_iter_no_change": 10, "tol": 0.0}
    kind = "Classifier" if task.classes else "Regressor"
    of = lambda module, name: getattr(module, f"{name}{kind}")
    ours = of(ee.sklearn, "Ensemble")
    member = of(neural_network, "MLP")(**shared | {"random_state": None}, learning_rate_init=1e-3)
    bagging = make_pipeline(StandardScaler(), of(ensemble, "Bagging")(member, 5, random_state=0))
    return {
        OURS: ours(**shared),
        f"{OURS}, bootstrap": ours(**shared, bootstrap=True),
        "bagged MLPs": bagging if task.classes else TransformedTargetRegressor(bagging, transformer=StandardScaler()),
        "forest": of(ensemble, "RandomForest")(TREES, random_state=0),
        "boosting": of(ensemble, "HistGradientBoosting")(max_iter=TREES, random_state=0),
    }


def _compare(report: Report, task: Task, *, quick: bool) -> None:
    count = 2 if quick else 5
    rows = len(task.x) // count * count  # folds of one size, hence one compiled program
    folds = list(KFold(count, shuffle=True, random_state=0).split(task.x[:rows]))
    times: dict[str, Timing] = {}
    for name, estimator in _contenders(task, 3 if quick else 200).items():
        if name.startswith(OURS):
            _fit(clone(estimator), task, folds[0][0])
        scores, seconds = [], []
        for train, test in folds:
            model = clone(estimator)
            seconds.append(_seconds(lambda model=model, train=train: _fit(model, task, train)))
            own = [model.score(task.x[test], task.y[test])]
            if task.classes:
                own.append(log_loss(task.y[test], model.predict_proba(task.x[test])))
            scores.append(own)
        times[name] = Timing(f"{task.name}: {name}, one fit", *np.array(seconds).T)
        report.facts[f"{task.name}: {name}"] = _text(task, np.array(scores))
    report.timings += times.values()
    report.rows += [compared(f"{task.name}: {n}", t, times[OURS]) for n, t in times.items() if n != OURS]


def _fit(model: Any, task: Task, rows: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's, of networks that ran to `max_iter`
        model.fit(task.x[rows], task.y[rows])


def _seconds(run: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def _text(task: Task, scores: np.ndarray) -> str:
    names, errors = ("accuracy", "log loss") if task.classes else ("R2",), scores.std(axis=0, ddof=1)
    cells = zip(names, scores.mean(axis=0), errors / np.sqrt(len(scores)), strict=True)
    return ", ".join(f"{what} {mean:.3f} ± {error:.3f}" for what, mean, error in cells)


if __name__ == "__main__":
    script(measure)
