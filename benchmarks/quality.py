"""Do ensembles predict better? Five ways to spend compute, on data sets that packages carry.

Every split standardises by its training rows; all methods see the same splits and stop by the same validation rows. The
scores of one member are means over the ten of the ensemble. Standard errors are over splits.
"""

import functools as ft
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Report, script, table
from _members import Heads, Net, as_gaussian, negative_log_likelihood
from _tables import Table, tables

import eqx_ensemble as ee

NUM_MEMBERS, NUM_PASSES, DROPOUT = 10, 50, 0.1
LEVEL = 0.9
ADAM = optax.adam(3e-3)


def measure(quick: bool) -> Report:
    report = Report("Do ensembles predict better?")
    seeds = range(2 if quick else 5)
    epochs = 2 if quick else 200
    for data in tables(quick=quick):
        if isinstance(data, str):
            report.facts[data] = "absent"
            continue
        found: dict[str, list[dict[str, float]]] = {}
        for seed in seeds:
            for name, scores in _compare(data, seed, epochs).items():
                found.setdefault(name, []).append(scores)
        report.facts[f"{data.name}, {len(data.x):,} rows, {data.x.shape[1]} features"] = "\n" + _text(found)
    return report


def _text(found: dict[str, list[dict[str, float]]]) -> str:
    """A table of means, with standard errors."""
    names = list(next(iter(found.values()))[0])
    lines = []
    for method, scores in found.items():
        values = {name: np.array([score[name] for score in scores]) for name in names}
        values["seconds"] = values["seconds"][1:]  # the first compiles
        errors = {name: v.std(ddof=1) / len(v) ** 0.5 if len(v) > 1 else np.nan for name, v in values.items()}
        cells = (f"{values[name].mean():.3f} ± {errors[name]:.3f}" for name in names)
        lines.append([method, *("" if cell.startswith("nan") else cell for cell in cells)])
    return table(["", *names], lines)


@ft.cache
def _maker(kind: str, sizes: tuple[int, ...]) -> Callable[[Any], eqx.Module]:
    if kind == "heads":
        return lambda key: Heads(sizes, NUM_MEMBERS, key=key)
    return lambda key: Net(sizes, DROPOUT if kind == "dropout" else 0.0, key=key)


def _loss(model: Callable[..., jax.Array], batch: tuple[jax.Array, jax.Array], key: Any) -> jax.Array:
    """Mean over rows; of all heads, where there are any."""
    x, y = batch
    keys = jax.random.split(key, len(x))
    return jnp.mean(jax.vmap(negative_log_likelihood)(jax.vmap(model)(x, keys), y))


def _compare(data: Table, seed: int, epochs: int) -> dict[str, dict[str, float]]:
    """The scores of all methods on one split."""
    train, validation, test = data.split(seed)
    width = 50 if len(data.x) * data.x.shape[1] < 100_000 else 128
    sizes = (data.x.shape[1], width, width, data.num_classes or 2)
    batch_size = 32 if len(train[0]) < 2000 else 128
    key = jax.random.key(seed)
    fit = ft.partial(_fit, sizes, train, validation, epochs, batch_size, key)

    single, seconds = fit("plain", 1)
    members, of_members = fit("plain", NUM_MEMBERS)
    outputs = np.asarray(ee.predict(members, test[0]))
    score = ft.partial(_scores, y=test[1], num_classes=data.num_classes)
    each = [score(outputs[i : i + 1]) for i in range(NUM_MEMBERS)]
    found = {"one member": {name: float(np.mean([s[name] for s in each])) for name in each[0]} | {"seconds": seconds}}
    found["ensemble of 5"] = score(outputs[:5]) | {"seconds": np.nan}  # not trained alone
    found["ensemble of 10"] = score(outputs) | {"seconds": of_members}

    rows = ee.resample.bootstrap(len(train[0]), NUM_MEMBERS, key=key)
    bootstraps, seconds = fit("plain", NUM_MEMBERS, rows=rows)
    found["10 bootstraps"] = score(np.asarray(ee.predict(bootstraps, test[0]))) | {"seconds": seconds}

    heads, seconds = fit("heads", 1)
    found["10 heads, one trunk"] = score(np.asarray(jax.vmap(heads[0])(test[0])).swapaxes(0, 1)) | {"seconds": seconds}

    dropout, seconds = fit("dropout", 1)
    found["dropout, 50 passes"] = score(_passes(dropout[0], test[0], key)) | {"seconds": seconds}
    return found


def _fit(
    sizes: tuple[int, ...],
    train: tuple[np.ndarray, ...],
    validation: tuple[np.ndarray, ...],
    epochs: int,
    batch_size: int,
    key: Any,
    kind: str,
    num_members: int,
    rows: Any = None,
) -> tuple[ee.Ensemble, float]:
    """The trained members, and the seconds that their training took."""
    ensemble = ee.build(_maker(kind, sizes), num_members, key=key)
    start = time.perf_counter()
    run = ee.fit(
        ensemble,
        _loss,
        ADAM,
        train,
        validation=validation,
        rows=rows,
        epochs=epochs,
        patience=20,
        batch_size=batch_size,
        key=key,
        progress=False,
    )
    jax.block_until_ready(run.ensemble.stacked)
    return run.ensemble, time.perf_counter() - start


def _passes(model: Net, x: np.ndarray, key: Any) -> np.ndarray:
    """Predictions with dropout switched on `(passes, rows, outputs)`."""
    model = eqx.nn.inference_mode(model, value=False)

    def one_pass(key: Any) -> jax.Array:
        return jax.vmap(model)(x, jax.random.split(key, len(x)))

    return np.asarray(jax.lax.map(one_pass, jax.random.split(key, NUM_PASSES)))


def _scores(outputs: np.ndarray, *, y: np.ndarray, num_classes: int) -> dict[str, float]:
    """Scores of the mixture of the members' predictions `(members, rows, outputs)`."""
    if num_classes:
        logits = jnp.asarray(outputs)
        mixture = np.asarray(ee.combine.mixture(logits))
        wrong = mixture.argmax(-1) != y
        found = {
            "accuracy": ee.scores.accuracy(logits, y),
            "NLL": ee.scores.nll(logits, y),
            "Brier": ee.scores.brier(logits, y),
            "ECE": ee.scores.ece(logits, y),
            "AUROC of errors": ee.scores.auroc(ee.uncertainty.entropy(mixture), wrong) if wrong.any() else np.nan,
        }
    else:
        mean, variance = as_gaussian(jnp.asarray(outputs))
        low, high = ee.uncertainty.gaussian_mixture_interval(mean, variance, level=LEVEL)
        found = {
            "RMSE": ee.scores.rmse(mean, y),
            "NLL": ee.scores.nll_gaussian_mixture(mean, variance, y),
            "CRPS": ee.scores.crps_gaussian_mixture(mean, variance, y),
            f"coverage of {LEVEL:.0%}": ee.scores.coverage(low, high, y),
            "width": ee.scores.width(low, high),
        }
    return {name: float(value) for name, value in found.items()}


if __name__ == "__main__":
    script(measure)
