"""`fleet.fit(history=...)`: the histories of shards of different lengths, joined, are that of one `fit`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from . import test_fit
from .executors import Here

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")
pytestmark = pytest.mark.filterwarnings("ignore:.*diverged")

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(21, 2)).astype(np.float32)
DATA = X, X.sum(axis=1, keepdims=True)  # five steps an epoch, the last one of a single row
SLOW = pytest.mark.slow
NEVER = 99


class Counting(eqx.Module):
    """A linear model with a weight that counts steps: its gradient is -10, the learning rate 0.1."""

    linear: eqx.nn.Linear
    count: jax.Array

    def __call__(self, x):
        return self.linear(x)


ENSEMBLE = ee.build(lambda key: Counting(eqx.nn.Linear(2, 1, key=key), jnp.zeros(())), 5, key=KEY)


def loss(model, batch, key, hyper):
    """NaN or infinite after as many steps as `hyper` says, with outputs of three types."""
    x, y = batch
    value, count = jnp.mean((jax.vmap(model)(x) - y) ** 2), jax.lax.stop_gradient(model.count)
    spoilt = jnp.where(count == hyper["nan"], jnp.nan, jnp.where(count == hyper["inf"], jnp.inf, 0.0))
    aux = {"rows": jnp.int32(len(x)), "low": value.astype(jnp.bfloat16), "each": jnp.full(2, value)}
    return value + spoilt - 10 * model.count, aux


def error(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


CASES = {  # shards of two members, and of three: which end early is another shard in each
    "limits": {"stop": ee.train.Stopping(steps=[3, 7, 19, 11, NEVER])},
    "limits, a target": {
        "stop": ee.train.Stopping(target=1e-9, steps=[3, 7, NEVER, 11, 12]),
        "validation": ee.train.Validation(DATA, score=error, mode="min"),
    },
    "none to the end": {
        "stop": ee.train.Stopping(steps=[3, 7, 9, 11, 12]),
        "validation": ee.train.Validation(DATA, score=error, mode="min"),
    },
    "faults": {"nan": [2, 6, NEVER, NEVER, NEVER], "inf": [NEVER, NEVER, NEVER, 9, 8]},
    "faults of all": {"nan": [2, NEVER, 10, NEVER, 6], "inf": [NEVER, 6, NEVER, 5, NEVER]},
    "faults and limits": {
        "nan": [2, 6, NEVER, NEVER, 11],
        "stop": ee.train.Stopping(steps=[NEVER, NEVER, 4, 8, NEVER]),
    },
}


def fit(call, *args, begun=ENSEMBLE, epochs=4, **case):
    hyper = {name: np.array(case.pop(name, [NEVER] * 5), np.float32) for name in ("nan", "inf")}
    own = {"hyper": hyper} if begun is ENSEMBLE else {}
    return call(
        *args, begun, loss, optax.sgd(0.1), DATA, epochs=epochs, batch_size=5, has_aux=True, key=KEY,
        plan=ee.plan.Sequential(), **own, **case,
    )  # fmt: skip


def assert_equal(found, expected):
    assert [x.dtype for x in jax.tree.leaves(found.history)] == [x.dtype for x in jax.tree.leaves(expected.history)]
    test_fit.assert_equal(comparable(found), comparable(expected))


def comparable(run):
    """With curves of bfloat16 as float32: NumPy finds NaN of bfloat16 different from NaN."""
    wide = lambda x: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x
    return eqx.tree_at(lambda run: run.history, run, jax.tree.map(wide, run.history))


@pytest.mark.parametrize("history", ["all", 4, pytest.param("last", marks=SLOW), pytest.param(7, marks=SLOW)])
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name == "faults and limits" else SLOW) for name in CASES]
)
def test_of_shards_of_different_lengths(case, history):
    one = fit(ee.fit, history=history, **CASES[case])
    joined = fit(ee.fleet.fit, Here(), shard=2, history=history, **CASES[case])
    assert_equal(joined, one)


@SLOW
@pytest.mark.parametrize("history", ["all", 4, "last"])
def test_a_joined_run_continues_as_one(history):
    """Also by shards, and with another history."""
    options = {
        "stop": ee.train.Stopping(steps=[3, 7, 9, 22, NEVER]),
        "validation": ee.train.Validation(DATA, score=error, mode="min"),
        "epochs": 2,
    }
    one, joined = fit(ee.fit, history=4, **options), fit(ee.fleet.fit, Here(), shard=2, history=4, **options)
    assert_equal(joined, one)
    expected = fit(ee.fit, begun=one, history=history, **options)
    assert expected.history.loss.shape[1] > one.history.loss.shape[1]
    assert_equal(fit(ee.fit, begun=joined, history=history, **options), expected)
    assert_equal(fit(ee.fleet.fit, Here(), shard=2, begun=joined, history=history, **options), expected)
    ended = fit(ee.fit, **options | {"stop": ee.train.Stopping(steps=3)})
    with pytest.raises(ValueError, match="no member left to train: all 5"):
        fit(ee.fleet.fit, Here(), shard=2, begun=ended, **options)
