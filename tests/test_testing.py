"""The checks for users' models pass where they should, and fail where something is wrong."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .factories import CASES, data, mse

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (20, 3))
DATA = X, jnp.sin(X[:, :1])


def mlp(key):
    return eqx.nn.MLP(3, 1, 8, 1, key=key)


def noisy(key):
    return eqx.nn.Sequential([eqx.nn.Linear(3, 8, key=key), eqx.nn.Dropout(0.5), eqx.nn.Linear(8, 1, key=key)])


def dropout_loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x, key=jax.random.split(key, len(x))) - y) ** 2)


@pytest.mark.parametrize(
    ("make", "loss", "optimiser", "hyper"),
    [
        (mlp, mse, optax.adam(1e-2), None),
        pytest.param(
            noisy,
            dropout_loss,
            optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
            None,
            marks=pytest.mark.slow,
        ),
        (mlp, mse, lambda h: optax.lamb(h["rate"]), {"rate": np.array([0.01, 0.02, 0.03])}),
        pytest.param(mlp, mse, optax.noisy_sgd(0.01, key=0), None, marks=pytest.mark.slow),
    ],
    ids=["mlp", "dropout", "hyper", "noise"],
)
def test_independent(make, loss, optimiser, hyper):
    options = {} if hyper is None else {"plans": [ee.plan.Chunked(2)], "hyper": hyper}
    checks = ee.testing.check_independent(make, loss, optimiser, DATA, steps=6, batch_size=8, key=KEY, **options)
    assert [str(check)[:8] for check in checks] == ["ok      "] * (12 if hyper is None else 3)
    assert str(checks[1 if hyper else 4]) == "ok      Chunked(2): beside a member of NaN"


@pytest.mark.slow
def test_a_stateful_model():
    case = CASES["conv and batch norm"]
    optimiser = optax.sgd(0.01)
    ee.testing.check_independent(case.make, case.loss, optimiser, data(), steps=4, batch_size=16, rtol=1e-4, key=KEY)
    assert len(ee.testing.check_ensemble(case.make, key=KEY)) == 7


def test_a_loss_that_remembers_is_found():
    calls = []

    def remembering(model, batch, key):
        calls.append(1)
        return mse(model, batch, key) * len(calls)

    with pytest.raises(
        AssertionError, match=r"FAILED  Vmap\(\): together as alone: at `\[0\]\.layers\[0\]\.weight`: rel"
    ):
        ee.testing.check_independent(mlp, remembering, optax.sgd(0.1), DATA, steps=3, key=KEY)


@pytest.mark.parametrize("make", [mlp, noisy], ids=["mlp", "dropout"])
def test_ensemble(make):
    x = X[0] if make is mlp else None
    checks = ee.testing.check_ensemble(make, x, key=KEY)
    assert len(checks) == 7 + (make is mlp)
    assert all(str(check).startswith("ok") for check in checks)


def test_a_constructor_without_its_key_is_found():
    with pytest.raises(AssertionError) as caught:
        ee.testing.check_ensemble(lambda key: mlp(KEY), key=KEY)
    assert "FAILED  members with other keys are other models: all members have the same arrays" in str(caught.value)
    assert "ok      each member is what `make` gives alone" in str(caught.value)


def test_a_constructor_that_remembers_is_found():
    widths = iter(range(4, 90))
    with pytest.raises(AssertionError, match="FAILED  each member is what `make` gives alone: at "):
        ee.testing.check_ensemble(lambda key: eqx.nn.MLP(3, 1, next(widths), 1, key=key), key=KEY)
