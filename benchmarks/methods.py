"""Which ensemble? Every method on a table, on images with unknown classes and on a time series, at equal cost.

Cost is counted in member-steps: gradient steps of one network on one batch of rows. All methods have as many as eight
members that train one after another; `one member` has an eighth. No member stops early, because paths and samplers
cannot: instead all have a Gaussian prior of the weights, whose precision validation rows choose before, for one member:
once after its own steps, and once after those of all, for the methods that are one long run. They also choose the
dropout rate, the step sizes of the samplers, the prior of Laplace and the members of a greedy soup; that search is not
counted, but for the dropout rate, which is in the same number of member-steps. Nothing is fitted to test rows.

Five folds, with seeds of their own. On the table and the images every row is a test row once, and errors of differences
are those of Nadeau and Bengio (2003); in the time series, test months follow those to train by, in windows that move
on. Times are those of training in the first folds, without compilation, on the processor's cores.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from _measure import ABSENT, Report, Timing, compared, ratio_row, script
from _quality import class_scores, corrected_error, gaussian_scores, standard_error
from _series import Series
from _tables import tables
from contenders import efficient, heads, independent, particles, posterior, sampling, trajectory
from contenders._task import Amount, Fitted, Setting, Task, choose_decays

BASELINE = "one member"
METHODS: dict[str, Callable[[Task], Fitted | None]] = {
    BASELINE: independent.each_seed,
    "one member for longer": independent.one_member_for_longer,
    "seeds": independent.seeds,
    "bootstraps": independent.bootstraps,
    "anchors": independent.anchors,
    "prior functions": independent.prior_functions,
    "heads on a trunk": independent.heads_on_a_trunk,
    "MC dropout": independent.mc_dropout,
    "EMA": trajectory.exponential_average,
    "SWA": trajectory.stochastic_weight_average,
    "SWAG": trajectory.swag,
    "multi-SWAG": trajectory.multi_swag,
    "snapshots": trajectory.snapshots,
    "greedy soup": trajectory.greedy_soup,
    "SGHMC": sampling.sghmc,
    "cyclical SGLD": sampling.cyclical_sgld,
    "SVGD": particles.svgd,
    "repulsion of outputs": particles.function_space,
    "Laplace": posterior.laplace,
    "Laplace of seeds": posterior.laplace_of_seeds,
    "SNGP": posterior.spectral_gaussian_process,
    "BatchEnsemble": efficient.batch_ensemble,
    "TabM": efficient.tabm,
    "packed": efficient.packed,
    "Masksembles": efficient.masksembles,
    "MIMO": efficient.mimo,
    "distilled": independent.distilled,
    "evidential": heads.evidential,
    "mixture density": heads.mixture_density,
}
TABLES = ("miles per gallon", "digits 0 to 7")
QUICK = Amount(folds=2, timed=1, members=2, steps=40, draws=6, decays=(1e-3,))

Found = dict[str, list[dict[str, float]]]
"""The scores of every method in every fold."""


def measure(quick: bool) -> Report:
    report = Report("Which ensemble?")
    for data in _data(quick):
        if isinstance(data, str):
            report.facts[data] = ABSENT
        else:
            _compare(report, data, QUICK if quick else Amount(), _some(data) if quick else METHODS)
            jax.clear_caches()  # hundreds of programs that are not used again
    return report


def _some(data: Any) -> dict[str, Callable[[Task], Fitted | None]]:
    """Half of the methods; on the other data set of a quick run, the others."""
    others = list(METHODS)[1 + isinstance(data, Series) :: 2]
    return {name: METHODS[name] for name in [BASELINE, *others]}


def _data(quick: bool) -> Any:
    for data in tables(quick=quick):
        if (data if isinstance(data, str) else data.name) in TABLES:
            yield data
    yield Series()


def _compare(report: Report, data: Any, amount: Amount, methods: dict[str, Callable[[Task], Fitted | None]]) -> None:
    """All methods in all folds."""
    found: Found = {}
    seconds: dict[str, list[tuple[float, float]]] = {}
    decays = []
    for fold in range(amount.folds):
        task = _task(data, amount, fold)
        decays.append(f"{task.setting.decay} ({task.setting.long_decay} in one run)")
        for name, method in methods.items():
            fitted = method(task)
            if fitted is None:
                continue
            if fold < amount.timed:
                timed = independent.one_member if name == BASELINE else method
                seconds.setdefault(name, []).append(_time(timed, task))
            found.setdefault(name, []).append(_scores(fitted, task) | {"bytes": float(fitted.num_bytes)})
    train, validation, test = (len(part[0]) for part in task.split[:3])
    report.facts[f"{data.name}: rows"] = f"{train} to train, {validation} to validate, {test} to test"
    report.facts[f"{data.name}: decays chosen"] = ", ".join(decays)
    _report_scores(report, data, found)
    _report_times(report, data, seconds)


def _task(data: Any, amount: Amount, fold: int) -> Task:
    split = data.split(fold)
    num_rows, num_features = split.train[0].shape
    setting = Setting((num_features, 64, 64, data.num_classes or 2), data.num_classes, num_rows, amount)
    return choose_decays(Task(split, setting, fold))


def _time(method: Callable[[Task], Any], task: Task) -> tuple[float, float]:
    """Wall and CPU seconds of training once its programs are compiled."""
    method(task)
    wall, cpu = time.perf_counter(), time.process_time()
    method(task)
    return time.perf_counter() - wall, time.process_time() - cpu


def _scores(fitted: Fitted, task: Task) -> dict[str, float]:
    y, parts = task.split.test[1], fitted.predict(task.inputs)
    parts = [(part,) for part in parts] if task.setting.num_classes else list(zip(*parts, strict=True))
    score = class_scores if task.setting.num_classes else gaussian_scores
    groups = [[part] for part in parts] if fitted.separate else [parts]
    found = [score(*map(np.stack, zip(*group, strict=True)), y) for group in groups]
    return {name: float(np.mean([scores[name] for scores in found])) for name in found[0]}


def _report_scores(report: Report, data: Any, found: Found) -> None:
    values = {
        name: {score: np.array([fold[score] for fold in folds]) for score in folds[0]} for name, folds in found.items()
    }
    baseline = values[BASELINE]
    known = [score for score in baseline if all(np.isfinite(own[score]).all() for own in values.values())]
    error = standard_error if isinstance(data, Series) else corrected_error
    for name, own in values.items():
        report.facts[f"{data.name}: {name}"] = _text(known, own, standard_error)
        if name != BASELINE:
            gaps = {score: own[score] - baseline[score] for score in known}
            report.facts[f"{data.name}: {name} minus {BASELINE}"] = _text(known, gaps, error, sign="+")
            question, ratio_of = f"{data.name}: NLL, {name}", f"{name} / {BASELINE}"
            report.rows.append(ratio_row(question, ratio_of, np.exp(gaps["NLL"])))  # the ratio of likelihoods


def _text(
    scores: list[str], values: dict[str, np.ndarray], error: Callable[[np.ndarray], float], sign: str = ""
) -> str:
    cells = (f"{score} {values[score].mean():{sign}.4f} +- {error(values[score]):.4f}" for score in scores)
    return ", ".join(cells)


def _report_times(report: Report, data: Any, seconds: dict[str, list[tuple[float, float]]]) -> None:
    times = {name: Timing(f"{data.name}: {name}", *np.array(own).T) for name, own in seconds.items()}
    report.timings += times.values()
    for name, timing in times.items():
        if name != BASELINE:
            report.rows.append(compared(f"{data.name}: time to train, {name}", timing, times[BASELINE]))


if __name__ == "__main__":
    script(measure)
