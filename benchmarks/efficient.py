"""Efficient ensembles: parameters, bytes and times beside one model and as many whole members; TabM on tables.

Times are those of `fit` and `predict` of an MLP on random data, without compilation; bytes are those of the weights
and of Adam's state. On tables that packages carry (California housing, the paper's example, is in none), TabM is
compared with the MLP that it converts and with a deep ensemble of it: RMSE of the mean prediction on test rows, as a
ratio to the MLP's in each of five folds. All stop by validation rows; nothing is tuned, and all have one learning rate.
"""

import functools as ft
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import ABSENT, Contender, Report, compared, interleaved, ratio_row, script
from _models import mlp
from _problems import cross_entropy
from _tables import FOLDS, Table, tables

import eqx_ensemble as ee

EFFICIENT = ee.methods.efficient
CONVERSIONS = {
    "batch_ensemble": EFFICIENT.batch_ensemble,
    "tabm": EFFICIENT.tabm,
    "mimo": EFFICIENT.mimo,
    "masksembles": EFFICIENT.masksembles,
    "packed_ensemble": EFFICIENT.packed_ensemble,
}
ROWS = {"mimo": "shuffle", "masksembles": "split"}
ONE, WHOLE = "one model", "whole members"
ADAM = optax.adam(1e-3)
NUM_TABLES = 3


def measure(quick: bool) -> Report:
    report = Report("Efficient ensembles")
    _compare_costs(report, quick=quick)
    for table in itertools.islice(tables(quick=False), NUM_TABLES):
        if isinstance(table, str):
            report.facts[table] = ABSENT
        elif not quick or table.name == "diabetes":
            _compare_on(report, table, quick=quick)
    return report


def _compare_costs(report: Report, *, quick: bool) -> None:
    """A step and a prediction of every conversion, with four sub-members."""
    sizes, num_rows, count = ((8, 16, 16, 3), 64, 2) if quick else ((64, 256, 256, 10), 1024, 4)
    generator = np.random.default_rng(1)
    x = generator.standard_normal((num_rows, sizes[0]), np.float32)
    y = generator.integers(0, sizes[-1], num_rows).astype(np.int32)
    make, key = ft.partial(mlp, sizes), jax.random.key(0)
    ensembles = {ONE: ee.build(make, 1, key=key), WHOLE: ee.build(make, count, key=key)}
    losses = {ONE: cross_entropy, WHOLE: cross_entropy}
    for name, convert in CONVERSIONS.items():
        ensembles[name] = ee.stack([convert(make(key), count, key=key)])
        losses[name] = EFFICIENT.mean_loss(cross_entropy, rows=ROWS.get(name, "same"))
    options = {"epochs": 1, "batch_size": num_rows // 8, "progress": False, "key": key}
    fit = lambda name: ee.fit(ensembles[name], losses[name], ADAM, (x, y), **options).history.loss
    steps = interleaved([Contender(name, ft.partial(fit, name), 8) for name in ensembles], rounds=3 if quick else 9)
    rows = jnp.asarray(x)
    predict = lambda name: ee.predict(ensembles[name], rows)
    predictions = interleaved(
        [Contender(name, ft.partial(predict, name)) for name in ensembles], rounds=3 if quick else 9
    )
    sizes_of = {name: _num_bytes(ensemble) for name, ensemble in ensembles.items()}
    for name, num_bytes in sizes_of.items():
        report.facts[f"parameters, {name}"] = f"{num_bytes // 12:,}; {num_bytes:,} bytes with Adam's state"
    for name in list(CONVERSIONS):
        for other in (ONE, WHOLE):
            report.rows.append(ratio_row(f"{name}: bytes", f"{name} / {other}", [sizes_of[name] / sizes_of[other]]))
            report.rows.append(compared(f"{name}: a step", steps[name], steps[other]))
            report.rows.append(compared(f"{name}: a prediction", predictions[name], predictions[other]))


def _num_bytes(ensemble: ee.Ensemble) -> int:
    """Of the trained weights and the two moments of Adam."""
    return 3 * sum(x.nbytes for x in jax.tree.leaves(ensemble) if eqx.is_inexact_array(x))


def _loss(model: Any, batch: Any, key: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def _score(model: Any, batch: Any, key: Any) -> jax.Array:
    """The squared error of the mean over sub-members."""
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[..., 0].mean(axis=1) - y) ** 2)


MEAN_LOSS = EFFICIENT.mean_loss(_loss)
ADAMW = optax.adamw(2e-3, weight_decay=3e-4)
TABM = optax.multi_transform({"fast": optax.adam(2e-3), "slow": ADAMW}, EFFICIENT.weight_labels)


def _compare_on(report: Report, table: Table, *, quick: bool) -> None:
    """TabM, the MLP and a deep ensemble on all folds of a table."""
    folds, members, count, epochs = (2, 2, 4, 2) if quick else (FOLDS, 8, 32, 200)
    sizes = (table.x.shape[1], 64, 64, 1)
    make = ft.partial(mlp, sizes)
    convert = lambda key: EFFICIENT.tabm(make(key), count, key=key)
    found = {name: np.zeros(folds) for name in ("MLP", "deep ensemble", "TabM", "sub-member of TabM")}
    for fold in range(folds):
        split, key = table.split(fold), jax.random.key(fold)
        options = {"validation": split.validation, "patience": 16, "epochs": epochs, "batch_size": 32, "key": key}
        run = ee.fit(ee.build(make, members, key=key), _loss, ADAMW, split.train, **options)
        own = np.asarray(ee.map_members(_outputs)(run.ensemble, split.test[0]))
        options["validation"] = ee.train.Validation(split.validation, score=_score, mode="min")
        run = ee.fit(ee.build(convert, 2, key=key), MEAN_LOSS, TABM, split.train, **options)
        joint = np.asarray(ee.map_members(_outputs)(run.ensemble, split.test[0]))
        rmse = lambda predicted, y=split.test[1]: np.sqrt(np.mean((predicted - y) ** 2, axis=-1))
        found["MLP"][fold] = rmse(own).mean()
        found["deep ensemble"][fold] = rmse(own.mean(axis=0))
        found["TabM"][fold] = rmse(joint.mean(axis=-1)).mean()
        found["sub-member of TabM"][fold] = rmse(np.moveaxis(joint, -1, 1)).mean()
    for name, values in found.items():
        report.facts[f"{table.name}: RMSE, {name}"] = f"{values.mean():.4f}"
        if name != "MLP":
            report.rows.append(ratio_row(f"{table.name}: RMSE, {name}", f"{name} / MLP", values / found["MLP"]))


def _outputs(model: Any, x: Any) -> jax.Array:
    return jax.vmap(model)(x)[..., 0]


if __name__ == "__main__":
    script(measure)
