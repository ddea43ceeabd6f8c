"""Do ensembles predict better, and which? Methods at equal cost on data sets of packages, as `quality.toml` says.

Validation rows choose decays, rates and step sizes; nothing is fitted to test rows. Scores are means over folds, with
standard errors. Differences from the baseline are taken fold by fold; their errors are those of Nadeau and Bengio
(2003) where folds share rows to train by. Bold is significant at 5 %. `--save` writes the tables beside the JSON.
"""

import json
import pathlib
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.stats
from _contenders import METHODS
from _data import Data, load
from _measure import Report, in_child, markdown, ratio_row, script
from _task import Amount, Fitted, Task, num_weights

import eqx_ensemble as ee
from eqx_ensemble._cores import num_cores

CONFIG = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
LEVEL = 0.9
Scores = dict[str, np.ndarray]  # of one method: by the name of a score, its values `(folds,)`


def measure(quick: bool, parts: Sequence[str]) -> Report:
    report = Report("Quality of methods")
    config = {key: CONFIG[key] | (CONFIG["quick"][key] if quick else {}) for key in ("amount", "methods")}
    chosen = (CONFIG["quick"] if quick else CONFIG)["data"]
    names = [name for name in parts if name in chosen]
    if len(names) == 1:
        methods = dict.fromkeys(method for group in chosen[names[0]] for method in config["methods"][group])
        _compare(report, load(names[0]), Amount(**config["amount"]), list(methods))
    else:  # scores do not depend on what else runs: as many data sets at a time as there are cores
        child = lambda name: in_child(__file__, "--parts", name, *["--quick"] * quick, OMP_NUM_THREADS="1")
        with ThreadPoolExecutor(num_cores()) as pool:
            for found in pool.map(child, names):
                report.rows += found.rows
                report.facts |= found.facts
                report.text += found.text
    report.facts["configuration"] = json.dumps(config | {"data": chosen})
    return report


def _compare(report: Report, data: Data, amount: Amount, methods: list[str]) -> None:
    """All methods in all folds, beside the first of them."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    for fold in range(amount.folds):
        task = Task(data, amount, fold)
        one = num_weights(task.build(1).stacked)
        for name in methods:
            fitted = METHODS[name](task)
            if fitted is not None:
                found[name].append(_scores(fitted, task) | {"weights": fitted.weights / one})
    rows = [f"{len(part[0])} {what}" for part, what in zip(task.split, ("train", "validation", "test"), strict=False)]
    report.facts[f"{data.name}: rows"] = ", ".join(rows)
    found = {name: folds for name, folds in found.items() if len(folds) == amount.folds}
    scores = {name: {s: np.array([x[s] for x in folds]) for s in folds[0]} for name, folds in found.items()}
    baseline = methods[0]
    text, gaps = markdown_table(scores, baseline, 0.25 if data.kind == "folds" else 0.0)
    report.text += f"\n## {data.name}\n\n{', '.join(rows)} rows; bold differs from *{baseline}*.\n\n{text}\n"
    for name, gap in gaps.items():
        if np.isfinite(gap).all():  # a mean log-likelihood may be negative: the ratio of two is that of likelihoods
            report.rows.append(ratio_row(f"{data.name}: NLL, {name}", f"{name} / {baseline}", np.exp(gap)))


def _scores(fitted: Fitted, task: Task) -> dict[str, float]:
    """Means over groups of components."""
    y, parts = task.split.test[1], fitted.predict(task.inputs)
    parts = parts if isinstance(parts, tuple) else (parts,)
    count = len(parts[0])
    size = fitted.group or count
    groups = [tuple(part[i : i + size] for part in parts) for i in range(0, count - size + 1, size)]
    score = class_scores if task.data.num_classes else gaussian_scores
    found = [score(*group, y) for group in groups]
    return {name: float(np.mean([scores[name] for scores in found])) for name in found[0]}


def class_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Of the mixture of logits `(members, rows, classes)`; rows after those with labels have unknown classes."""
    entropy = np.asarray(ee.uncertainty.entropy(ee.combine.mixture(logits)))
    unknown = np.arange(logits.shape[1]) >= len(labels)
    logits = logits[:, : len(labels)]
    found = {
        "NLL": ee.scores.nll(logits, labels),
        "accuracy": ee.scores.accuracy(logits, labels),
        "Brier": ee.scores.brier(logits, labels),
        "ECE": ee.scores.ece(logits, labels, debiased=True),
    }
    if unknown.any():
        found["AUROC of unknown"] = ee.scores.auroc(entropy, unknown)
    return {name: float(value) for name, value in found.items()}


def gaussian_scores(mean: Any, variance: Any, y: np.ndarray) -> dict[str, float]:
    """Of the mixture of Gaussians `(members, rows)`, in units of the targets' standard deviation."""
    mean, variance = jnp.asarray(mean), jnp.asarray(variance)
    low, high = ee.uncertainty.gaussian_mixture_interval(mean, variance, level=LEVEL)
    found = {
        "NLL": ee.scores.nll_gaussian_mixture(mean, variance, y),
        "CRPS": ee.scores.crps_gaussian_mixture(mean, variance, y),
        "RMSE": ee.scores.rmse(mean, y),
        f"coverage of {LEVEL:.0%}": ee.scores.coverage(low, high, y),
        "width": ee.scores.width(low, high),
    }
    return {name: float(value) for name, value in found.items()}


def standard_error(values: np.ndarray, ratio: float = 0.0) -> float:
    """Of the mean over folds; `ratio` is that of rows to test and rows to train where folds share the latter."""
    return float(values.std(ddof=1) * np.sqrt(1 / len(values) + ratio))


def markdown_table(scores: dict[str, Scores], baseline: str, ratio: float) -> tuple[str, dict[str, np.ndarray]]:
    """Scores, with the difference of NLL from the baseline; the differences `(folds,)`."""
    names = list(scores[baseline])
    headings, rows = ["method", *names[:-1], "NLL, difference", "weights"], []
    gaps = {name: own["NLL"] - scores[baseline]["NLL"] for name, own in scores.items() if name != baseline}
    for method, own in scores.items():
        cells = [_text(own[name], own[name] - scores[baseline][name], ratio) for name in names[:-1]]
        gap = _with_error(gaps[method], ratio, "+") if method in gaps else ""
        rows.append([method, *cells, gap, f"{own['weights'].mean():.3g}"])
    return markdown(headings, rows), gaps


def _text(values: np.ndarray, gaps: np.ndarray, ratio: float) -> str:
    """A score, bold where it differs from the baseline's."""
    text, limit = _with_error(values), scipy.stats.t.ppf(0.975, len(values) - 1)
    known = np.isfinite(gaps).all() and np.ptp(gaps) > 0
    return f"**{text}**" if known and abs(gaps.mean()) > limit * standard_error(gaps, ratio) else text


def _with_error(values: np.ndarray, ratio: float = 0.0, sign: str = "") -> str:
    if not np.isfinite(values).all():
        return "infinite"
    return f"{values.mean():{sign}.3f} ± {standard_error(values, ratio):.3f}"


if __name__ == "__main__":
    script(measure, parts=tuple(CONFIG["data"]), cores=0)
