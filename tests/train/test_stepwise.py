"""`Sequential` outside a compiled loop: one compiled call for each member and step, and nothing else changes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.plan import Sequential, Vmap
from eqx_ensemble.train.compiled import _stepwise

from ..factories import assert_close, assert_same, assert_same_where_optimised, grouped

KEY = jax.random.key(0)
MEMBERS, ROWS = 5, 43  # epochs of five full batches and a smaller one
ADAM = optax.adam(1e-2)


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def data(rows=ROWS):
    x = jax.random.normal(KEY, (rows, 3))
    return x, jnp.sin(x[:, 0])


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), MEMBERS, key=KEY)


def both(ensemble, optimiser=ADAM, x=None, **options):
    options = {"epochs": 4, "batch_size": 8, "progress": False, "key": KEY} | options
    data_of_all = data() if x is None else x
    return (ee.fit(ensemble, loss, optimiser, data_of_all, **grouped(plan | options)) for plan in (APART, {}))


APART = {"plan": Sequential(), "scan": False}
OPTIONS = {
    "rows of each": {},
    "one order for all": {"shuffle": "shared"},
    "full batches only": {"batch_size": 43},
    "chosen rows": {"rows": np.arange(MEMBERS * 20).reshape(MEMBERS, 20) % ROWS},
    "validation and patience": {"validation": data(16), "patience": 1, "epochs": 12},
    "budgets": {"stop": ee.train.Stopping(steps=[1, 6, 7, 13, 100])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_what_any_plan_gives(ensemble, options):
    run, reference = both(ensemble, **options)
    assert_close(run.ensemble, reference.ensemble, 1e-5)
    np.testing.assert_allclose(run.history.loss, reference.history.loss, rtol=1e-4)
    np.testing.assert_array_equal(run.status, reference.status)
    np.testing.assert_array_equal(run.stopped_at, reference.stopped_at)
    if run.history.validation is not None:
        np.testing.assert_allclose(run.history.validation, reference.history.validation, rtol=1e-4)
        np.testing.assert_array_equal(run.best_step, reference.best_step)


def test_data_of_each(ensemble):
    x = jax.tree.map(lambda x: ee.Each(jnp.stack([x + i for i in range(MEMBERS)])), data())
    run, reference = both(ensemble, x=x)
    assert_close(run.ensemble, reference.ensemble, 1e-5)


def test_a_fault_stays_with_its_member(ensemble):
    optimiser = lambda h: optax.sgd(h["lr"])
    lr = np.full(MEMBERS, 1e-2, np.float32)
    faulty, clean = (
        next(both(ensemble, optimiser, hyper={"lr": np.where(np.arange(MEMBERS) == 3, wrong, lr)}, on_diverge="revive"))
        for wrong in (np.float32(np.inf), np.float32(1e-2))
    )
    assert [(event.member, event.step) for event in faulty.revived] == [(3, 1)]
    others = [0, 1, 2, 4]
    assert_same(faulty.ensemble[others], clean.ensemble[others])


def test_each_is_alone_bit_for_bit(ensemble):
    run, _ = both(ensemble)
    for i in range(MEMBERS):
        assert_same_where_optimised(run.ensemble[[i]], next(both(ensemble[[i]])).ensemble)


def test_convolutions_are_run_so(monkeypatch):
    class Net(eqx.Module):
        conv: eqx.nn.Conv2d
        norm: eqx.nn.BatchNorm
        out: eqx.nn.Linear

        def __init__(self, key):
            k1, k2 = jax.random.split(key)
            self.conv = eqx.nn.Conv2d(1, 2, 3, key=k1)
            self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")
            self.out = eqx.nn.Linear(2, 1, key=k2)

        def __call__(self, x, state):
            x, state = self.norm(self.conv(x), state)
            return self.out(jnp.mean(jax.nn.relu(x), axis=(1, 2))), state

    def loss(model, state, batch, key):
        call = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = call(batch, state)
        return jnp.mean(out**2), state

    calls = []
    compiled = _stepwise._compiled_part
    monkeypatch.setattr(_stepwise, "_compiled_part", lambda *args: calls.append(1) or compiled(*args))
    ensemble, state = ee.build(eqx.nn.make_with_state(Net), 3, key=KEY)
    sgd = optax.sgd(1e-2)  # a bias before a normalisation has only rounding to go by, which Adam blows up
    images = jax.random.normal(KEY, (16, 1, 6, 6))
    runs = [
        ee.fit(ensemble, loss, sgd, images, epochs=2, batch_size=8, state=state, plan=plan, progress=False, key=KEY)
        for plan in (Sequential(), Vmap())
    ]
    assert len(calls) == 3 * 4  # members and steps, and none under Vmap
    assert_close(runs[0].ensemble, runs[1].ensemble, 1e-5)
    assert_close(runs[0].state, runs[1].state, 1e-5)
