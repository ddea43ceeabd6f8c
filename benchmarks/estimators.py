"""Estimators without arguments, beside what else one would try on a table in the same time.

Five random splits of each table into 80 % to train and 20 % to test; every contender gets the same rows, and chooses by
rows of those to train. The boosting of scikit-learn is searched at random for as long as our fit took. The best draw is
one network of our random search: the tuned network that a search without an ensemble would return. Its seeds are as
many networks as we draw, with the hyperparameters of the best draw and other initialisations, selected likewise.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from _measure import Report, ratio_row, script
from sklearn import datasets, ensemble
from sklearn.compose import make_column_transformer
from sklearn.metrics import accuracy_score, log_loss, root_mean_squared_error
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from eqx_ensemble.sklearn import EnsembleClassifier, EnsembleRegressor
from eqx_ensemble.sklearn._member import TableNetwork

OURS, BEST, SEEDS = "ensemble", "best draw", "seeds of the best draw"
SPLITS, HELD_OUT, LEVEL = 5, 0.15, 0.9


class Table(NamedTuple):
    """A data frame and its targets: classes, or numbers."""

    x: pd.DataFrame
    y: np.ndarray
    classes: bool


def _diamonds() -> Table:
    """The logarithm of the price of 53,940 diamonds, by six numbers and three categories."""
    from plotnine.data import diamonds

    return Table(diamonds.drop(columns="price"), np.log(diamonds["price"].to_numpy(float)), classes=False)


def _houses() -> Table:
    """The logarithm of the median price of houses in a city of Texas in a month; with missing numbers."""
    from plotnine.data import txhousing

    known = txhousing[txhousing["median"].notna()].reset_index(drop=True)
    x = known[["city", "year", "month", "sales", "listings", "inventory"]]
    return Table(x, np.log(known["median"].to_numpy(float)), classes=False)


def _affairs() -> Table:
    """Whether one of 6,366 women, asked about marriage, age, religion and occupation, has had an affair."""
    from statsmodels.datasets import fair

    data = fair.load_pandas().data
    x = data.drop(columns="affairs").astype({"occupation": "category", "occupation_husb": "category"})
    return Table(x, (data["affairs"] > 0).to_numpy(), classes=True)


def _of_sklearn(load: Callable[..., Any], *, classes: bool) -> Table:
    x, y = load(return_X_y=True, as_frame=True)
    return Table(x, y.to_numpy(), classes)


TABLES: dict[str, Callable[[], Table]] = {
    "diamonds": _diamonds,
    "houses": _houses,
    "affairs": _affairs,
    "diabetes": partial(_of_sklearn, datasets.load_diabetes, classes=False),
    "breast cancer": partial(_of_sklearn, datasets.load_breast_cancer, classes=True),
    "digits": partial(_of_sklearn, datasets.load_digits, classes=True),
}


def measure(quick: bool, parts: Sequence[str]) -> Report:
    report = Report("Estimators")
    for name in ["diabetes"] if quick else parts:
        _compare(report, name, TABLES[name](), quick=quick)
    return report


def _compare(report: Report, name: str, table: Table, *, quick: bool) -> None:
    found: dict[str, list[list[float]]] = {}
    coverage = []
    for seed in range(2 if quick else SPLITS):
        strata = table.y if table.classes else None
        parts = train_test_split(table.x, table.y, test_size=0.2, random_state=seed, stratify=strata)
        x, test_x, y, test_y = (part.reset_index(drop=True) if hasattr(part, "iloc") else part for part in parts)
        for what, scores, seconds, covered in _contenders(table, x, y, test_x, test_y, seed, quick=quick):
            found.setdefault(what, []).append([*scores, seconds])
            coverage += [] if covered is None else [covered]
    values = {what: np.array(rows) for what, rows in found.items()}
    for other, target in ((BEST, "<= 0.95" if name == "diamonds" else ""), (SEEDS, "<= 1")):
        ratios = values[OURS][:, 0] / values[other][:, 0]
        report.rows.append(
            ratio_row(f"{name}: error beside that of the {other}", f"{OURS} / {other}", ratios, target=target)
        )
    report.text += _table(name, table, values)
    if coverage:
        report.text += f"\nIntervals for {LEVEL:.0%} cover {_text(np.array(coverage))} of the test rows.\n"


def _contenders(table: Table, x: Any, y: Any, test_x: Any, test_y: Any, seed: int, *, quick: bool) -> Any:
    """The names, test scores and seconds of all contenders, and what intervals cover."""
    kind: Any = EnsembleClassifier if table.classes else EnsembleRegressor
    options: dict[str, Any] = {"random_state": seed} | ({"num_members": 3, "max_iter": 3} if quick else {})
    score = partial(_scores, test_x, test_y, classes=table.classes)
    ours, seconds = _timed(kind(**options), x, y)
    covered = None
    if not table.classes:
        lower, upper = ours.predict_interval(test_x, level=LEVEL)
        covered = np.mean((lower <= test_y) & (test_y <= upper))
    yield OURS, score(ours), seconds, covered

    # The members of the best draw, which is always selected, as an ensemble of their own.
    best = np.flatnonzero(ours.draws_ == np.nanargmin(ours.validation_scores_))
    hyper = {name: values[best[0]].item() for name, values in ours.hyper_.items()}
    chosen, weights = ours.ensemble_, ours.weights_
    ours.ensemble_, ours.weights_ = chosen[best], np.full(len(best), 1 / len(best))
    yield BEST, score(ours), seconds, None
    ours.ensemble_, ours.weights_ = chosen, weights
    network = chosen.stacked.network
    shape = {name: hyper.pop(name) for name in ("depth", "dropout", "scale")}
    make = partial(
        TableNetwork, num_numbers=network.frequencies.shape[1], width=network.first.out_features, activation="relu",
        **shape,
    )  # fmt: skip
    again, own = _timed(kind(make, **options | {"random_state": seed + 1000}, **hyper), x, y)
    yield SEEDS, score(again), own, None

    yield "boosting, searched", *_search(table, x, y, score, seconds, seed), None
    module = "Classifier" if table.classes else "Regressor"
    encoded = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore", sparse_output=False), x.select_dtypes(exclude="number").columns),
        remainder="passthrough",
    )
    for what, estimator in {
        "boosting": getattr(ensemble, f"HistGradientBoosting{module}")(random_state=seed),
        "forest": getattr(ensemble, f"RandomForest{module}")(random_state=seed),
    }.items():
        model, own = _timed(make_pipeline(encoded, estimator), x, y)
        yield what, score(model), own, None


def _search(table: Table, x: Any, y: Any, score: Any, seconds: float, seed: int) -> tuple[Any, float]:
    """The best boosting of a random search for so many seconds, by held-out rows; fitted again to all."""
    kind: Any = getattr(ensemble, f"HistGradientBoosting{'Classifier' if table.classes else 'Regressor'}")
    strata = y if table.classes else None
    text = x.select_dtypes(exclude=["number", "category"]).columns
    as_categories = lambda x: x.astype(dict.fromkeys(text, "category"))
    train_x, held_x, train_y, held_y = train_test_split(x, y, test_size=HELD_OUT, random_state=seed, stratify=strata)
    draw, start, best = np.random.default_rng(seed), time.perf_counter(), (np.inf, {})
    while time.perf_counter() - start < seconds:
        own = {
            "learning_rate": float(np.exp(draw.uniform(np.log(0.01), np.log(0.3)))),
            "max_leaf_nodes": int(draw.integers(7, 128)),
            "min_samples_leaf": int(draw.integers(5, 101)),
            "l2_regularization": float(np.exp(draw.uniform(np.log(1e-3), np.log(10)))),
        }
        options = {"categorical_features": "from_dtype", "random_state": seed, "max_iter": 1000}
        model = kind(**options, **own, early_stopping=True)
        model.fit(as_categories(train_x), train_y, X_val=as_categories(held_x), y_val=held_y)
        error = _scores(as_categories(held_x), held_y, model, classes=table.classes)[0]
        best = min(best, (error, options | own | {"max_iter": max(model.n_iter_, 1)}), key=lambda found: found[0])
    model = kind(**best[1], early_stopping=False).fit(as_categories(x), y)
    as_before = lambda method: lambda x: getattr(model, method)(as_categories(x))
    wrapped = type("Searched", (), {name: staticmethod(as_before(name)) for name in ("predict", "predict_proba")})
    return score(wrapped), time.perf_counter() - start


def _timed(model: Any, x: Any, y: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, y)
    return model, time.perf_counter() - start


def _scores(x: Any, y: Any, model: Any, *, classes: bool) -> list[float]:
    if not classes:
        return [root_mean_squared_error(y, model.predict(x))]
    proba = np.clip(np.asarray(model.predict_proba(x), float), 1e-7, None)
    proba /= proba.sum(axis=1, keepdims=True)
    return [log_loss(y, proba), accuracy_score(y, np.unique(y)[proba.argmax(axis=1)])]


def _table(name: str, table: Table, values: dict[str, np.ndarray]) -> str:
    """Scores, differences from ours split by split, and seconds; each a mean with its standard error."""
    heads = ["log loss", "accuracy"] if table.classes else ["RMSE"]
    lines = [f"\n## {name}: {len(table.x)} rows, {table.x.shape[1]} columns\n"]
    lines += [f"| | {' | '.join(heads)} | {heads[0]}, difference | seconds |", f"|{'---|' * (len(heads) + 3)}"]
    for what, rows in values.items():
        gap = "" if what == OURS else _text(rows[:, 0] - values[OURS][:, 0])
        cells = [what, *map(_text, rows[:, : len(heads)].T), gap, f"{np.median(rows[:, -1]):.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _text(values: np.ndarray) -> str:
    return f"{values.mean():.4g} ± {values.std(ddof=1) / np.sqrt(len(values)):.2g}"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    script(measure, parts=list(TABLES), cores=0)
