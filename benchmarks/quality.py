"""Do ensembles predict better? One member, seeds, bootstraps, heads on a trunk and MC dropout, on data of packages.

Five folds: every row is a test row once, and all methods have the same rows to train, to stop by, and to test. The
scores of one member are means over the members of the ensemble. Scores have their standard errors over folds. Those of
differences, fold by fold, are those of Nadeau and Bengio (2003), half as large again, because folds share training
rows; with five folds, a difference is significant at 5 % from 2.78 of them.

Nothing is fitted to test rows. The dropout rate is chosen by validation rows; nothing else is tuned. Times are those of
training in the first three folds, without compilation; that of MC dropout has the search for the rate in it.
"""

from collections.abc import Iterable

import numpy as np
from _measure import ABSENT, Report, Timing, compared, ratio_row, script
from _members import as_gaussian
from _methods import Amount, Outcome, Task, outcomes
from _quality import class_scores, corrected_error, gaussian_scores, standard_error
from _tables import Table, tables

Scores = dict[str, np.ndarray]
"""Of one method: by the name of a score, its values `(folds,)`."""


def measure(quick: bool) -> Report:
    report = Report("Do ensembles predict better?")
    amount = Amount(2, 2, 2, 2, 2, 1, (0.1, 0.2)) if quick else Amount()
    for data in tables(quick=quick):
        if isinstance(data, str):
            report.facts[data] = ABSENT
        else:
            _compare(report, data, amount)
    return report


def _compare(report: Report, data: Table, amount: Amount) -> None:
    """All methods in all folds."""
    folds, rates = [], []
    for fold in range(amount.folds):
        split = data.split(fold)
        width = 64 if data.images else 50
        task = Task(split, (data.x.shape[1], width, width, data.num_classes or 2), amount, fold)
        found, rate = outcomes(task)
        folds.append(found)
        rates.append(rate)
    train, validation, test, unknown = (len(part) for part in (*(p[0] for p in split[:3]), split.unknown))
    parts = f"{train} to train, {validation} to validate, {test} to test" + f", {unknown} unknown" * (unknown > 0)
    report.facts[f"{data.name}: rows"] = f"{data.num_rows:,}, {data.x.shape[1]} features: {parts}"
    report.facts[f"{data.name}: dropout rates chosen"] = ", ".join(map(str, rates))
    targets = [data.split(fold).test[1] for fold in range(amount.folds)]
    scores = {
        method: _over_folds([_mean_scores(found[method], y, data) for found, y in zip(folds, targets, strict=True)])
        for method in folds[0]
    }
    _report_scores(report, data.name, scores)
    _report_times(report, data.name, folds)


def _report_scores(report: Report, name: str, scores: dict[str, Scores]) -> None:
    baseline = scores["one member"]
    known = [score for score in baseline if all(np.isfinite(found[score]).all() for found in scores.values())]
    for method, found in scores.items():
        report.facts[f"{name}: {method}"] = _text(
            known, [(found[score], standard_error(found[score])) for score in known]
        )
    for method, found in scores.items():
        if method == "one member":
            continue
        pairs = [found[score] - baseline[score] for score in known]
        errors = [(values, corrected_error(values)) for values in pairs]
        report.facts[f"{name}: {method} minus one member"] = _text(known, errors, sign="+")
        # an NLL may be negative: the ratio of two is that of likelihoods
        report.rows.append(
            ratio_row(f"{name}: NLL, {method}", f"{method} / one member", np.exp(found["NLL"] - baseline["NLL"]))
        )


def _text(names: Iterable[str], values: Iterable[tuple[np.ndarray, float]], *, sign: str = "") -> str:
    cells = (f"{name} {v.mean():{sign}.4f} +- {error:.4f}" for name, (v, error) in zip(names, values, strict=True))
    return ", ".join(cells)


def _report_times(report: Report, name: str, folds: list[dict[str, Outcome]]) -> None:
    times = {}
    for method in folds[0]:
        seconds = np.array([[found[method].wall, found[method].cpu] for found in folds])
        wall, cpu = seconds[np.isfinite(seconds).all(axis=1)].T
        if len(cpu):
            times[method] = Timing(f"{name}: {method}", wall, cpu)
    report.timings += times.values()
    for method, timing in times.items():
        if method != "one member":
            report.rows.append(compared(f"{name}: time to train, {method}", timing, times["one member"]))


def _over_folds(scores: list[dict[str, float]]) -> Scores:
    return {name: np.array([found[name] for found in scores]) for name in scores[0]}


def _mean_scores(outcome: Outcome, y: np.ndarray, data: Table) -> dict[str, float]:
    """Means over repeats."""
    score = class_scores if data.num_classes else lambda outputs, y: gaussian_scores(*as_gaussian(outputs), y)
    found = [score(outputs, y) for outputs in outcome.outputs]
    return {name: float(np.mean([scores[name] for scores in found])) for name in found[0]}


if __name__ == "__main__":
    script(measure)
