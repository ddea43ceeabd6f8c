"""Computes `figures.json`: the scores of other libraries on one small data set, in float64, with their versions.

Run by hand where they are installed: `python tests/scores/make_figures.py`. The tests read the file only.
"""

import importlib.metadata
import json
import pathlib

import calibration
import numpy as np
import scipy.stats
import scoringrules as sr
import torch
import torchmetrics.functional.classification as classification
from sklearn import metrics
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV, calibration_curve
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from torchmetrics.regression import ContinuousRankedProbabilityScore

PACKAGES = ["numpy", "scikit-learn", "scipy", "scoringrules", "torch", "torchmetrics", "uncertainty-calibration"]
MEMBERS, ROWS, CLASSES = 3, 80, 4
NUM_BINS, EVEN_BINS, LEVEL, QUANTILE = 7, 8, 0.8, 0.3


class Identity(ClassifierMixin, BaseEstimator):
    """A classifier whose inputs are its outputs."""

    def fit(self, x, y):
        self.classes_ = np.unique(y)
        return self

    def decision_function(self, x):
        return x

    def predict(self, x):
        return x.argmax(-1)


def make_data():
    rng = np.random.default_rng(0)
    labels = rng.integers(CLASSES, size=ROWS)
    mean, targets = rng.normal(size=(MEMBERS, ROWS)), 1.5 * rng.normal(size=ROWS)
    return {
        "labels": labels,
        "logits": np.round(6 * rng.normal(size=(MEMBERS, ROWS, CLASSES)) + 3 * np.eye(CLASSES)[labels], 3),
        "mean": np.round(mean, 3),
        "variance": np.round(rng.uniform(0.2, 2, size=(MEMBERS, ROWS)), 3),
        "targets": np.round(targets, 3),
        "vectors": np.round(rng.normal(size=(MEMBERS, ROWS, 2)), 3),
        "vector_targets": np.round(rng.normal(size=(ROWS, 2)), 3),
    }


def softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def calibrated(method, inputs, labels):
    fitted = CalibratedClassifierCV(FrozenEstimator(Identity().fit(inputs, labels)), method=method).fit(inputs, labels)
    return fitted, fitted.predict_proba(inputs)


def gap_of_curve(labels, probability, strategy):
    """The l1 calibration error of one class from the bins of scikit-learn, whose sizes come from its own edges."""
    true, mean = calibration_curve(labels, probability, n_bins=NUM_BINS, strategy=strategy)
    grid = np.linspace(0, 1, NUM_BINS + 1)
    edges = np.percentile(probability, 100 * grid) if strategy == "quantile" else grid
    count = np.bincount(np.searchsorted(edges[1:-1], probability), minlength=NUM_BINS)
    return np.sum(count[count > 0] / len(labels) * np.abs(true - mean))


def of_classes(data):
    labels, p = data["labels"], softmax(data["logits"]).mean(0)
    tensors, classes = (torch.tensor(p), torch.tensor(labels)), list(range(CLASSES))
    top = list(zip(p.max(-1), p.argmax(-1) == labels, strict=True))
    bins = calibration.utils.bin(top, calibration.utils.get_equal_prob_bins(p.max(-1), NUM_BINS))
    equal = calibration.utils.bin(top, calibration.utils.get_equal_bins(p.max(-1), EVEN_BINS))
    error = lambda norm: classification.multiclass_calibration_error(*tensors, CLASSES, NUM_BINS, norm).item()
    each = lambda strategy: np.mean([gap_of_curve(labels == c, p[:, c], strategy) for c in classes])
    return {
        "nll": metrics.log_loss(labels, p, labels=classes),
        "brier": metrics.brier_score_loss(labels, p, labels=classes, scale_by_half=False),
        "accuracy": classification.multiclass_accuracy(*tensors, CLASSES, average="micro").item(),
        "ranked_probability": sr.rps_score(labels + 1, p, backend="numpy").mean(),
        "ece": error("l1"),
        "ece of equal mass": gap_of_curve(p.argmax(-1) == labels, p.max(-1), "quantile"),
        "classwise_ece": each("uniform"),
        "classwise_ece of equal mass": each("quantile"),
        "squared_calibration_error of equal width": error("l2") ** 2,
        "squared_calibration_error of equal width, debiased": calibration.utils.unbiased_square_ce(bins),
        "squared_calibration_error, debiased": calibration.utils.unbiased_square_ce(equal),
    }


def of_values(data):
    mean, variance, y, draws = data["mean"], data["variance"], data["targets"], data["mean"].T
    sigma, numpy = np.sqrt(variance), {"backend": "numpy"}
    vectors = data["vector_targets"], data["vectors"]
    crps = ContinuousRankedProbabilityScore()
    crps.update(torch.tensor(draws), torch.tensor(y))
    return {
        "crps nrg": sr.crps_ensemble(y, draws, estimator="nrg", **numpy).mean(),
        "crps fair": sr.crps_ensemble(y, draws, estimator="fair", **numpy).mean(),
        "crps of torchmetrics": crps.compute().item(),
        "crps_gaussian": sr.crps_normal(y, mean[0], sigma[0], **numpy).mean(),
        "crps_gaussian_mixture": sr.crps_mixnorm(y, mean.T, sigma.T, **numpy).mean(),
        "nll_gaussian": sr.logs_normal(y, mean[0], sigma[0], **numpy).mean(),
        "nll_gaussian_mixture": sr.logs_mixnorm(y, mean.T, sigma.T, **numpy).mean(),
        "pit_gaussian_mixture": scipy.stats.norm.cdf(y, mean, sigma).mean(),
        "rmse": metrics.root_mean_squared_error(y, mean.mean(0)),
        "interval_score": sr.interval_score(y, mean[0] - sigma[0], mean[0] + sigma[0], 1 - LEVEL, **numpy).mean(),
        "pinball": metrics.mean_pinball_loss(y, mean[0], alpha=QUANTILE),
        "dawid_sebastiani": sr.dssuv_ensemble(y, draws, **numpy).mean(),
        "energy nrg": sr.es_ensemble(*vectors, m_axis=0, **numpy).mean(),
        "energy fair": sr.es_ensemble(*vectors, m_axis=0, estimator="fair", **numpy).mean(),
    }


def of_calibration(data):
    labels, log_p = data["labels"], np.log(softmax(data["logits"]).mean(0))
    fitted, cooled = calibrated("temperature", log_p, labels)
    binary = data["labels"] % 2
    two = np.log(softmax(data["logits"][0, :, :2]))
    regression = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000, solver="newton-cg").fit(log_p, labels)
    return {
        "temperature": 1 / fitted.calibrated_classifiers_[0].calibrators[0].beta_,
        "temperature: probabilities": cooled,
        "isotonic: probabilities": calibrated("isotonic", np.exp(log_p), labels)[1],
        "isotonic of two classes: probabilities": calibrated("isotonic", np.exp(two)[:, 1], binary)[1],
        "matrix: probabilities": regression.predict_proba(log_p),
    }


def plain(value):
    return np.asarray(value).tolist()


if __name__ == "__main__":
    data = make_data()
    figures = of_classes(data) | of_values(data) | of_calibration(data)
    written = {
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "data": {name: plain(value) for name, value in data.items()},
        "figures": {name: plain(value) for name, value in figures.items()},
    }
    path = pathlib.Path(__file__).with_name("figures.json")
    path.write_text(json.dumps(written, separators=(",", ":")) + "\n")
