"""What a plain loop over one member does with unusual input, the members of a fit do."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_ensemble as ee

KEY, MEMBERS = jax.random.key(0), 3
X = np.asarray(jax.random.normal(jax.random.key(1), (8, 2)))
BATCHES = [(X[:4], X[:4].sum(1)), (X[4:], X[4:].sum(1))]


def loss(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch[0])[:, 0] - batch[1]) ** 2)


@ft.cache
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), MEMBERS, key=KEY)


def fit(start=None, loss=loss, optimiser=optax.sgd(0.1), **options):  # noqa: B008
    options = {"epochs": 2, "key": KEY, **options}
    return ee.fit(ensemble() if start is None else start, loss, optimiser, BATCHES, **options)


def alone(i, optimiser, scale=1.0):
    """Member `i` after the same steps in a plain loop."""
    model, state = ensemble()[i], optimiser.init(eqx.filter(ensemble()[i], eqx.is_array))
    for batch in 2 * BATCHES:
        grads = eqx.filter_grad(lambda model, batch=batch: scale * loss(model, batch, None))(model)
        updates, state = optimiser.update(grads, state, eqx.filter(model, eqx.is_array))
        model = eqx.apply_updates(model, updates)
    return model


def assert_close(model, other):
    for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_loss_that_calls_python_is_not_mistaken_for_another_one():
    def scaled(scale):
        host = lambda x: np.float32(scale) * x
        by_host = lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((), np.float32), x, vmap_method="sequential")
        return lambda model, batch, key: by_host(jnp.float32(1)) * loss(model, batch, key)

    for scale in (1.0, 2.0):
        assert_close(fit(loss=scaled(scale)).ensemble[1], alone(1, optax.sgd(0.1), scale))
