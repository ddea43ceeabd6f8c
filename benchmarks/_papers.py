"""Three papers of 2026 in small: MLPs on data sets of packages. The claims are those of their abstracts."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import scipy.stats
from _contenders import METHODS
from _data import load
from _measure import Report, markdown
from _task import Amount, Task
from quality import class_scores, gaussian_scores

import eqx_ensemble as ee

DATA = ["diabetes", "El Nino", "doctor visits", "breast cancer", "wine"]
NAMES = ["one member", "8 members", "BatchEnsemble", "bootstraps", "MC dropout", "SWAG"]
AMOUNT = Amount(5, 8, 8, 400, 32, 32, 3e-3, 10, 40, [1e-3, 1e-2, 0.1], [])


@dataclasses.dataclass(frozen=True, eq=False)
class Repeat(Task):
    """A fold with another seed: the same rows."""

    seed: int = 0

    @property
    def key(self) -> Any:
        return jax.random.fold_in(super().key, self.seed)


def papers(report: Report, quick: bool) -> None:
    amount = dataclasses.replace(AMOUNT, steps=40, decays=[1e-2], draws=4, folds=2) if quick else AMOUNT
    names, data = (NAMES[:3], ["wine"]) if quick else (NAMES, DATA)
    found = {name: _scores(name, amount, names, 2 if quick else 3) for name in data}
    images = {} if quick else {"digits": _scores("digits", amount, NAMES[:3], 3)}
    _batch_ensemble(report, images | found)
    _stability(report, found)


def _scores(name: str, amount: Amount, methods: list[str], seeds: int) -> dict[str, np.ndarray]:
    """The table of `compare`: the negative log-likelihood, and how far members disagree."""
    data, rows = load(name), []
    for fold, seed in np.ndindex(amount.folds, seeds):
        task = Repeat(data, amount, fold, seed)
        x, y = task.split.test
        for method in methods:
            fitted = METHODS[method](task)
            parts = fitted.predict(x)
            if data.num_classes:
                parts = parts[: fitted.group or len(parts)]
                nll = class_scores(parts, y)["NLL"]
                apart = np.mean(ee.uncertainty.decompose_entropy(parts).epistemic)
            else:
                mean, variance = (part[: fitted.group or len(part)] for part in parts)
                nll, apart = gaussian_scores(mean, variance, y)["NLL"], np.mean(np.var(mean, axis=0))
            rows.append((method, fold, seed, task.num_rows, len(y), nll, float(apart)))
    headings = ("method", "fold", "seed", "train_rows", "test_rows", "NLL", "disagreement")
    return {heading: np.array(column) for heading, column in zip(headings, zip(*rows, strict=True), strict=True)}


def _batch_ensemble(report: Report, found: dict[str, Any]) -> None:
    """Whether it is more like one model (2601.16936) or like a deep ensemble (2601.21581)."""
    cells = []
    for name, columns in found.items():
        own = {m: columns["disagreement"][columns["method"] == m].mean() for m in ("BatchEnsemble", "8 members")}
        cell = [name, f"{own['BatchEnsemble'] / own['8 members']:.2f}"]
        for baseline in ("one member", "8 members"):
            ranks = ee.methods.rank(columns, "NLL", baseline)
            at = list(ranks["method"]).index("BatchEnsemble")
            gap, error, sure, seeds = (ranks[c][at] for c in ("difference", "error", "probability", "seeds"))
            cell += [f"{gap:+.3f} ± {error:.3f}", f"{sure:.3f}", f"{seeds:.0f}"]
        report.facts[f"BatchEnsemble: {name}"] = ", ".join(cell[1:])
        cells.append(cell)
    heading = ["", "disagreement / that of 8 members"]
    heading += [
        f"{what}{name}" for name in ("one member", "8 members") for what in ("NLL − ", "better than ", "seeds: ")
    ]
    report.text += f"\n## BatchEnsemble\n\n{markdown(heading, cells)}\n"


def _stability(report: Report, found: dict[str, Any]) -> None:
    """Whether rankings are stable (2604.23102): by single seeds, and how many of their orders are sure by all fits."""
    cells = []
    for name, columns in found.items():
        methods = list(dict.fromkeys(columns["method"].tolist()))
        shape = (columns["fold"].max() + 1, columns["seed"].max() + 1, len(methods))
        nll = columns["NLL"].reshape(shape).transpose(2, 0, 1)
        tau = lambda rankings: np.mean([scipy.stats.kendalltau(*p)[0] for p in itertools.combinations(rankings, 2)])
        ranks = ee.methods.rank(columns, "NLL")
        pairs = zip(ranks["method"], ranks["baseline"], ranks["probability"], strict=True)
        sure = {(methods.index(a), methods.index(b)) for a, b, p in pairs if p > 0.95}
        claims = {"a fit": nll.reshape(len(methods), -1).T, "a seed": nll.mean(1).T}
        kept = [
            np.mean(
                [(a, b) in sure for r in rankings for a, b in itertools.permutations(range(len(r)), 2) if r[a] < r[b]]
            )
            for rankings in claims.values()
        ]
        same_fold = np.mean([tau(nll[:, fold].T) for fold in range(shape[0])])
        infinite = np.mean(np.isinf(ranks["seeds"]))
        cells.append([name, *(f"{x:.2f}" for x in (same_fold, tau(claims["a seed"]), *kept, infinite))])
        report.facts[f"rankings: {name}"] = ", ".join(cells[-1][1:])
    heading = ["", "Kendall's τ of two seeds: in a fold", "of means", "orders of a fit that are sure", "of a seed"]
    report.text += f"\n## Rankings of {len(methods)} methods\n\n{markdown([*heading, 'not by seeds'], cells)}\n"
