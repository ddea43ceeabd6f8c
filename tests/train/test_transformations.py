"""`fit` inside a transformation raises an error; what the error suggests works."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_ensemble as ee

KEY, SGD = jax.random.key(0), optax.sgd(0.1)
DATA = jnp.ones((8, 2)), jnp.zeros(8)


def loss(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch[0])[:, 0] - batch[1]) ** 2)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 2, key=KEY)


def trained(ensemble, data, rate=0.1):
    return ee.fit(ensemble, loss, optax.sgd(rate), data, epochs=1, key=KEY).history.loss.sum()


INSIDE = {
    "jit": lambda ensemble: eqx.filter_jit(trained)(ensemble, DATA),
    "nothing traced": lambda ensemble: jax.jit(lambda: trained(ensemble, DATA))(),
    "vmap": lambda ensemble: jax.vmap(lambda x: trained(ensemble, (x, DATA[1])))(jnp.ones((3, 8, 2))),
    "grad of data": lambda ensemble: jax.grad(lambda x: trained(ensemble, (x, DATA[1])))(DATA[0]),
    "grad of what an optimiser closes over": lambda ensemble: jax.grad(lambda r: trained(ensemble, DATA, r))(0.1),
    "map_members": lambda ensemble: ee.map_members(lambda m: trained(ee.stack([m]), DATA))(ensemble),
}


@pytest.mark.parametrize("case", INSIDE)
@pytest.mark.usefixtures("unhooked")
def test_fit_inside_a_transformation_names_the_way(ensemble, case):
    with pytest.raises(TypeError) as raised:
        INSIDE[case](ensemble)
    message = str(raised.value)  # without the notes that jax adds
    assert message.startswith("`fit` cannot run inside `jax.jit`, `jax.vmap`, `jax.grad` or another transformation")
    assert "`train.make_step`" in message
    assert "`map_members`" in message


def test_the_ways_work(ensemble):
    step = ee.train.make_step(loss, SGD)
    state = ee.train.init(ensemble, SGD, key=KEY)

    @eqx.filter_jit
    def three_steps(state):
        for _ in range(3):
            state, _ = step(state, DATA)
        return state

    def alone(model):
        opt_state = SGD.init(eqx.filter(model, eqx.is_array))
        for _ in range(3):
            updates, opt_state = SGD.update(eqx.filter_grad(loss)(model, DATA, None), opt_state)
            model = eqx.apply_updates(model, updates)
        return model.weight

    want = jax.jit(lambda: ee.map_members(alone)(ensemble))()
    assert jnp.allclose(three_steps(state).ensemble.stacked.weight, want, rtol=1e-5)
