"""Parts of a training state that do not fit are named before anything is traced; so is another `has_aux`."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
MEMBERS = 3
ROWS = (jnp.linspace(-1, 1, 8)[:, None], jnp.ones((8, 1)))


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def sgd(hyper):
    return optax.sgd(hyper["lr"])


def injected(hyper):
    return optax.inject_hyperparams(optax.sgd)(hyper["lr"])


def state_of(optimiser):
    ensemble = ee.build(lambda key: eqx.nn.Linear(1, 1, key=key), MEMBERS, key=KEY)
    return ee.train.init(ensemble, optimiser, hyper={"lr": jnp.full(MEMBERS, 0.1)}, key=KEY)


def fit(state, optimiser):
    ee.fit(state, loss, optimiser, ROWS, steps=1, key=KEY)


def step(state, optimiser):
    ee.train.make_step(loss, optimiser)(state, ROWS)


def scan(state, optimiser):
    ee.train.scan_steps(ee.train.make_step(loss, optimiser), state, jax.tree.map(lambda x: x[None], ROWS))


def particles(state, optimiser):
    ee.methods.particles.make_step(loss, optimiser, num_rows=8)(state, ROWS)


def select(state, optimiser):
    ee.methods.population.select(state, [0])


def revive(state, optimiser):
    ee.train.revive(state, optimiser, key=KEY)


PARTS = {
    "step": (lambda s: s.step, [3, jnp.zeros(MEMBERS, int), jnp.float32(1.0), None]),
    "status": (lambda s: s.moving.status, [[0] * MEMBERS, jnp.zeros(2, jnp.int8), jnp.int8(0), jnp.zeros(MEMBERS)]),
    "stopped_at": (lambda s: s.moving.stopped_at, [[0] * MEMBERS, jnp.zeros(2, int)]),
    "fault": (lambda s: s.moving.fault, [[0] * MEMBERS, jnp.zeros(2, int)]),
    "ids": (lambda s: s.ids, [[0] * MEMBERS, jnp.zeros(MEMBERS), jnp.int32(0)]),
    "key": (lambda s: s.fixed.key, [[0] * MEMBERS, jax.random.key(0), jax.random.split(KEY, 2)]),
    "params.weight": (lambda s: s.moving.params.weight, [1.0, jnp.zeros((2, 1, 1)), [0.0] * MEMBERS]),
    "hyper['lr']": (lambda s: s.hyper["lr"], [0.1, jnp.zeros(2), jnp.float32(0.1), [0.1] * MEMBERS]),
}


@pytest.mark.parametrize("call", [fit, step, scan, particles, select, revive])
@pytest.mark.parametrize("part", PARTS)
def test_the_part_that_does_not_fit_is_named(part, call, unhooked):
    where, values = PARTS[part]
    for value in values:
        is_ids = part == "ids"  # which are no leaf
        state = state_of(sgd)
        state = dataclasses.replace(state, ids=value) if is_ids else eqx.tree_at(where, state, value)
        with pytest.raises(
            (TypeError, ValueError), match=rf"`\S+` needs `{re.escape(part)}\S* of the training state to"
        ):
            call(state, sgd)


@pytest.mark.parametrize("call", [fit, step, scan, particles])
def test_hyper_that_an_optimiser_keeps_in_its_state(call, unhooked):
    for value in (jnp.zeros(2), 0.1):
        state = eqx.tree_at(lambda s: s.hyper["lr"], state_of(injected), value)
        with pytest.raises((TypeError, ValueError), match=r"needs `hyper\['lr'\]` of the training state to be"):
            call(state, injected)
    state = eqx.tree_at(lambda s: s.fixed.hyper, state_of(injected), {"rl": jnp.zeros(MEMBERS)})
    with pytest.raises(
        (TypeError, KeyError), match="needs `hyper` of the training state to keep its st|`hyper` has no"
    ):
        call(state, injected)


@pytest.mark.parametrize("call", [step, scan, particles])
@pytest.mark.parametrize("optimiser", [sgd, optax.sgd])
def test_an_optimiser_function_needs_hyper(optimiser, call):
    ensemble = ee.build(lambda key: eqx.nn.Linear(1, 1, key=key), MEMBERS, key=KEY)
    state = ee.train.init(ensemble, optax.sgd(0.1), key=KEY)
    with pytest.raises(
        TypeError, match=r"needs an optax optimiser, got the function `sgd`(.|\n)*`hyper=` to `train.init`"
    ):
        call(state, optimiser)


def test_numpy_arrays_fit():
    state = eqx.tree_at(
        lambda s: (s.step, s.hyper["lr"]), state_of(sgd), (np.int32(4), np.full(MEMBERS, 0.1, np.float32))
    )
    for call in (fit, step, scan):
        call(state, sgd)


def with_aux(model, batch, key):
    return loss(model, batch, key), {"twice": 2.0}


def with_no_aux(model, batch, key):
    return loss(model, batch, key), None


def test_another_has_aux_is_noticed_before_the_first_step():
    ensemble, steps = ee.build(lambda key: eqx.nn.Linear(1, 1, key=key), MEMBERS, key=KEY), []
    sgd = optax.sgd(0.1)
    plain = ee.fit(ensemble, loss, sgd, ROWS, steps=1, key=KEY)
    both = ee.fit(ensemble, with_aux, sgd, ROWS, steps=1, has_aux=True, key=KEY)
    options = {"steps": 1, "callbacks": lambda progress: steps.append(progress.step), "key": KEY}
    for begun, fn, has_aux in ((plain, with_aux, True), (both, loss, False)):
        with pytest.raises(TypeError, match=f"recorded with `has_aux={not has_aux}`; got `has_aux={has_aux}`"):
            ee.fit(begun, fn, sgd, ROWS, has_aux=has_aux, **options)
        assert steps == []
        ee.fit(begun.train_state, fn, sgd, ROWS, steps=1, has_aux=has_aux, key=KEY)
    for fn, has_aux in ((with_no_aux, True), (loss, False)):
        assert ee.fit(plain, fn, sgd, ROWS, steps=1, has_aux=has_aux, key=KEY).history.loss.shape == (MEMBERS, 2)
