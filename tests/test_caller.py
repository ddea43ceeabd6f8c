"""Messages name the public function that the user's code called."""

import functools as ft
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
LOGITS = jnp.ones((3, 4, 2))
LABELS = jnp.zeros(5, int)
ENSEMBLE = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 3, key=KEY)
X, Y = jnp.ones((8, 2)), jnp.ones((8, 1))


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def score_in_loss(model, batch, key):
    return mse(model, batch, key) + ee.scores.rmse(jnp.ones((2, 3)), jnp.ones(4))


fit = ft.partial(ee.fit, ENSEMBLE, optimiser=optax.sgd(0.1), data=(X, Y), batch_size=4, key=KEY)
CALLS = {
    "scores.nll": lambda: ee.scores.nll(LOGITS, LABELS),
    "scores.brier": lambda: eqx.filter_jit(ee.scores.brier)(LOGITS, LABELS),
    "scores.ece": lambda: jax.eval_shape(lambda x: jax.jit(ee.scores.ece)(x, LABELS), LOGITS),
    "scores.rmse": lambda: fit(loss=score_in_loss, epochs=1),
    "fit": lambda: fit(loss=mse),
    "Ensemble.__getitem__": lambda: ENSEMBLE[7],
    "Each": lambda: ee.Each([eqx.nn.Linear(2, 1, key=KEY)]),
    "plan.Blocks": lambda: ee.plan.Blocks(0),
    "conformal.Split": lambda: ee.conformal.split(jnp.arange(9.0), jnp.zeros(9), level=0.5)(jnp.ones(3, int)),
    "conformal.Aci.update": lambda: ee.conformal.aci(level=0.9).update("x"),
    "train.make_step": lambda: ee.train.make_step(mse, optax.sgd(0.1))(
        ee.train.init(ENSEMBLE, optax.sgd(0.1), key=KEY), (X, np.full((8, 1), 2**40))
    ),
    "map_members": lambda: ee.map_members(first)(X),
    "combine.mixture": lambda: ee.predict(ENSEMBLE, X, combine=ee.combine.mixture, fn=pair),
    "combine.gaussian": lambda: ee.predict(ENSEMBLE, X, combine=ee.combine.gaussian),
}


def pair(model, x):
    return model(x), model(x)


def first(model):
    return model.weight[0]


def named(call):
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        call()
    return str(caught.value).partition("`")[2].partition("`")[0]


@pytest.mark.parametrize("name", CALLS)
def test_message_names_what_was_called(unhooked, name):
    assert named(CALLS[name]) == name


def test_message_in_another_thread(unhooked):
    with ThreadPoolExecutor(1) as executor:
        assert named(lambda: executor.submit(ee.scores.nll, LOGITS, LABELS).result()) == "scores.nll"
