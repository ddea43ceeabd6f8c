"""Scores of predictions on test rows, and standard errors over folds."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import eqx_ensemble as ee

LEVEL = 0.9
FEWEST_ERRORS = 5
"""In any fold: with fewer there is no AUROC of errors."""


def standard_error(values: np.ndarray) -> float:
    """Of the mean over folds, as if these were independent."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def corrected_error(values: np.ndarray) -> float:
    """Of the mean over folds of 20 % of the rows to test, and the others to train, which folds share."""
    return float(values.std(ddof=1) * np.sqrt(1 / len(values) + 0.2 / 0.8))


def class_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Of the mixture of logits `(members, rows, classes)`; rows after those with labels have unknown classes."""
    entropy = np.asarray(ee.uncertainty.entropy(ee.combine.mixture(logits)))
    unknown = np.arange(logits.shape[1]) >= len(labels)
    logits = logits[:, : len(labels)]
    wrong = np.asarray(ee.combine.mixture(logits)).argmax(-1) != labels
    few = min(wrong.sum(), (~wrong).sum()) < FEWEST_ERRORS
    found = {
        "accuracy": ee.scores.accuracy(logits, labels),
        "NLL": ee.scores.nll(logits, labels),
        "Brier": ee.scores.brier(logits, labels),
        "ECE": ee.scores.ece(logits, labels, debiased=True),
        "AUROC of errors": np.nan if few else ee.scores.auroc(entropy[: len(labels)], wrong),
        "AUROC of unknown classes": ee.scores.auroc(entropy, unknown) if unknown.any() else np.nan,
    }
    return {name: float(value) for name, value in found.items()}


def gaussian_scores(mean: Any, variance: Any, y: np.ndarray) -> dict[str, float]:
    """Of the mixture of Gaussians `(members, rows)`, in units of the targets' standard deviation."""
    mean, variance = jnp.asarray(mean), jnp.asarray(variance)
    low, high = ee.uncertainty.gaussian_mixture_interval(mean, variance, level=LEVEL)
    found = {
        "RMSE": ee.scores.rmse(mean, y),
        "NLL": ee.scores.nll_gaussian_mixture(mean, variance, y),
        "CRPS": ee.scores.crps_gaussian_mixture(mean, variance, y),
        f"coverage of {LEVEL:.0%}": ee.scores.coverage(low, high, y),
        "width": ee.scores.width(low, high),
    }
    return {name: float(value) for name, value in found.items()}
