"""Computes `figures.json`: prediction sets of MAPIE on one small data set, with its version.

Run by hand where it is installed: `python tests/conformal/make_figures.py`. The tests read the file only.
"""

import importlib.metadata
import json
import pathlib

import numpy as np
from mapie.classification import CrossConformalClassifier, SplitConformalClassifier
from mapie.conformity_scores import LACConformityScore, TopKConformityScore
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import PredefinedSplit

PACKAGES = ["MAPIE", "numpy", "scikit-learn"]
ROWS, NEW, CLASSES, FOLDS = 99, 20, 4, 3
LEVELS = [0.7, 0.9]
SCORES = {"lac": LACConformityScore, "top_k": TopKConformityScore}


class Fold(ClassifierMixin, BaseEstimator):
    """A classifier whose inputs are the logits of all folds' models; training tells it which fold it is."""

    def fit(self, x, y):
        self.classes_ = np.arange(CLASSES)
        folds = set(range(FOLDS)) - set(x[:, -1].astype(int))
        self.fold_ = min(folds, default=0)
        return self

    def predict_proba(self, x):
        logits = x[:, :-1].reshape(len(x), FOLDS, CLASSES)[:, self.fold_]
        exponentials = np.exp(logits - logits.max(-1, keepdims=True))
        return exponentials / exponentials.sum(-1, keepdims=True)

    def predict(self, x):
        return self.predict_proba(x).argmax(-1)


def make_data():
    rng = np.random.default_rng(0)
    labels = rng.integers(CLASSES, size=ROWS + NEW)
    logits = 1.5 * rng.normal(size=(ROWS + NEW, CLASSES)) + 1.5 * np.eye(CLASSES)[labels]
    logits = np.round(logits + 0.5 * rng.normal(size=(FOLDS, ROWS + NEW, CLASSES)), 3)
    return {"labels": labels, "logits": logits, "fold": np.arange(ROWS + NEW) % FOLDS}


def main():
    data = make_data()
    x = np.concatenate([np.moveaxis(data["logits"], 0, 1).reshape(ROWS + NEW, -1), data["fold"][:, None]], axis=1)
    y, old, new = data["labels"], slice(0, ROWS), slice(ROWS, None)
    figures = {}
    for name, score in SCORES.items():
        one = Fold().fit(x[old], y[old])
        split = SplitConformalClassifier(one, LEVELS, conformity_score=score(), prefit=True)
        split.conformalize(x[old], y[old])
        sets = split.predict_set(x[new])[1]
        figures[name] = {level: sets[..., i] for i, level in enumerate(LEVELS)}
        if name == "top_k":
            continue
        cross = CrossConformalClassifier(
            Fold(), LEVELS, conformity_score=score(), cv=PredefinedSplit(data["fold"][old]), random_state=0
        )
        cross.fit_conformalize(x[old], y[old])
        sets = cross.predict_set(x[new], agg_scores="crossval")[1]
        figures[f"cross: {name}"] = {level: sets[..., i] for i, level in enumerate(LEVELS)}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    stored = {"versions": versions, "data": data, "figures": figures}
    whole = lambda array: array.astype(float if array.dtype == float else int).tolist()
    (pathlib.Path(__file__).parent / "figures.json").write_text(json.dumps(stored, default=whole))


if __name__ == "__main__":
    main()
