"""Uncertainty: array functions beside the shortest NumPy or scikit-learn with the same result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import Contender, Report, Timing, compared, interleaved, script

import eqx_ensemble as ee

Ways = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def measure(quick: bool) -> Report:
    report, rng = Report("Uncertainty"), np.random.default_rng(0)
    shape = (8, 1000, 10) if quick else (64, 50_000, 10)
    values = rng.normal(size=shape).astype(np.float32)
    targets = rng.normal(size=shape[1:]).astype(np.float32)
    labels = rng.integers(shape[-1], size=shape[1])
    size = f"{shape[0]} members, {shape[1]:,} rows, {shape[2]} columns"
    _race(report, size, "numpy", _of_values(values, targets) | _of_classes(values, labels), quick=quick)
    scores, hits = values[0, :, 0], labels < 3
    _race(report, f"{shape[1]:,} rows", "numpy", _of_rows(scores, targets[:, 0] ** 2, values[0], labels), quick=quick)
    _race(report, f"{shape[1]:,} rows", "scikit-learn", _of_sklearn(scores, hits), quick=quick)
    draws = 100 if quick else 1000
    ways = {"bootstrap": _bootstraps(scores, draws)}
    _race(report, f"{shape[1]:,} rows, {draws:,} draws", "numpy", ways, quick=quick, same=False)
    return report


def _race(report: Report, size: str, peer: str, ways: Ways, *, quick: bool, same: bool = True) -> None:
    """Results are compared before times, but for the `same` draws."""
    for name, (ours, theirs) in ways.items():
        if same:
            pairs = zip(jax.tree.leaves(ours()), jax.tree.leaves(theirs()), strict=True)
            far = max(np.max(np.abs(np.asarray(one, np.float64) - other)) for one, other in pairs)
            assert far < 1e-5, f"{name} differs from {peer} by {far:.1e}"
        question = f"{name}, {size}"
        times = interleaved([Contender("eqx_ensemble", ours), Contender(peer, theirs)], rounds=3 if quick else 7)
        report.timings += [Timing(f"{question}: {who}", time.wall, time.cpu) for who, time in times.items()]
        report.rows.append(compared(f"{question}: time", times[peer], times["eqx_ensemble"], target=">= 0.8"))


def _of_values(values: np.ndarray, targets: np.ndarray) -> Ways:
    variance, n = np.exp(values), len(values)
    v, t, s = (jnp.asarray(x) for x in (values, targets, variance))
    level = n - n // 10 - 1  # the rank of the quantile of level 0.9
    return {
        "mean": (lambda: ee.combine.mean(v), lambda: values.mean(0)),
        "moments": (lambda: ee.combine.moments(v), lambda: (values.mean(0), values.var(0))),
        "Gaussian": (lambda: ee.combine.gaussian(v, s), lambda: (values.mean(0), values.var(0) + variance.mean(0))),
        "squared error and ambiguity": (
            lambda: ee.uncertainty.decompose_squared_error(v, t)[::2],
            lambda: ((values.mean(0) - targets) ** 2, values.var(0)),
        ),
        "PIT": (lambda: ee.scores.pit(v, t), lambda: (values < targets).mean(0) + (values == targets).mean(0) / 2),
        "RMSE": (lambda: ee.scores.rmse(v, t), lambda: np.sqrt(((values.mean(0) - targets) ** 2).mean())),
        "median": (lambda: ee.combine.median(v), lambda: np.median(values, axis=0)),
        "quantile": (lambda: ee.uncertainty.quantile(v, 0.9), lambda: np.partition(values, level, axis=0)[level]),
        "CRPS": (lambda: ee.scores.crps(v, t, reduction="none"), lambda: _crps(values, targets)),
    }


def _of_classes(logits: np.ndarray, labels: np.ndarray) -> Ways:
    """The mixture of the members, and votes."""
    x, y, rows, eye = jnp.asarray(logits), jnp.asarray(labels), np.arange(len(labels)), np.eye(logits.shape[-1])
    return {
        "entropies": (lambda: ee.uncertainty.decompose_entropy(x), lambda: _entropies(logits)),
        "votes": (
            lambda: ee.combine.vote(x),
            lambda: eye[logits.argmax(-1)].mean(0),
        ),
        "NLL": (lambda: ee.scores.nll(x, y), lambda: -np.log(_probabilities(logits).mean(0)[rows, labels]).mean()),
        "accuracy": (
            lambda: ee.scores.accuracy(x, y),
            lambda: (_probabilities(logits).mean(0).argmax(-1) == labels).mean(),
        ),
        "Brier score": (
            lambda: ee.scores.brier(x, y),
            lambda: ((_probabilities(logits).mean(0) - eye[labels]) ** 2).sum(-1).mean(),
        ),
    }


def _of_rows(scores: np.ndarray, losses: np.ndarray, logits: np.ndarray, labels: np.ndarray) -> Ways:
    logs = np.log(_probabilities(logits))
    s, l, x, y = (jnp.asarray(a) for a in (scores, losses, logs[None], labels))
    return {
        "AURC": (lambda: ee.scores.aurc(s, l), lambda: _aurc(scores, losses)),
        "calibration error": (lambda: ee.scores.ece(x, y), lambda: _ece(logs, labels)),
    }


def _of_sklearn(scores: np.ndarray, hits: np.ndarray) -> Ways:
    from sklearn import metrics

    s, h = jnp.asarray(scores), jnp.asarray(hits)
    return {
        "AUROC": (lambda: ee.scores.auroc(s, h), lambda: metrics.roc_auc_score(hits, scores)),
        "average precision": (lambda: ee.scores.aupr(s, h), lambda: metrics.average_precision_score(hits, scores)),
    }


def _bootstraps(values: np.ndarray, draws: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    v = jnp.asarray(values)

    def by_numpy() -> Any:
        rng, count = np.random.default_rng(0), len(values)
        means = [values[rng.integers(0, count, count)].mean() for _ in range(draws)]
        return np.std(means, ddof=1), np.quantile(means, (0.05, 0.95))

    return lambda: ee.scores.bootstrap(v, num_draws=draws, key=jax.random.key(0)), by_numpy


def _probabilities(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def _entropies(logits: np.ndarray) -> tuple[np.ndarray, ...]:
    p = _probabilities(logits)
    mixed = p.mean(0)
    total, aleatoric = -(mixed * np.log(mixed)).sum(-1), -(p * np.log(p)).sum(-1).mean(0)
    return total, aleatoric, total - aleatoric


def _crps(values: np.ndarray, targets: np.ndarray) -> np.ndarray:
    errors = np.sort(values - targets, axis=0)
    below = (np.arange(1, len(values)) / len(values)).astype(np.float32)[:, None, None]
    under = (below**2 * np.diff(np.minimum(errors, 0), axis=0)).sum(0)
    over = ((1 - below) ** 2 * np.diff(np.maximum(errors, 0), axis=0)).sum(0)
    return under + over + np.maximum(errors[0], 0) + np.maximum(-errors[-1], 0)


def _aurc(values: np.ndarray, losses: np.ndarray) -> np.floating:
    return np.mean(np.cumsum(losses[np.argsort(values)], dtype=np.float64) / np.arange(1, len(values) + 1))


def _ece(logs: np.ndarray, labels: np.ndarray, num_bins: int = 15) -> np.floating:
    confidence, hits = np.exp(logs.max(-1)), logs.argmax(-1) == labels
    index = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)
    gaps = np.bincount(index, confidence, num_bins) - np.bincount(index, hits, num_bins)
    return np.abs(gaps).sum() / len(labels)


if __name__ == "__main__":
    script(measure)
