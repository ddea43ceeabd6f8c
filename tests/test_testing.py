"""The checks for users' models pass where they should, and fail where something is wrong."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.custom_batching import custom_vmap

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "loss", "optimiser", "hyper"),
    [
        (mlp, mse, optax.adam(1e-2), None),
        (noisy, dropout_loss, optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), None),
        (mlp, mse, lambda h: optax.lamb(h["rate"]), {"rate": np.array([0.01, 0.02, 0.03, 0.04])}),
    ],
    ids=["mlp", "dropout", "hyper"],
)
def test_independent(make, loss, optimiser, hyper):
    options = {} if hyper is None else {"plans": [ee.plan.Blocks(2)], "hyper": hyper}
    ee.testing.check_independent(make, loss, optimiser, DATA, steps=6, batch_size=8, key=KEY, **options)


@pytest.mark.slow
def test_a_stateful_model():
    case = CASES["conv and batch norm"]
    optimiser = optax.sgd(0.01)
    ee.testing.check_independent(case.make, case.loss, optimiser, data(), steps=4, batch_size=16, rtol=1e-4, key=KEY)


def zeros(key):
    return jax.tree.map(jnp.zeros_like, eqx.nn.Linear(3, 1, key=key))


@pytest.mark.slow
@pytest.mark.parametrize("make", [mlp, zeros])
def test_a_line_search(make):
    plans = [ee.plan.Vmap()]
    ee.testing.check_independent(make, mse, optax.lbfgs(), DATA, steps=4, plans=plans, rtol=1e-3, key=KEY)


@custom_vmap
def alone(x):
    return x


@alone.def_vmap
def _not_alone(size, batched, x):
    return x + 1e-3 * jnp.mean(x, axis=0, keepdims=True), batched[0]


def coupled(optimiser):
    """Adds a little of the members' mean gradient to each."""
    mixed = optax.stateless(lambda updates, params: jax.tree.map(alone, updates))
    return optax.chain(mixed, optimiser)


def remembering():
    """A loss that counts its calls while it is traced."""
    calls = []

    def loss(model, batch, key):
        calls.append(1)
        return mse(model, batch, key) * len(calls)

    return loss


WRONG = {
    "members mixed": (mlp, mse, coupled(optax.sgd(0.1)), r"Vmap\(\): .*`.*weight` differs by"),
    "a loss that remembers": (mlp, remembering(), optax.sgd(0.1), r"Vmap\(\): .*`.*weight` differs by"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name):
    make, loss, optimiser, text = WRONG[name]
    with pytest.raises(AssertionError, match=text):
        ee.testing.check_independent(
            make, loss, optimiser, DATA, num_members=2, steps=6, plans=[ee.plan.Vmap()], key=KEY
        )
