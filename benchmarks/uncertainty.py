"""Uncertainty: array functions compared with NumPy, scikit-learn and torchmetrics."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import Contender, Report, Row, Timing, compared, interleaved, script

import eqx_ensemble as ee


def measure(quick: bool) -> Report:
    report = Report("Uncertainty")
    shape = (8, 1000, 10) if quick else (64, 100_000, 10)
    logits = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    labels = np.random.default_rng(1).integers(shape[-1], size=shape[1])
    size = f"{shape[0]} members, {shape[1]:,} rows, {shape[2]} classes"
    for name, (ours, theirs) in _reductions(logits).items():
        _agree(name, ours(), theirs())
        _raced(report, f"{name}, {size}", {"eqx_ensemble": ours, "numpy": theirs}, quick=quick)
    _beside_numpy(report, logits, size, quick=quick)
    _of_classes(report, logits, labels, size, quick=quick)
    _small_calls(report, logits, labels)
    _beside_torchmetrics(report, logits, labels, quick=quick)
    _of_rows(report, logits, labels, quick=quick)
    return report


def _reductions(logits: np.ndarray) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    on_device = jnp.asarray(logits)
    return {
        "mean and variance": (lambda: ee.combine.moments(on_device), lambda: (logits.mean(0), logits.var(0))),
        "entropies": (lambda: ee.uncertainty.decompose_entropy(on_device), lambda: _entropies(logits)),
        "votes": (lambda: ee.combine.vote(on_device), lambda: _votes(logits)),
    }


def _probabilities(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def _entropies(logits: np.ndarray) -> tuple[np.ndarray, ...]:
    p = _probabilities(logits)
    mixed = p.mean(0)
    total, aleatoric = -(mixed * np.log(mixed)).sum(-1), -(p * np.log(p)).sum(-1).mean(0)
    return total, aleatoric, total - aleatoric


def _votes(logits: np.ndarray) -> np.ndarray:
    voted = logits.argmax(-1)
    return np.stack([(voted == c).mean(0) for c in range(logits.shape[-1])], -1)


def _agree(name: str, ours: Any, theirs: Any) -> None:
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        far = np.max(np.abs(np.asarray(one, np.float64) - other))
        if far > 1e-5:
            raise AssertionError(f"{name} differs from the peer by {far:.1e}")


def _raced(report: Report, question: str, ways: dict[str, Callable[[], Any] | None], *, quick: bool) -> None:
    present = [Contender(name, run) for name, run in ways.items() if run is not None]
    times = interleaved(present, rounds=3 if quick else 7)
    report.timings += [Timing(f"{question}: {name}", time.wall, time.cpu) for name, time in times.items()]
    ours, peer = ways
    report.rows.append(compared(f"{question}: time", times.get(peer), times[ours], target=">= 0.8"))


def _beside_numpy(report: Report, values: np.ndarray, size: str, *, quick: bool) -> None:
    """Functions of values, which are computed in blocks of rows, beside the shortest NumPy with the same result."""
    targets = np.random.default_rng(2).normal(size=values.shape[1:]).astype(np.float32)
    for name, (ours, theirs) in (_means(values, targets) | _orders(values, targets)).items():
        _agree(name, ours(), theirs())
        _raced(report, f"{name}, {size}", {"eqx_ensemble": ours, "numpy": theirs}, quick=quick)


Ways = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def _means(values: np.ndarray, targets: np.ndarray) -> Ways:
    variance = np.exp(values)
    v, t, s = (jnp.asarray(x) for x in (values, targets, variance))
    return {
        "mean": (lambda: ee.combine.mean(v), lambda: values.mean(0)),
        "moments": (lambda: ee.combine.moments(v), lambda: (values.mean(0), values.var(0))),
        "Gaussian": (lambda: ee.combine.gaussian(v, s), lambda: (values.mean(0), values.var(0) + variance.mean(0))),
        "mean logits": (lambda: ee.combine.mean_logits(v), lambda: _log_softmax(values.mean(0))),
        "mean logits, without the members' offsets": (
            lambda: ee.combine.mean_logits(v),
            lambda: _log_softmax((values - values.max(-1, keepdims=True)).mean(0)),
        ),
        "squared error and ambiguity": (
            lambda: ee.uncertainty.decompose_squared_error(v, t)[::2],
            lambda: ((values.mean(0) - targets) ** 2, values.var(0)),
        ),
        "PIT": (lambda: ee.scores.pit(v, t), lambda: (values < targets).mean(0) + (values == targets).mean(0) / 2),
        "root mean squared error": (
            lambda: ee.scores.rmse(v, t),
            lambda: np.sqrt(((values.mean(0) - targets) ** 2).mean()),
        ),
        "root mean squared error, of errors": (
            lambda: ee.scores.rmse(v, t),
            lambda: np.sqrt(((values - targets).mean(0) ** 2).mean()),
        ),
        "mean root mean squared error of members": (
            lambda: ee.scores.mean_member_rmse(v, t),
            lambda: np.sqrt(((values - targets) ** 2).mean((1, 2))).mean(),
        ),
    }


def _orders(values: np.ndarray, targets: np.ndarray) -> Ways:
    v, t = jnp.asarray(values), jnp.asarray(targets)
    level = len(values) - len(values) // 10 - 1  # the rank of the quantile of level 0.9
    cut = len(values) // 10
    middle = slice(len(values) // 2 - 1, len(values) // 2 + 1)
    return {
        "median": (lambda: ee.combine.median(v), lambda: np.median(values, axis=0)),
        "median, by sorting": (lambda: ee.combine.median(v), lambda: np.sort(values, axis=0)[middle].mean(0)),
        "quantile": (lambda: ee.uncertainty.quantile(v, 0.9), lambda: np.partition(values, level, axis=0)[level]),
        "quantile, by sorting": (lambda: ee.uncertainty.quantile(v, 0.9), lambda: np.sort(values, axis=0)[level]),
        "trimmed mean": (
            lambda: ee.combine.trimmed_mean(v, cut=cut / len(values)),
            lambda: np.sort(values, axis=0)[cut : len(values) - cut].mean(0),
        ),
        "CRPS": (lambda: ee.scores.crps(v, t, reduction="none"), lambda: _crps(values, targets)),
        "mean CRPS": (lambda: ee.scores.crps(v, t), lambda: _crps(values, targets).mean()),
    }


def _of_classes(report: Report, logits: np.ndarray, labels: np.ndarray, size: str, *, quick: bool) -> None:
    """Proper scores and hits of the mixture of the members."""
    x, y, rows = jnp.asarray(logits), jnp.asarray(labels), np.arange(len(labels))
    ways: Ways = {
        "NLL": (lambda: ee.scores.nll(x, y), lambda: -np.log(_probabilities(logits).mean(0)[rows, labels]).mean()),
        "accuracy": (
            lambda: ee.scores.accuracy(x, y),
            lambda: (_probabilities(logits).mean(0).argmax(-1) == labels).mean(),
        ),
        "Brier score": (
            lambda: ee.scores.brier(x, y),
            lambda: ((_probabilities(logits).mean(0) - np.eye(logits.shape[-1])[labels]) ** 2).sum(-1).mean(),
        ),
    }
    for name, (ours, theirs) in ways.items():
        _agree(name, ours(), theirs())
        _raced(report, f"{name}, {size}", {"eqx_ensemble": ours, "numpy": theirs}, quick=quick)


def _small_calls(report: Report, logits: np.ndarray, labels: np.ndarray) -> None:
    """What checks cost: a call with 32 rows, above the program that it runs."""
    x, y = jnp.asarray(logits[:, :32]), jnp.asarray(labels[:32])
    values, targets = x[..., 0], x[0, :, 1]
    log_mean = lambda x: jax.nn.logsumexp(jax.nn.log_softmax(x), axis=0) - np.log(len(x))
    bodies = {
        "NLL": (lambda: ee.scores.nll(x, y), jax.jit(lambda x, y: -jnp.mean(log_mean(x)[jnp.arange(32), y])), (x, y)),
        "PIT": (
            lambda: ee.scores.pit(values, targets),
            jax.jit(lambda v, t: jnp.mean(v < t, axis=0) + jnp.mean(v == t, axis=0) / 2),
            (values, targets),
        ),
    }
    for name, (ours, body, arguments) in bodies.items():
        _agree(name, ours(), body(*arguments))
        calls = {"ours": ours, "body": ft.partial(body, *arguments)}
        ways = [Contender(way, lambda call=call: [call() for _ in range(200)], 200) for way, call in calls.items()]
        times = interleaved(ways, rounds=7)
        above = np.median(times["ours"].cpu - times["body"].cpu) * 1e6
        question = f"{name}, 32 rows: microseconds above the compiled body"
        report.rows.append(Row(question, "CPU time", float(above), None, None, None, "<= 150"))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    relative = logits - logits.max(-1, keepdims=True)
    return relative - np.log(np.exp(relative).sum(-1, keepdims=True))


def _crps(values: np.ndarray, targets: np.ndarray) -> np.ndarray:
    errors = np.sort(values - targets, axis=0)
    below = (np.arange(1, len(values)) / len(values)).astype(np.float32)[:, None, None]
    under = (below**2 * np.diff(np.minimum(errors, 0), axis=0)).sum(0)
    over = ((1 - below) ** 2 * np.diff(np.maximum(errors, 0), axis=0)).sum(0)
    return under + over + np.maximum(errors[0], 0) + np.maximum(-errors[-1], 0)


def _beside_torchmetrics(report: Report, logits: np.ndarray, labels: np.ndarray, *, quick: bool) -> None:
    """The calibration error of the mixture, a score that torchmetrics also has."""
    mixed = jax.block_until_ready(ee.combine.mixture(jnp.asarray(logits)))
    ours = lambda: ee.scores.ece(mixed[None], jnp.asarray(labels))
    try:
        import torch
        from torchmetrics.functional.classification import multiclass_calibration_error
    except ImportError:
        theirs = None
    else:
        p, y = torch.tensor(np.exp(np.asarray(mixed))), torch.tensor(labels)
        theirs = lambda: multiclass_calibration_error(p, y, num_classes=p.shape[-1], n_bins=15).item()
        _agree("calibration error", ours(), theirs())
    question = f"calibration error, {logits.shape[1]:,} rows"
    _raced(report, question, {"eqx_ensemble": ours, "torchmetrics": theirs}, quick=quick)


def _of_rows(report: Report, logits: np.ndarray, labels: np.ndarray, *, quick: bool) -> None:
    """Scores of rows: the bootstrap, calibration errors, and rankings of rows."""
    rng, num_rows, num_draws = np.random.default_rng(3), len(labels), 100 if quick else 1000
    values, losses = rng.normal(size=num_rows).astype(np.float32), rng.random(num_rows).astype(np.float32)
    positives = rng.random(num_rows) < 0.3
    mixed = np.asarray(ee.combine.mixture(jnp.asarray(logits)))
    v, l, y, on_device, truth = (jnp.asarray(x) for x in (values, losses, positives, mixed[None], labels))
    ways: dict[str, tuple[str, Callable[[], Any], Callable[[], Any] | None]] = {
        "AURC": ("numpy", lambda: ee.scores.aurc(v, l), lambda: _aurc(values, losses)),
        "calibration error by bins": ("numpy", lambda: ee.scores.ece(on_device, truth), lambda: _ece(mixed, labels)),
        "AUROC": ("scikit-learn", lambda: ee.scores.auroc(v, y), _of_sklearn("roc_auc_score", positives, values)),
        "average precision": (
            "scikit-learn",
            lambda: ee.scores.aupr(v, y),
            _of_sklearn("average_precision_score", positives, values),
        ),
    }
    for name, (peer, ours, theirs) in ways.items():
        if theirs is not None:
            _agree(name, ours(), theirs())
        _raced(report, f"{name}, {num_rows:,} rows", {"eqx_ensemble": ours, peer: theirs}, quick=quick)
    ours = lambda: ee.scores.bootstrap(v, num_draws=num_draws, key=jax.random.key(0))
    theirs = lambda: _bootstrap(values, num_draws)  # other draws
    question = f"bootstrap, {num_rows:,} rows, {num_draws:,} draws"
    _raced(report, question, {"eqx_ensemble": ours, "numpy": theirs}, quick=quick)


def _bootstrap(values: np.ndarray, num_draws: int) -> tuple[np.floating, np.ndarray]:
    rng, count = np.random.default_rng(0), len(values)
    means = [values[rng.integers(0, count, count)].mean() for _ in range(num_draws)]
    return np.std(means, ddof=1), np.quantile(means, (0.05, 0.95))


def _aurc(values: np.ndarray, losses: np.ndarray) -> np.floating:
    return np.mean(np.cumsum(losses[np.argsort(values)], dtype=np.float64) / np.arange(1, len(values) + 1))


def _ece(logs: np.ndarray, labels: np.ndarray, num_bins: int = 15) -> np.floating:
    confidence, hits = np.exp(logs.max(-1)), logs.argmax(-1) == labels
    index = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)
    gaps = np.bincount(index, confidence, num_bins) - np.bincount(index, hits, num_bins)
    return np.abs(gaps).sum() / len(labels)


def _of_sklearn(score: str, positives: np.ndarray, values: np.ndarray) -> Callable[[], Any] | None:
    try:
        from sklearn import metrics
    except ImportError:
        return None
    return lambda: getattr(metrics, score)(positives, values)


if __name__ == "__main__":
    script(measure)
