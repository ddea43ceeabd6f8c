"""Members trained by a CRPS of all of them, beside independent seeds, at equal steps.

Twenty pairs: four seeds of an ensemble in each of five folds or windows. The four are members of one program, in whose
loss only those of one ensemble meet. The length is that of the best validation rows, of each method and data set.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _data import FOLDS, load
from _measure import Report, script
from _task import as_gaussian

import eqx_ensemble as ee

SEEDS, MEMBERS, WIDTH = 4, 8, 32
NUMBERS = "CRPS", "fair CRPS", "RMSE of the mean", "spread / RMSE"
STAGES = (125, 125, 250, 500, 1000)  # steps, one after another
ADAM = optax.adam(1e-3)


def measure(quick: bool) -> Report:
    report, stages = Report("Losses of all members"), (5, 5) if quick else STAGES
    for name in ("diabetes",) if quick else ("diabetes", "El Nino"):
        splits = [load(name).split(fold) for fold in range(1 if quick else FOLDS)]
        found = {method: _chosen(method, splits, stages) for method in METHODS}
        base, _ = found["seeds by squared error"]
        for method, (test, steps) in found.items():
            texts = [f"{what} {_mean_and_error(x)}" for what, x in zip(NUMBERS, test.T, strict=True)]
            facts = ", ".join([*texts, f"{steps} steps"])
            less = f"; CRPS minus that of seeds {_mean_and_error((test - base)[:, 0], sign='+')}"
            report.facts[f"{name}, {method}"] = facts + (less if test is not base else "")
    return report


def _mean_and_error(values: np.ndarray, sign: str = "") -> str:
    return f"{values.mean():{sign}.4f} ({values.std(ddof=1) / len(values) ** 0.5:.4f})"


def _chosen(method: str, splits: list[Any], stages: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Numbers of the test rows `(pairs, numbers)` at the length that has the best CRPS of the validation rows."""
    found = np.stack([_numbers(method, split, fold, stages) for fold, split in enumerate(splits)], axis=2)
    validation, test = found.reshape(2, len(stages), -1, len(NUMBERS))
    best = int(validation[:, :, 0].mean(axis=1).argmin())
    return test[best], sum(stages[: best + 1])


def _numbers(method: str, split: Any, fold: int, stages: tuple[int, ...]) -> np.ndarray:
    """Those of the validation and the test rows `(2, stages, seeds, numbers)`."""
    loss, score = METHODS[method]
    size = "scalar" if score is _of_points else 2
    make = lambda key: eqx.nn.MLP(split.train[0].shape[1], size, WIDTH, 2, key=key)
    key = jax.random.key(fold)
    run = ee.build(make, SEEDS * MEMBERS, key=key)
    found, parts = [], (split.validation, split.test)
    for i, steps in enumerate(stages):
        run = ee.fit(run, loss, ADAM, split.train, steps=steps, key=None if i else key)
        found.append([[score(x, y) for x in _ensembles(np.asarray(run.predict(rows)))] for rows, y in parts])
    return np.moveaxis(np.array(found), 1, 0)


def _ensembles(outputs: Any) -> Any:
    return outputs.reshape(SEEDS, MEMBERS, *outputs.shape[1:])


def _of_points(samples: np.ndarray, y: np.ndarray) -> list[float]:
    """`NUMBERS`, the last of a spread that is free of the number of members."""
    rmse = np.sqrt(np.mean((samples.mean(0) - y) ** 2))
    spread = np.sqrt(np.mean(samples.var(0, ddof=1)) * (MEMBERS + 1) / MEMBERS)
    crps, fair = (float(ee.scores.crps(samples, y, estimator=name)) for name in ("nrg", "fair"))
    return [crps, fair, rmse, spread / rmse]


def _of_gaussians(outputs: np.ndarray, y: np.ndarray) -> list[float]:
    mean, variance = as_gaussian(outputs)
    rmse = np.sqrt(np.mean((mean.mean(0) - y) ** 2))
    spread = np.sqrt(np.mean(variance.mean(0) + mean.var(0)))
    crps = float(ee.scores.crps_gaussian_mixture(mean, variance, y))
    return [crps, crps, rmse, spread / rmse]


def _predict(model: Any, batch: Any, key: Any) -> Any:
    return jax.vmap(model)(batch[0])


def _joint(**options: Any) -> Any:
    """The sum over ensembles, so that each has the gradient that it would have alone."""
    crps = lambda predictions, batch: sum(ee.scores.crps(own, batch[1], **options) for own in _ensembles(predictions))
    return ee.train.JointLoss(_predict, crps)


def _nll(model: Any, batch: Any, key: Any) -> Any:
    mean, variance = as_gaussian(_predict(model, batch, key))
    return jnp.mean((mean - batch[1]) ** 2 / variance + jnp.log(variance)) / 2


_alone = lambda of: lambda model, batch, key: jnp.mean(of(_predict(model, batch, key) - batch[1]))
METHODS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "seeds by squared error": (_alone(jnp.square), _of_points),
    "seeds by absolute error": (_alone(jnp.abs), _of_points),
    "seeds by Gaussian likelihood": (_nll, _of_gaussians),
    "almost fair CRPS of all": (_joint(estimator="fair", alpha=0.95), _of_points),
    "CRPS of all": (_joint(), _of_points),
}


if __name__ == "__main__":
    script(measure)
