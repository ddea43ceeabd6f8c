import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_close

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (8, 3))
Y = jax.random.normal(jax.random.key(1), (8, 2))
RATES = jnp.array([0.1, 0.3])


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(3, 2, key=key), 2, key=KEY)


def loss(model, batch, key=None):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def non_negative(model):
    return eqx.tree_at(lambda model: model.weight, model, replace_fn=jax.nn.relu)


def unit_rows(model):
    unit = lambda w: w / jnp.linalg.norm(w, axis=-1, keepdims=True)
    return eqx.tree_at(lambda model: model.weight, model, replace_fn=unit)


@pytest.mark.parametrize("constraint", [non_negative, unit_rows])
def test_each_member_is_that_of_a_loop_that_projects(ensemble, constraint):
    optimiser = lambda hyper: ee.train.project(optax.sgd(hyper["rate"], momentum=0.9), constraint)
    options = {"steps": 6, "batch_size": 8, "shuffle": False, "hyper": {"rate": RATES}, "key": KEY}
    run = ee.fit(ensemble, loss, optimiser, (X, Y), **options)
    for i, rate in enumerate(RATES):
        model, alone = ensemble[i], optax.sgd(rate, momentum=0.9)
        state = alone.init(model)
        for _ in range(6):
            updates, state = alone.update(jax.grad(loss)(model, (X, Y)), state, model)
            model = constraint(optax.apply_updates(model, updates))
        assert_close(run.ensemble[i], model, 1e-5)
    weight = run.ensemble.stacked.weight
    if constraint is non_negative:
        assert (weight >= 0).all()
        assert (weight == 0).any()
    else:
        np.testing.assert_allclose(jnp.linalg.norm(weight, axis=-1), 1, rtol=1e-6)


def test_only_trained_weights_are_projected(ensemble):
    optimiser = ee.train.project(optax.sgd(0.1), lambda params: jax.tree.map(jnp.zeros_like, params))
    trainable = eqx.tree_at(lambda model: model.weight, jax.tree.map(lambda _: False, ensemble[0]), replace=True)
    run = ee.fit(ensemble, loss, optimiser, (X, Y), steps=1, trainable=trainable, key=KEY)
    assert (run.ensemble.stacked.weight == 0).all()
    np.testing.assert_array_equal(run.ensemble.stacked.bias, ensemble.stacked.bias)


@pytest.mark.usefixtures("unhooked")
def test_wrong_calls(ensemble):
    with pytest.raises(AttributeError, match="init"):  # of a function of hyper-parameters: wrap what it returns
        ee.train.project(lambda hyper: optax.sgd(hyper), non_negative)
    with pytest.raises(ValueError, match="needs the weights"):
        ee.train.project(optax.sgd(0.1), non_negative).update(ensemble[0], optax.EmptyState())
    wide = ee.train.project(optax.sgd(0.1), lambda params: jax.tree.map(lambda x: x[None], params))
    with pytest.raises(ValueError, match="keep the shape"):
        ee.fit(ensemble, loss, wide, (X, Y), steps=1, key=KEY)
