"""A census of second calls: other values, other rows of data, a function looked up again. None of them compiles."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .marking import slow_but

MEMBERS, ROWS, CLASSES = 4, 24, 3
KEYS = jax.random.key(0), jax.random.key(1)
DRAWN = [np.random.default_rng(seed) for seed in (0, 1)]
LOGITS = [jnp.asarray(drawn.normal(size=(MEMBERS, ROWS, CLASSES)), jnp.float32) for drawn in DRAWN]
POINTS = [logits[:, :, 0] for logits in LOGITS]
VARIANCES = [jnp.exp(logits[:, :, 1]) for logits in LOGITS]
LABELS = [jnp.argmax(logits[0], axis=-1) for logits in LOGITS]
Y = [jnp.asarray(drawn.normal(size=ROWS), jnp.float32) for drawn in DRAWN]
X = [drawn.normal(size=(ROWS, 3)).astype(np.float32) for drawn in DRAWN]
WEIGHTS = [np.arange(1.0, 5.0), np.ones(4)]
RATES = [np.full(MEMBERS, rate, np.float32) for rate in (0.1, 0.2)]
SGD = optax.sgd(0.1)


def make(key):
    return eqx.nn.MLP(3, CLASSES, 4, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def mean_output(model, x):
    return jnp.mean(jax.vmap(model)(x))


ENSEMBLES = [ee.build(make, MEMBERS, key=key) for key in KEYS]
DATA = [(x, y) for x, y in zip(X, Y, strict=True)]


def fitted(i, **options):
    common = {"epochs": 2, "batch_size": 8, "progress": False, "key": KEYS[i]}
    return ee.fit(ENSEMBLES[i], loss, SGD, DATA[i], **common | options)


def swept(i):
    return ee.fit(ENSEMBLES[i], loss, _sgd_of, DATA[i], hyper={"rate": RATES[i]}, epochs=1, batch_size=8, key=KEYS[i])


def _sgd_of(hyper):
    return optax.sgd(hyper["rate"])


STATES = [ee.train.init(ensemble, SGD, key=key) for ensemble, key in zip(ENSEMBLES, KEYS, strict=True)]
STEP = ee.train.make_step(loss, SGD)

# What is called a second time, with 1 in place of 0.
CALLS = {
    "build": lambda i: ee.build(make, MEMBERS, key=KEYS[i]),
    "predict few rows, then others": lambda i: ee.predict(ENSEMBLES[i], X[i][: 20 - 3 * i]),
    "predict combined": lambda i: ee.predict(
        ENSEMBLES[i], X[i][: 20 - 3 * i], combine=ee.combine.mixture, weights=WEIGHTS[i]
    ),
    "predict in batches": lambda i: ee.predict(ENSEMBLES[i], X[i], batch_size=7),
    "predict with keys": lambda i: ee.predict(ENSEMBLES[i], X[i], inference=False, key=KEYS[i]),
    "map_members": lambda i: ee.map_members(mean_output)(ENSEMBLES[i], X[i]),
    "fit": fitted,
    "fit with limits": lambda i: fitted(
        i,
        validation=ee.train.Validation(DATA[i]),
        patience=2,
        stop=ee.train.Stopping(target=0.01 * i, steps=50 + i),
    ),
    "fit of rows": lambda i: fitted(i, rows=ee.resample.bootstrap(ROWS, MEMBERS, key=KEYS[i])),
    "fit one after another": lambda i: fitted(i, plan=ee.plan.Blocks(1)),
    "fit a sweep": swept,
    "make_step": lambda i: STEP(STATES[i], DATA[i]),
    "resample": lambda i: ee.resample.folds(ROWS, MEMBERS, key=KEYS[i]),
    "average": lambda i: ee.average_parameters(ENSEMBLES[i], WEIGHTS[i]),
    "combine classes": lambda i: [
        fn(LOGITS[i], weights=WEIGHTS[i]) for fn in (ee.combine.mixture, ee.combine.mean_logits, ee.combine.vote)
    ],
    "combine points": lambda i: [
        ee.combine.mean(POINTS[i], weights=WEIGHTS[i]),
        ee.combine.median(POINTS[i]),
        ee.combine.gaussian(POINTS[i], VARIANCES[i], weights=WEIGHTS[i]),
    ],
    "scores of classes": lambda i: [
        score(LOGITS[i], LABELS[i]) for score in (ee.scores.nll, ee.scores.brier, ee.scores.ece, ee.scores.accuracy)
    ],
    "scores of points": lambda i: [
        ee.scores.crps(POINTS[i], Y[i]),
        ee.scores.rmse(POINTS[i], Y[i]),
        ee.scores.nll_gaussian(POINTS[i][0], VARIANCES[i][0], Y[i]),
        ee.scores.crps_gaussian(POINTS[i][0], VARIANCES[i][0], Y[i]),
    ],
    "uncertainty": lambda i: [
        ee.uncertainty.decompose_entropy(LOGITS[i], weights=WEIGHTS[i]),
        ee.uncertainty.decompose_variance(POINTS[i], VARIANCES[i]),
        ee.uncertainty.disagreement(LOGITS[i]),
    ],
    # Not `isotonic`, whose number of steps depends on the data, nor another `patience`, which is part of the program.
    "calibrate": lambda i: [
        ee.calibrate.temperature(LOGITS[i], LABELS[i], pool="mixture")(LOGITS[i]),
        ee.calibrate.vector(LOGITS[i], LABELS[i], pool="mixture")(LOGITS[i]),
    ],
    "conformal": lambda i: ee.conformal.split(POINTS[i][0], Y[i], level=0.8)(POINTS[i][1]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    slow_but(["build", "fit with limits", "make_step", "predict few rows, then others", "combine points"], CALLS),
)
def test_a_second_call_compiles_nothing(name, compiled):
    CALLS[name](0)
    with compiled() as programs:
        CALLS[name](1)
    assert programs == []


def test_a_compilation_is_seen(compiled):
    """Otherwise the census could not fail."""
    with compiled() as programs:
        ee.predict(ENSEMBLES[0], X[0][:20], fn=lambda model, x: model(x))
    assert programs
