"""What compiles, and when an edited function is another program."""

import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_same

KEY, MEMBERS = jax.random.key(5), 6
X = np.asarray(jax.random.normal(jax.random.key(1), (16, 3)))
DATA = (X, np.sin(X[:, 0]))
CONFIG = types.SimpleNamespace(weight=1.0)
SCALE = 1.0


def make(key):
    return eqx.nn.MLP(3, 1, 8, 1, key=key)


def new_loss():
    """The cell of a notebook: each run of it makes another function of the same code."""

    def loss(model, batch, key):
        x, y = batch
        return CONFIG.weight * SCALE * jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)

    return loss


def fit(rates=(1e-2,) * MEMBERS, *, loss=None, **options):
    members = ee.build(make, len(rates), key=KEY)
    hyper = jnp.asarray(rates, jnp.float32)
    options = {"epochs": 2, "batch_size": 8, "plan": ee.plan.Blocks(3), "key": KEY} | options
    return ee.fit(members, loss or new_loss(), lambda rate: optax.adam(rate), DATA, hyper=hyper, **options)


@pytest.fixture
def compiled(caplog):
    """The number of training programs that were compiled since."""
    with jax.log_compiles():
        yield lambda: sum("Compiling jit(train_block)" in record.getMessage() for record in caplog.records)


def test_one_program_for_runs_that_differ_in_numbers(compiled):
    fit()
    assert compiled() == 1
    fit((1e-3,) * MEMBERS)  # another rate; and equal functions, defined anew
    fit(epochs=9)
    fit(epochs=None, steps=5)
    fit((1e-2,) * 3)
    fit((1e-2,) * 4)
    fit(key=jax.random.key(7))
    ee.fit(fit(), new_loss(), lambda rate: optax.adam(rate), DATA, epochs=1, batch_size=8, plan=ee.plan.Blocks(3))
    assert compiled() == 1


def test_a_resumed_run_compiles_nothing(compiled, tmp_path):
    fit(epochs=2, checkpoint=tmp_path / "run.eqx")
    before = compiled()
    fit(epochs=4, checkpoint=tmp_path / "run.eqx")
    assert compiled() == before


@pytest.mark.parametrize("edit", ["config", "global", "closure", "class"])
def test_what_was_edited_is_another_program(edit, monkeypatch):
    factor = [1.0]

    class Net(eqx.Module):
        mlp: eqx.nn.MLP

        def __init__(self, key):
            self.mlp = make(key)

        def __call__(self, x):
            return self.mlp(x)

    def loss(model, batch, key):
        return factor[0] * new_loss()(model, batch, key)

    members = ee.build(Net, 2, key=KEY)
    run = lambda: ee.fit(members, loss, optax.sgd(1e-2), DATA, epochs=1, batch_size=8, key=KEY).history.loss
    before = run()
    match edit:
        case "config":
            monkeypatch.setattr(CONFIG, "weight", 10.0)
        case "global":
            monkeypatch.setitem(globals(), "SCALE", 10.0)
        case "closure":
            factor[0] = 10.0
        case "class":
            monkeypatch.setattr(Net, "__call__", lambda self, x: 10 * self.mlp(x))
    after = run()
    if edit == "class":
        assert (np.abs(after - before) > 1e-3).any()
    else:
        np.testing.assert_allclose(after[:, 0], 10 * before[:, 0], rtol=1e-5)


def test_a_loss_that_is_a_module():
    class Weighted(eqx.Module):
        weight: jax.Array

        def __call__(self, model, batch, key):
            return self.weight * new_loss()(model, batch, key)

    first = fit(loss=Weighted(jnp.float32(1))).history.loss
    second = fit(loss=Weighted(jnp.float32(3))).history.loss
    np.testing.assert_allclose(second[:, 0], 3 * first[:, 0], rtol=1e-5)


def test_the_default_blocks_and_one_block_agree():
    parts, whole = fit(), fit(plan=ee.plan.Vmap())
    assert_same(parts.train_state.step, whole.train_state.step)
    np.testing.assert_allclose(parts.history.loss, whole.history.loss, rtol=1e-5)


@pytest.mark.slow
def test_convolutions_as_products():
    from eqx_ensemble.train._convolutions import as_products, has_convolution

    def net(key):
        k1, k2, k3 = jax.random.split(key, 3)
        layers = [
            eqx.nn.Conv2d(2, 3, 3, stride=2, padding=1, key=k1), eqx.nn.Lambda(jax.nn.relu), eqx.nn.MaxPool2d(2, 1),
            eqx.nn.Conv2d(3, 4, 2, dilation=2, key=k2), eqx.nn.Lambda(jnp.ravel), eqx.nn.Linear(4 * 4 * 4, 1, key=k3),
        ]  # fmt: skip
        return eqx.nn.Sequential(layers)

    x = jax.random.normal(KEY, (5, 2, 13, 13))
    params, static = eqx.partition(net(KEY), eqx.is_array)
    value = lambda params: jnp.mean(jax.vmap(eqx.combine(params, static))(x) ** 2)
    plain, replaced = jax.value_and_grad(value)(params), jax.value_and_grad(as_products(value))(params)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(replaced), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert has_convolution(jax.make_jaxpr(value)(params))
    assert not has_convolution(jax.make_jaxpr(as_products(value))(params))
