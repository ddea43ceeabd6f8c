"""Eight members that fine-tune one network on few shifted rows: adapters beside whole copies and other methods.

A network learns 600 handwritten digits, 0 to 7. The others are turned by about 25 degrees and noisy: 80 to fine-tune,
80 to validate, which choose the learning rate and when each member stops, the rest to test; eights and nines, shifted
alike, are unknown. Members differ by row orders, and by the random matrices where there are some.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Report, ratio_row
from _models import mlp
from _problems import cross_entropy
from _quality import class_scores, standard_error

import eqx_ensemble as ee

ADAPTERS, EFFICIENT, LAPLACE = ee.methods.adapters, ee.methods.efficient, ee.methods.laplace
MEMBERS, SEEDS, RATES = 8, 5, (1e-3, 3e-3, 1e-2, 3e-2)
SIZES = (64, 128, 128, 8)
SCORES = ("accuracy", "NLL", "ECE", "AUROC of unknown classes")
last = lambda model: model.layers[-1]
build_base = ft.partial(mlp, SIZES)
adam = lambda hyper: optax.adam(hyper["lr"])

METHODS: dict[str, Callable[[Any, int, Any], ee.Ensemble]] = {
    "whole copies": lambda base, count, key: ee.stack([base] * count),
    "low_rank, rank 1": lambda base, count, key: ADAPTERS.low_rank(base, count, rank=1, key=key),
    "low_rank, rank 4": lambda base, count, key: ADAPTERS.low_rank(base, count, rank=4, key=key),
    "low_rank, rank 16": lambda base, count, key: ADAPTERS.low_rank(base, count, rank=16, key=key),
    "bias_only": lambda base, count, key: ADAPTERS.bias_only(base, count),
    "scales": lambda base, count, key: ADAPTERS.scales(base, count),
    "layers_only, the last": lambda base, count, key: ADAPTERS.layers_only(base, count, where=last),
    "from scratch": lambda base, count, key: ee.build(build_base, count, key=key),
}


def report_quality(report: Report, *, quick: bool) -> None:
    """All methods with every seed, and their scores beside those of eight whole copies."""
    found: dict[str, list[dict[str, float]]] = {}
    rates = RATES[1:2] if quick else RATES
    for seed in range(2 if quick else SEEDS):
        for name, scores in _one_seed(seed, rates, quick=quick).items():
            found.setdefault(name, []).append(scores)
    values = {name: {s: np.array([x[s] for x in own]) for s in own[0]} for name, own in found.items()}
    for name, own in values.items():
        cells = [f"{s} {own[s].mean():.4f} +- {standard_error(own[s]):.4f}" for s in SCORES]
        report.facts[f"fine-tuning: {name}"] = f"{', '.join(cells)}, {own['weights'].mean():,.0f} weights"
        if name != "whole copies":
            gap = own["NLL"] - values["whole copies"]["NLL"]
            report.facts[f"fine-tuning: NLL, {name} minus whole copies"] = (
                f"{gap.mean():+.4f} +- {standard_error(gap):.4f}"
            )
            report.rows.append(ratio_row(f"fine-tuning: NLL, {name}", f"{name} / whole copies", np.exp(gap)))


def _one_seed(seed: int, rates: tuple[float, ...], *, quick: bool) -> dict[str, dict[str, float]]:
    parts, key, epochs = shifted_digits(seed), jax.random.key(seed), 2 if quick else 60
    base = ee.fit(
        ee.build(build_base, 1, key=key),
        cross_entropy,
        optax.adam(1e-3),
        parts["before"],
        **_options(epochs, key),
    ).ensemble[0]
    inputs, y = np.concatenate([parts["test"][0], parts["unknown"]]), parts["test"][1]
    score = lambda logits: class_scores(np.asarray(logits), y)
    found = {"frozen base": score(jax.vmap(base)(inputs)[None]) | {"weights": _num_weights(base)}}
    for name, make in list(METHODS.items())[:: 4 if quick else 1]:
        run = _fit(make(base, len(rates) * MEMBERS, key), cross_entropy, parts, np.repeat(rates, MEMBERS), epochs, key)
        chosen = _best(run, parts, MEMBERS)
        logits, weights = np.asarray(ee.predict(chosen, inputs)), _num_weights(chosen)
        found[name] = score(logits) | {"weights": weights}
        each = [score(member[None]) for member in logits]
        found[f"one of {name}"] = {s: np.mean([x[s] for x in each]) for s in each[0]} | {
            "weights": _num_weights(chosen[0])
        }
        if name == "whole copies":
            posterior = _laplace(chosen[:1], parts)
            found["Laplace of the last layer of one"] = score(posterior(inputs)) | {"weights": _num_weights(base)}
    joint = ee.build(lambda key: EFFICIENT.batch_ensemble(base, MEMBERS, key=key), len(rates), key=key)
    run = _fit(joint, EFFICIENT.mean_loss(cross_entropy), parts, np.array(rates), epochs, key, score=_mixture_nll)
    chosen = _best(run, parts, 1)
    found["BatchEnsemble"] = score(EFFICIENT.as_members(ee.predict(chosen, inputs))) | {"weights": _num_weights(chosen)}
    return found


def shifted_digits(seed: int) -> dict[str, Any]:
    """Upright digits `before`, shifted ones to `train`, `validate` and `test`, and shifted `unknown` digits."""
    from scipy.ndimage import rotate
    from sklearn.datasets import load_digits

    rng, digits = np.random.default_rng(seed), load_digits()
    order = rng.permutation(len(digits.target))
    images, labels = digits.images[order] / 16, digits.target[order].astype(np.int32)
    known = labels < 8

    def shift(images: Any) -> np.ndarray:
        angles = rng.normal(25, 10, len(images))
        turned = [rotate(image, angle, reshape=False, order=1) for image, angle in zip(images, angles, strict=True)]
        return _flat(np.stack(turned) + rng.normal(0, 0.2, images.shape))

    x, y = shift(images[known][600:]), labels[known][600:]
    cuts = {"train": slice(80), "validate": slice(80, 160), "test": slice(160, None)}
    parts = {name: (x[rows], y[rows]) for name, rows in cuts.items()}
    before = _flat(images[known][:600]), labels[known][:600]
    return parts | {"before": before, "unknown": shift(images[~known])}


def _flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1).astype(np.float32)


def _options(epochs: int, key: Any) -> dict[str, Any]:
    return {"epochs": epochs, "batch_size": 20, "key": key, "progress": False}


def _fit(
    ensemble: ee.Ensemble, loss: Any, parts: Any, rates: Any, epochs: int, key: Any, *, score: Any = None
) -> ee.Run:
    """Members of all learning rates in one run, each with the weights of its best epoch."""
    validation = parts["validate"]
    if score is not None:
        validation = ee.train.Validation(validation, score=score, mode="min")
    hyper = {"lr": jnp.asarray(rates, jnp.float32)}
    options = _options(epochs, key) | {"validation": validation, "patience": 15}
    return ee.fit(ensemble, loss, adam, parts["train"], hyper=hyper, **options)


def _best(run: ee.Run, parts: Any, size: int) -> ee.Ensemble:
    """Of groups of `size` members, one for each rate, that whose mixture predicts the validation rows best."""
    x, y = parts["validate"]
    groups = [run.ensemble[i : i + size] for i in range(0, run.ensemble.num_members, size)]

    def loss(group: ee.Ensemble) -> float:
        logits = ee.predict(group, x)
        return float(ee.scores.nll(EFFICIENT.as_members(logits) if logits.ndim == 4 else logits, y))

    return min(groups, key=loss)


def _mixture_nll(model: Any, batch: Any, key: Any) -> jax.Array:
    """Of the sub-members of one model."""
    x, y = batch
    log_p = jax.nn.logsumexp(jax.nn.log_softmax(jax.vmap(model)(x)), axis=1) - jnp.log(MEMBERS)
    return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], axis=1))


def _laplace(member: ee.Ensemble, parts: Any) -> Callable[[np.ndarray], Any]:
    """The prior is that of the largest marginal likelihood, or a power of ten: what predicts validation rows best."""
    posterior = LAPLACE.fit(member, parts["train"], likelihood="classification", where=last)
    choices = [posterior.optimise_prior()]
    choices += [LAPLACE.replace(posterior, prior_precision=p) for p in (0.1, 1.0, 10.0, 100.0, 1000.0)]
    x, y = parts["validate"]
    best = min(choices, key=lambda choice: float(jnp.nan_to_num(ee.scores.nll(choice.predict(x), y), nan=jnp.inf)))
    return best.predict


def _num_weights(model: Any) -> int:
    tree = model.stacked if isinstance(model, ee.Ensemble) else model
    return sum(x.size for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x))
