"""Estimators: `EnsembleRegressor` and `EnsembleClassifier` beside those of scikit-learn, on data that packages carry.

Five-fold cross-validation, every estimator on the same folds. Networks have one architecture, optimiser, batch size and
rule of early stopping, here and in scikit-learn. Trees have the defaults of scikit-learn. Nothing was tuned for a data
set. The first fold is fitted once before: compilation is not counted, but said apart.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from _measure import Report, Timing, compared, ratio_row, script
from sklearn import datasets, ensemble, neural_network
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import eqx_ensemble as ee

OURS = "eqx_ensemble"


class Task(NamedTuple):
    """A data set; the targets are classes, or numbers."""

    name: str
    x: np.ndarray
    y: np.ndarray
    classes: bool


def measure(quick: bool) -> Report:
    report = Report("Estimators")
    for task in _tasks(quick=quick):
        _compare(report, task, quick=quick)
    return report


def _tasks(*, quick: bool) -> list[Task]:
    tasks = [Task("diabetes", *datasets.load_diabetes(return_X_y=True), classes=False)]
    if quick:
        return [Task("wine", *datasets.load_wine(return_X_y=True), classes=True)]
    tasks += _fair()
    tasks += [
        Task("wine", *datasets.load_wine(return_X_y=True), classes=True),
        Task("breast cancer", *datasets.load_breast_cancer(return_X_y=True), classes=True),
        Task("digits", *datasets.load_digits(return_X_y=True), classes=True),
    ]
    return tasks


def _fair() -> list[Task]:
    """Survey data: the logarithm of time spent in affairs, from eight answers of 2,000 women, drawn of 6,366."""
    try:
        from statsmodels.datasets import fair
    except ImportError:
        return []
    data = fair.load_pandas().data.sample(2000, random_state=0)
    x, y = data.drop(columns="affairs").to_numpy(float), np.log1p(data["affairs"].to_numpy(float))
    return [Task("fair", x, y, classes=False)]


def _contenders(task: Task, *, quick: bool) -> dict[str, Any]:
    epochs = 3 if quick else 200
    shared: dict[str, Any] = {"hidden_layer_sizes": (64, 64), "batch_size": 128, "max_iter": epochs}
    shared |= {"early_stopping": True, "validation_fraction": 0.1, "n_iter_no_change": 10, "tol": 0.0}
    trees = 10 if quick else 100
    if task.classes:
        mlp = neural_network.MLPClassifier(**shared, learning_rate_init=1e-3)
        bagging = ensemble.BaggingClassifier(mlp, 5, random_state=0)
        return {
            OURS: ee.sklearn.EnsembleClassifier(**shared, random_state=0),
            f"{OURS}, bootstrap": ee.sklearn.EnsembleClassifier(**shared, bootstrap=True, random_state=0),
            "BaggingClassifier(MLPClassifier)": make_pipeline(StandardScaler(), bagging),
            "RandomForestClassifier": ensemble.RandomForestClassifier(trees, random_state=0),
            "HistGradientBoostingClassifier": ensemble.HistGradientBoostingClassifier(max_iter=trees, random_state=0),
        }
    mlp = neural_network.MLPRegressor(**shared, learning_rate_init=1e-3)
    bagging = make_pipeline(StandardScaler(), ensemble.BaggingRegressor(mlp, 5, random_state=0))
    return {
        OURS: ee.sklearn.EnsembleRegressor(**shared, random_state=0),
        f"{OURS}, bootstrap": ee.sklearn.EnsembleRegressor(**shared, bootstrap=True, random_state=0),
        "BaggingRegressor(MLPRegressor)": TransformedTargetRegressor(bagging, transformer=StandardScaler()),
        "RandomForestRegressor": ensemble.RandomForestRegressor(trees, random_state=0),
        "HistGradientBoostingRegressor": ensemble.HistGradientBoostingRegressor(max_iter=trees, random_state=0),
    }


def _compare(report: Report, task: Task, *, quick: bool) -> None:
    count = 2 if quick else 5
    rows = len(task.x) // count * count  # folds of one size, hence one compiled program
    folds = list(KFold(count, shuffle=True, random_state=0).split(task.x[:rows]))
    scores: dict[str, np.ndarray] = {}
    times: dict[str, Timing] = {}
    for name, estimator in _contenders(task, quick=quick).items():
        first = _seconds(lambda e=estimator: _fit(clone(e), task, folds[0][0]))[1] if name.startswith(OURS) else 0.0
        found, seconds = _cross_validate(estimator, task, folds)
        scores[name], times[name] = found, Timing(f"{task.name}: {name}, one fit", *seconds)
        report.facts[f"{task.name}: {name}"] = ", ".join(_facts(task, found, seconds[1], first, name))
    report.timings += times.values()
    ours = scores[OURS]
    for name, other in scores.items():
        if name == OURS:
            continue
        report.rows.append(compared(f"{task.name}: time of a fit, {name}", times[name], times[OURS]))
        # Errors, because a score may be negative or zero: 1 - R2, or one minus accuracy with half an error added.
        error = lambda score: 1 - score[:, 0] + 0.5 * task.classes / len(folds[0][1])
        report.rows.append(ratio_row(f"{task.name}: error, {name}", f"{name} / {OURS}", error(other) / error(ours)))


def _cross_validate(
    estimator: Any, task: Task, folds: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Of each fold the score, for classes the log loss, too; the wall and the CPU seconds of its fit."""
    scores, seconds = [], []
    for train, test in folds:
        model = clone(estimator)
        seconds.append(_seconds(lambda model=model, train=train: _fit(model, task, train)))
        found = [model.score(task.x[test], task.y[test])]
        if task.classes:
            found.append(log_loss(task.y[test], model.predict_proba(task.x[test])))
        scores.append(found)
    return np.array(scores), np.array(seconds).T


def _fit(model: Any, task: Task, rows: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's, of networks that ran to `max_iter`
        model.fit(task.x[rows], task.y[rows])


def _seconds(run: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def _facts(task: Task, scores: np.ndarray, seconds: np.ndarray, first: float, name: str) -> list[str]:
    names = ("accuracy", "log loss") if task.classes else ("R2",)
    errors = scores.std(axis=0, ddof=1) / np.sqrt(len(scores))
    texts = [f"{what} {s:.3f} +- {e:.3f}" for what, s, e in zip(names, scores.mean(axis=0), errors, strict=True)]
    texts.append(f"{np.median(seconds):.2f} s of CPU a fit")
    return [*texts, f"the first {first:.1f} s"] if name.startswith(OURS) else texts


if __name__ == "__main__":
    script(measure)
