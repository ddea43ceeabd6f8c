"""How many members, which method, which calibration? Held-out scores on three data sets that scikit-learn carries.

A row is a ratio of two scores of the same splits, below one where the first is better: the median over splits, with
quartiles. The scores themselves are among the facts.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Report, ratio_row, script
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

import eqx_ensemble as ee

COUNTS = (1, 2, 3, 5, 8, 16, 32)
MEMBERS = 8  # of the methods and calibrations
CALIBRATION_ROWS = (50, 200)


@dataclasses.dataclass(frozen=True)
class Data:
    """One split: rows to train, to validate, to calibrate and to test, and what its models compute."""

    make: Callable[..., Any]
    loss: Callable[..., Any]
    parts: tuple[Any, Any, Any, Any]
    score: Callable[..., Any]  # of predictions of all members, and targets


class Gaussian(eqx.Module):
    """A mean and a variance."""

    mlp: eqx.nn.MLP

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, raw = self.mlp(x)
        return mean, jax.nn.softplus(raw) + 1e-3


def _gaussian(key: Any) -> Gaussian:
    return Gaussian(eqx.nn.MLP(10, 2, 50, 1, key=key))


def _cancer(key: Any) -> eqx.nn.MLP:
    return eqx.nn.MLP(30, 2, 50, 1, key=key)


def _digits(key: Any) -> eqx.nn.MLP:
    return eqx.nn.MLP(64, 10, 64, 2, key=key)


def _gaussian_loss(model: Any, batch: Any, key: Any) -> jax.Array:
    x, y = batch
    return ee.scores.nll_gaussian(*jax.vmap(model)(x), y)


def _class_loss(model: Any, batch: Any, key: Any) -> jax.Array:
    x, y = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))


def _gaussian_score(prediction: Any, targets: Any) -> jax.Array:
    return ee.scores.nll_gaussian_mixture(*prediction, targets)


SETS = {
    "diabetes": (load_diabetes, (160, 60, 110), _gaussian, _gaussian_loss, _gaussian_score),
    "breast cancer": (load_breast_cancer, (150, 60, 200), _cancer, _class_loss, ee.scores.nll),
    "digits": (load_digits, (300, 150, 600), _digits, _class_loss, ee.scores.nll),
}


def _split(name: str, seed: int) -> Data:
    load, sizes, make, loss, score = SETS[name]
    x, y = load(return_X_y=True)
    groups = np.split(np.random.default_rng(seed).permutation(len(x)), np.cumsum(sizes))
    scale = 16 if name == "digits" else x[groups[0]].std(0)  # some pixels are always black
    x = ((x - x[groups[0]].mean(0)) / scale).astype(np.float32)
    y = ((y - y[groups[0]].mean()) / y[groups[0]].std()).astype(np.float32) if name == "diabetes" else y
    return Data(make, loss, tuple((x[rows], y[rows]) for rows in groups), score)


@ft.cache
def _adam() -> Any:
    return optax.adam(3e-3)


def _train(data: Data, num_members: int, seed: int, *, rows: Any = None, patience: int | None = 10) -> ee.Run:
    train, validation, *_ = data.parts
    ensemble = ee.build(data.make, num_members, key=jax.random.key(seed))
    stopping = {} if patience is None else {"validation": validation, "patience": patience}
    key = jax.random.key(seed + 1000)
    return ee.fit(ensemble, data.loss, _adam(), train, rows=rows, epochs=60, batch_size=20, key=key, **stopping)


def _counts(report: Report, name: str, num_splits: int, counts: tuple[int, ...]) -> None:
    """Scores of disjoint groups of members, by how many they are, on every split."""
    scores = np.zeros((num_splits, len(counts)))
    for seed in range(num_splits):
        data = _split(name, seed)
        x, y = data.parts[3]
        prediction = _train(data, counts[-1], seed).predict(x)
        for j, count in enumerate(counts):
            groups = [slice(i, i + count) for i in range(0, counts[-1] - count + 1, count)]
            each = [data.score(jax.tree.map(lambda a, g=group: a[g], prediction), y) for group in groups]
            scores[seed, j] = np.mean(each)
    for j, count in enumerate(counts):
        _add(report, f"{name}: NLL of {count} members", scores[:, j])
    for j, count in enumerate(counts[1:], 1):
        report.rows.append(
            ratio_row(f"{name}: NLL, {count} members", f"{count} members / 1", _exp(scores[:, j] - scores[:, 0]))
        )


def _methods(report: Report, name: str, num_splits: int, num_members: int) -> None:
    found: dict[str, list[float]] = {}
    for seed in range(num_splits):
        data = _split(name, seed)
        x, y = data.parts[3]
        num_rows = len(data.parts[0][0])
        seeds = _train(data, num_members, seed)
        boot = ee.resample.bootstrap(num_rows, num_members, key=jax.random.key(seed))
        runs = {
            "seeds": seeds,
            "bootstraps": _train(data, num_members, seed, rows=boot),
            "seeds, never stopped": _train(data, num_members, seed, patience=None),
        }
        for method, run in runs.items():
            prediction = run.predict(x)
            found.setdefault(method, []).append(float(data.score(prediction, y)))
            alone = [
                float(data.score(jax.tree.map(lambda a, i=i: a[i : i + 1], prediction), y)) for i in range(num_members)
            ]
            found.setdefault(f"one of {method}", []).append(float(np.mean(alone)))
        mean_weights = ee.stack([ee.average_parameters(seeds.ensemble)])
        found.setdefault("mean weights", []).append(float(data.score(ee.predict(mean_weights, x), y)))
    alone = np.array(found["one of seeds"])
    for method, scores in found.items():
        _add(report, f"{name}: NLL of {method}", np.array(scores))
        report.rows.append(ratio_row(f"{name}: NLL, {method}", f"{method} / one member", _exp(scores - alone)))


def _calibrations(report: Report, name: str, num_splits: int, num_members: int, *, patience: int | None) -> None:
    """Of classifiers: NLL and calibration error by the number of rows that calibrate."""
    title = f"{name}, {'never stopped' if patience is None else 'stopped early'}"
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed in range(num_splits):
        data = _split(name, seed)
        run = _train(data, num_members, seed, patience=patience)
        held_out, labels = run.predict(data.parts[2][0]), data.parts[2][1]
        logits, truth = run.predict(data.parts[3][0]), data.parts[3][1]
        before = {score: float(getattr(ee.scores, score)(logits, truth)) for score in ("nll", "ece")}
        for method, calibrated in _calibrate(held_out, labels, logits).items():
            for score, value in before.items():
                pair = float(getattr(ee.scores, score)(calibrated, truth)), value
                found.setdefault((method, score), []).append(pair)
    for (method, score), pairs in found.items():
        after, before = np.array(pairs).T
        _add(report, f"{title}: {score.upper()} after {method}", after)
        if method != "none" and np.isfinite(after).all():  # probabilities of zero have an infinite NLL
            report.rows.append(ratio_row(f"{title}: {score.upper()}, {method}", f"{method} / none", after / before))


def _calibrate(held_out: jax.Array, labels: np.ndarray, logits: jax.Array) -> dict[str, jax.Array]:
    """Calibrated predictions, by method; without those that refuse these rows."""
    found = {"none": logits}
    for count in CALIBRATION_ROWS:
        few, known = held_out[:, :count], labels[:count]
        for method, calibrate in {
            "temperature of the mixture": ft.partial(ee.calibrate.temperature, pool="mixture"),
            "temperature of each member": ft.partial(ee.calibrate.temperature, pool="members"),
            "vector": ft.partial(ee.calibrate.vector, pool="mixture"),
            "isotonic": ft.partial(ee.calibrate.isotonic, pool="mixture"),
        }.items():
            try:
                found[f"{method}, {count} rows"] = calibrate(few, known)(logits)
            except ValueError:  # a member without a mistake has no optimal temperature
                continue
    return found


def _exp(differences: Any) -> np.ndarray:
    """NLLs may be negative: the ratio of two is that of likelihoods."""
    return np.exp(np.asarray(differences))


def _add(report: Report, name: str, values: np.ndarray) -> None:
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    report.facts[name] = f"{np.mean(values):.4f} (standard error {error:.4f}, {len(values)} splits)"


def measure(quick: bool) -> Report:
    report = Report("Choosing")
    num_splits, members = (2, 2) if quick else (5, MEMBERS)
    for name in ("digits",) if quick else SETS:
        _counts(report, name, num_splits, COUNTS[:2] if quick else COUNTS)
        _methods(report, name, num_splits, members)
    for patience in (10, None):
        _calibrations(report, "digits", num_splits, members, patience=patience)
    return report


if __name__ == "__main__":
    script(measure)
