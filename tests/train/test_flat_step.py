"""A step is a call of flat lists of arrays: what it returns is what `equinox.filter_jit` returns."""

import copy
import dataclasses
import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train._step import LoopStep

from ..factories import assert_same

KEY = jax.random.key(0)
MEMBERS = 3
RNG = np.random.default_rng(0)


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def with_aux(model, batch, key):
    return mse(model, batch, key), {"rows": len(batch[0]), "noise": jax.random.normal(key)}


def weighted(model, batch, key, hyper):
    return hyper["weight"] * mse(model, batch, key)


def stateful(model, state, batch, key):
    x, y = batch
    out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    return jnp.mean((out - y) ** 2), state


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear, self.norm = eqx.nn.Linear(3, 1, key=key), eqx.nn.BatchNorm(3, "batch", mode="ema")

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.linear(x), state


def mlp(key):
    return eqx.nn.MLP(3, 1, 4, 1, key=key)


def case(kind):
    optimiser, options = optax.adam(1e-2), {}
    if kind == "stateful":
        ensemble, state = ee.build(lambda key: eqx.nn.make_with_state(Normed)(key), MEMBERS, key=KEY)
        return stateful, optimiser, ee.train.init(ensemble, optimiser, state=state, key=KEY), options
    ensemble = ee.build(mlp, MEMBERS, key=KEY)
    if kind == "hyper":
        hyper = {"weight": jnp.arange(1.0, 4.0), "lr": jnp.full(MEMBERS, 0.1)}
        optimiser = lambda hyper: optax.sgd(hyper["lr"], momentum=0.9)
        return weighted, optimiser, ee.train.init(ensemble, optimiser, hyper=hyper, key=KEY), options
    if kind == "aux":
        return with_aux, optimiser, ee.train.init(ensemble, optimiser, key=KEY), {"has_aux": True}
    return mse, optimiser, ee.train.init(ensemble, optimiser, key=KEY), options


def batch(rows, *, each=False, numpy=False):
    lead = (MEMBERS, rows) if each else (rows,)
    x, y = (RNG.normal(size=(*lead, width)).astype(np.float32) for width in (3, 1))
    x, y = (x, y) if numpy else (jnp.asarray(x), jnp.asarray(y))
    return (ee.Each(x), ee.Each(y)) if each else (x, y)


def plain(step, state, rows):
    return eqx.filter_jit(LoopStep(step))(state, rows)


def assert_equal(step, state, rows):
    got, expected = step(state, rows), plain(step, state, rows)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert_same(got, expected)
    return got[0]


@pytest.mark.parametrize("kind", ["plain", "aux", "hyper", "stateful"])
def test_a_loop_is_that_of_the_plain_step(kind):
    loss, optimiser, state, aux = case(kind)
    step = ee.train.make_step(loss, optimiser, **aux)
    for rows, each, numpy in [
        (8, False, False),
        (8, False, True),
        (8, True, False),
        (5, True, True),
        (8, False, False),
    ]:
        state = assert_equal(step, state, batch(rows, each=each, numpy=numpy))
    assert int(state.step) == 5


def test_states_that_another_step_or_the_user_made():
    loss, optimiser, first, _ = case("hyper")
    step, other = (ee.train.make_step(loss, optimiser) for _ in range(2))
    rows = batch(8)
    second = assert_equal(step, first, rows)
    assert_equal(step, first, rows)  # an older state
    changed = eqx.tree_at(lambda s: s.hyper, second, {"weight": jnp.zeros(MEMBERS), "lr": jnp.ones(MEMBERS)})
    assert_equal(step, changed, rows)
    assert_equal(other, second, rows)
    a, b = first, changed
    for _ in range(2):  # two trainings in turns
        a, b = assert_equal(step, a, rows), assert_equal(step, b, rows)


def test_a_member_diverges():
    loss, optimiser, state, _ = case("plain")
    step = ee.train.make_step(loss, optimiser)
    rows = batch(8, each=True)
    bad = (ee.Each(rows[0].value.at[1].set(jnp.nan)), rows[1])
    state = assert_equal(step, assert_equal(step, state, rows), bad)
    assert state.status.tolist() == [0, 2, 0]
    assert_equal(step, state, rows)


def test_models_that_differ_in_what_is_no_array():
    optimiser, rows = optax.sgd(0.1), batch(8)
    step = ee.train.make_step(mse, optimiser)
    for activation in (jnp.tanh, jax.nn.relu, jnp.tanh):
        make = lambda key: eqx.nn.MLP(3, 1, 4, 1, activation=activation, key=key)  # noqa: B023 (called at once)
        state = ee.train.init(ee.build(make, MEMBERS, key=KEY), optimiser, key=KEY)
        assert_equal(step, assert_equal(step, state, rows), rows)


def test_an_error_while_it_runs():
    def checked(model, batch, key):
        value = mse(model, batch, key)
        return eqx.error_if(value, value < jnp.inf, "too small")

    _, optimiser, state, _ = case("plain")
    with pytest.raises(eqx.EquinoxRuntimeError, match="too small"):
        ee.train.make_step(checked, optimiser)(state, batch(8))


def test_in_a_compiled_loop():
    loss, optimiser, state, _ = case("plain")
    step, rows = ee.train.make_step(loss, optimiser), batch(8)
    arrays, static = eqx.partition(state, eqx.is_array)

    @jax.jit
    def many(arrays):
        body = lambda arrays, _: (eqx.filter(step(eqx.combine(arrays, static), rows)[0], eqx.is_array), None)
        return jax.lax.scan(body, arrays, None, length=3)[0]

    looped = eqx.combine(many(arrays), static)
    for _ in range(3):
        state, _ = step(state, rows)
    np.testing.assert_allclose(*(jax.tree.leaves(s.params)[0] for s in (looped, state)), rtol=1e-5)


def test_a_step_keeps_no_state():
    loss, optimiser, state, _ = case("plain")
    step = ee.train.make_step(loss, optimiser)
    state, _ = step(state, batch(8))
    weights = weakref.ref(jax.tree.leaves(state.params)[0])
    assert weights() is not None
    del state
    gc.collect()
    assert weights() is None


def test_equal_steps_share_a_program():
    traces = []

    def counted(model, batch, key):
        traces.append(1)
        return mse(model, batch, key)

    _, optimiser, state, _ = case("plain")
    rows = batch(8)
    ee.train.make_step(counted, optimiser)(state, rows)
    before = len(traces)
    ee.train.make_step(counted, optimiser)(state, rows)
    assert len(traces) == before


class Scaled(eqx.Module):
    weight: jax.Array
    scale: complex

    def __call__(self, x):
        kinds = {float: 2.0, int: 3.0, bool: 4.0}
        return self.weight * x * np.float32(kinds[type(self.scale)] * np.copysign(1.0, self.scale))


@pytest.mark.parametrize("scales", [(1.0, 1), (1, True), (0.0, -0.0)])
def test_equal_constants_of_other_types_and_signs_are_other_programs(scales):
    step = ee.train.make_step(lambda model, x, key: model(x), optax.sgd(0.1))
    losses = []
    for scale in scales:
        ensemble = ee.build(lambda key, scale=scale: Scaled(jnp.float32(1), scale), MEMBERS, key=KEY)
        assert ensemble.shared.scale is scale
        _, metrics = step(ee.train.init(ensemble, optax.sgd(0.1), key=KEY), jnp.float32(3))
        losses += [float(metrics.loss[0]), float(Scaled(jnp.float32(1), scale)(jnp.float32(3)))]
    assert losses[0] == losses[1] != losses[2] == losses[3]


def test_a_state_changed_in_place_is_seen():
    optimiser = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    step = ee.train.make_step(mse, optimiser)
    batch = (jnp.ones((4, 3)), jnp.zeros((4, 1)))
    state, _ = step(ee.train.init(ee.build(mlp, MEMBERS, key=KEY), optimiser, key=KEY), batch)
    state.opt_state.hyperparams["learning_rate"] = jnp.zeros(MEMBERS)
    after, _ = step(state, batch)
    assert_same(after.ensemble, state.ensemble)


def test_a_step_of_another_loss_is_another_step():
    batch = (jnp.ones((4, 3)), jnp.zeros((4, 1)))
    step = ee.train.make_step(mse, optax.sgd(0.1))
    state, _ = step(ee.train.init(ee.build(mlp, MEMBERS, key=KEY), optax.sgd(0.1), key=KEY), batch)
    hundredfold = dataclasses.replace(step, fn=lambda model, batch, key: 100 * mse(model, batch, key))
    losses = [of(state, batch)[1].loss for of in (step, hundredfold)]
    np.testing.assert_allclose(losses[1], 100 * losses[0], rtol=1e-6)


def test_a_step_that_ran_can_be_copied():
    batch = (jnp.ones((4, 3)), jnp.zeros((4, 1)))
    step = ee.train.make_step(mse, optax.sgd(0.1))
    state, _ = step(ee.train.init(ee.build(mlp, MEMBERS, key=KEY), optax.sgd(0.1), key=KEY), batch)
    assert_same(copy.deepcopy(step)(state, batch), step(state, batch))


def test_a_step_is_traced_once_where_states_hold_dicts():
    traces = []

    def loss(model, batch, key):
        traces.append(model)
        return mse(model, batch, key)

    optimiser = lambda hyper: optax.sgd(hyper["lr"])
    step = ee.train.make_step(loss, optimiser)
    hyper = {"lr": jnp.full(MEMBERS, 0.1)}
    state = ee.train.init(ee.build(mlp, MEMBERS, key=KEY), optimiser, hyper=hyper, key=KEY)
    batch = (jnp.ones((4, 3)), jnp.zeros((4, 1)))
    state, _ = step(state, batch)
    once = len(traces)
    for _ in range(3):
        state, _ = step(state, batch)
    assert len(traces) == once
    state.hyper["lr"] = jnp.zeros(MEMBERS)
    after, _ = step(state, batch)
    assert_same(after.ensemble, state.ensemble)
