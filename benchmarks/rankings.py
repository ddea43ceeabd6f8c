"""Are rankings real? False alarms and power of `ee.methods.rank`, and the claims of three papers that disagree.

Replays draw fresh rows from a population and fit random features by ridge regression, in closed form. Two methods are
the same in expectation if they differ by their random features alone ("same"), or if a ridge penalty was chosen for it
("tuned": 30 cosines, beside 10 tanh). An alarm: the probability that one is better is above .975 or below .025.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import sklearn.datasets
from _measure import Report, markdown, script
from _papers import papers

import eqx_ensemble as ee

ROWS, FEW = 100, ("tanh", 10, 1.0)
DESIGNS = {"5 x 1": (5, 1), "5 x 5": (5, 5), "10 x 3": (10, 3), "2 x 10": (2, 10), "1 x 20": (1, 20)}
SPLITS = "5 random splits x 5"
Splits = tuple[np.ndarray, np.ndarray]  # rows to train `(folds, train)` and to test `(folds, test)`
Kind = tuple[str, int, float]  # the features, their number, the ridge penalty


def measure(quick: bool, parts: Sequence[str]) -> Report:
    report = Report("Rankings")
    if "alarms" in parts:
        _alarms(report, 20 if quick else 1000)
    if "power" in parts:
        _power(report, 10 if quick else 300)
    if "papers" in parts:
        papers(report, quick)
    return report


def populations() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    rng, standard = np.random.default_rng(0), lambda x: (x - x.mean(0)) / x.std(0)
    x = rng.normal(size=(100_000, 5))
    y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] / 2 + 0.3 * x[:, 3] + 0.5 * rng.normal(size=len(x))
    yield "simulation", x, standard(y)
    yield "diabetes", *map(standard, sklearn.datasets.load_diabetes(return_X_y=True))
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    yield "digits", x / 16, 2.0 * (y % 2) - 1


def folds(count: int) -> Splits:
    """Folds of `ROWS` rows, whose order is random; of one fold, a fifth to test."""
    test = np.arange(ROWS).reshape(count if count > 1 else 5, -1)[:count]
    return np.stack([np.setdiff1d(np.arange(ROWS), rows) for rows in test]), test


def random_splits(rng: np.random.Generator) -> Splits:
    return tuple(np.split(rng.permuted(np.tile(np.arange(ROWS), (5, 1)), axis=1), [ROWS * 4 // 5], axis=1))


def errors(x: np.ndarray, y: np.ndarray, splits: Splits, seeds: int, kind: Kind | Any, rng: Any) -> np.ndarray:
    """Mean squared errors `(penalties, folds, seeds)` of ridge regressions, each on random features of its own."""
    (name, width, penalties), (train, test) = kind, splits
    num_folds = len(train)
    weight = rng.normal(size=(num_folds, seeds, x.shape[1], width)) / np.sqrt(x.shape[1])
    features = getattr(np, name)(x @ weight + rng.uniform(0, 2 * np.pi, size=(num_folds, seeds, 1, width)))
    features = np.concatenate([features * np.sqrt(2 / width), np.ones((*features.shape[:3], 1))], -1)
    at = lambda rows: features[np.arange(num_folds)[:, None], :, rows].swapaxes(1, 2)
    z = at(train)
    values, vectors = np.linalg.eigh(z.swapaxes(-1, -2) @ z)
    aim = vectors.swapaxes(-1, -2) @ (z.swapaxes(-1, -2) @ y[train][:, None, :, None])
    directions = at(test) @ vectors
    gaps = [(directions @ (aim / (values + p)[..., None]))[..., 0] - y[test][:, None] for p in np.atleast_1d(penalties)]
    return np.mean(np.square(gaps), axis=-1)


def sample(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    rows = rng.choice(len(x), ROWS, replace=False) if len(x) < 10_000 else rng.integers(len(x), size=ROWS)
    return x[rows], y[rows]


def as_bad(x: np.ndarray, y: np.ndarray, splits: Splits, tries: int) -> Kind:
    """30 cosines with a penalty so large that they are as bad as ten features of the other kind, in expectation."""
    rng, grid = np.random.default_rng(1), np.logspace(-3, 4, 71)
    gaps = np.zeros(len(grid))
    for _ in range(tries):
        rows = sample(x, y, rng)
        gaps -= errors(*rows, splits, 1, FEW, rng).mean()
        gaps += errors(*rows, splits, 1, ("cos", 30, grid), rng).mean((1, 2))
    best = int(np.argmin(gaps))
    return "cos", 30, float(np.exp(np.interp(0, gaps[best:], np.log(grid[best:]))))


def judge(one: np.ndarray, other: np.ndarray, splits: Splits) -> tuple[bool, float]:
    """Whether two methods, with errors `(folds, seeds)`, are told apart, and the seeds that would do it."""
    method, fold, seed = np.indices((2, *one.shape)).reshape(3, -1)
    train, test = (np.full(fold.size, rows.shape[1]) for rows in splits)
    columns = {"method": np.array(["one", "other"])[method], "fold": fold, "seed": seed}
    columns |= {"train_rows": train, "test_rows": test, "error": np.ravel([one, other])}
    found = ee.methods.rank(columns, "error")
    return bool(found["probability"][0] > 0.975), float(found["seeds"][0])


def _alarms(report: Report, replays: int) -> None:
    cells = []
    for name, x, y in populations():
        for null in ("same", "tuned"):
            rates = []
            for design in [*DESIGNS, SPLITS]:
                rng = np.random.default_rng(2)
                num_folds, seeds = DESIGNS.get(design, (5, 5))
                splits = random_splits(rng) if design == SPLITS else folds(num_folds)
                other = FEW if null == "same" else as_bad(x, y, splits, replays // 2)
                alarms = 0
                for _ in range(replays):
                    splits = random_splits(rng) if design == SPLITS else splits
                    rows = sample(x, y, rng)
                    both = (errors(*rows, splits, seeds, kind, rng)[0] for kind in (FEW, other))
                    alarms += judge(*both, splits)[0]
                rates.append(alarms / replays)
                report.facts[f"false alarms: {name}, {null}, {design}"] = f"{rates[-1]:.3f} of {replays}"
            cells.append([f"{name}, {null}", *(f"{rate:.3f}" for rate in rates)])
    for share in (0.0, 0.2, 1.0):
        rates = []
        for num_folds, seeds in DESIGNS.values():
            rng, splits = np.random.default_rng(4), folds(num_folds)
            draws = (_gaussian(splits, seeds, share, rng) for _ in range(replays))
            rates.append(np.mean([judge(gaps, np.zeros_like(gaps), splits)[0] for gaps in draws]))
        name = f"Gaussian, folds' variance {share:g} of seeds'"
        cells.append([name, *(f"{rate:.3f}" for rate in rates), "as 5 x 5"])
        report.facts[f"false alarms: {name}"] = ", ".join(cells[-1][1:-1])
    report.text += f"\n## False alarms\n\n{markdown(['', *DESIGNS, SPLITS], cells)}\n"


def _gaussian(splits: Splits, seeds: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Differences `(folds, seeds)`, of folds exactly as correlated as Nadeau and Bengio assume."""
    train, test = (rows.shape[1] for rows in splits)
    common, own = rng.normal(size=()), rng.normal(size=(len(splits[0]), 1))
    of_folds = np.sqrt(share) * (own + np.sqrt(test / train) * common)
    return of_folds + rng.normal(size=(len(own), seeds))


def _power(report: Report, replays: int, pilot: int = 3, most: int = 60) -> None:
    """Up to 40 features are better than 10. A pilot says how many seeds would tell; so many are tried in its folds."""
    splits, cells = folds(5), []
    for name, x, y in populations():
        rng, found = np.random.default_rng(3), []
        for _ in range(replays):
            rows = sample(x, y, rng)
            better = "tanh", int(rng.integers(11, 41)), 1.0
            more, few = (errors(*rows, splits, most, kind, rng)[0] for kind in (better, FEW))
            at = lambda count, more=more, few=few: judge(more[:, :count], few[:, :count], splits)
            (early, seeds), late = at(pilot), at(most)[0]
            found.append((early, seeds, at(int(seeds))[0] if seeds <= most else late, late))
        early, seeds, then, late = np.array(found, float).T
        finite = np.isfinite(seeds)
        groups = {f"up to {most}": seeds <= most, "more": finite & (seeds > most), "infinite": ~finite}
        left = [own & (early == 0) for own in groups.values()]
        left = [f"{then[own].mean():.2f} of {own.sum()}" if own.any() else "–" for own in left]
        cells.append([name, f"{early.mean():.2f}", f"{late.mean():.2f}", *left])
        report.facts[f"power: {name}"] = ", ".join(cells[-1][1:])
    headings = ["told apart", f"{pilot} seeds", f"{most} seeds", *(f"if a pilot asks for {name}" for name in groups)]
    report.text += f"\n## Power\n\n{markdown(headings, cells)}\n"


if __name__ == "__main__":
    script(measure, parts=("alarms", "power", "papers"))
