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
    ee.testing.check_independent(make, loss, optimiser, DATA, steps=6, batch_size=8, key=KEY, **options)


@pytest.mark.slow
def test_a_stateful_model():
    case = CASES["conv and batch norm"]
    optimiser = optax.sgd(0.01)
    ee.testing.check_independent(case.make, case.loss, optimiser, data(), steps=4, batch_size=16, rtol=1e-4, key=KEY)


class Attention(eqx.Module):
    """The keys' bias shifts all scores of a query equally: its true gradient is zero."""

    attention: eqx.nn.MultiheadAttention
    out: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, 4, use_key_bias=True, key=k1)
        self.out = eqx.nn.Linear(4, 1, key=k2)

    def __call__(self, x):
        tokens = x[:, None] * jnp.ones((3, 4))
        return self.out(jnp.mean(self.attention(tokens, tokens, tokens), axis=0))


class BiasBeforeNorm(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.linear = eqx.nn.Linear(3, 4, key=k1)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
        self.out = eqx.nn.Linear(4, 1, key=k2)

    def __call__(self, x, state):
        x, state = self.norm(self.linear(x), state)
        return self.out(jax.nn.tanh(x)), state


def normalised_loss(model, state, batch, key):
    x, y = batch
    axes = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}
    found, state = jax.vmap(model, **axes)(x, state)
    return jnp.mean((found - y) ** 2), state


def zeros(key):
    return jax.tree.map(jnp.zeros_like, eqx.nn.Linear(3, 1, key=key))


def layer_norm(key):
    return eqx.nn.LayerNorm(3)


def softmax_loss(model, batch, key):
    """Sums to one whatever the model predicts: all true gradients are zero."""
    return jnp.sum(jax.nn.softmax(jax.vmap(model)(batch[0])[:, 0]))


def quick_or_slow(cases, *quick):
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in cases]


ADAM = optax.adam(1e-2)
CORRECT = {
    "the bias of an attention's keys": (Attention, mse, ADAM, {}),
    "a bias in front of a normalisation": (eqx.nn.make_with_state(BiasBeforeNorm), normalised_loss, ADAM, {}),
    "a line search": (mlp, mse, optax.lbfgs(), {"steps": 8}),
    "no gradient at all": (mlp, softmax_loss, ADAM, {}),
    "zeros": (zeros, mse, ADAM, {}),
    "LayerNorm": (layer_norm, mse, ADAM, {}),
    "one member": (mlp, mse, ADAM, {"num_members": 1}),
}


@pytest.mark.parametrize("name", quick_or_slow(CORRECT, "the bias of an attention's keys", "zeros", "one member"))
def test_what_is_correct_passes(name):
    make, loss, optimiser, options = CORRECT[name]
    options = {"num_members": 2, "steps": 4, "plans": [ee.plan.Vmap()]} | options
    ee.testing.check_independent(make, loss, optimiser, DATA, key=KEY, **options)


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


def drawing(model, batch, key):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    drawn = jax.pure_callback(lambda _: np.float32(RNG.normal()), shape, batch[1][0, 0], vmap_method="sequential")
    return mse(model, batch, key) * (1 + 0.01 * drawn)


def chaotic_loss(model, batch, key):
    return jnp.mean(jnp.sin(1e3 * jax.vmap(model)(batch[0])))


RNG = np.random.default_rng(0)
WRONG = {
    "members mixed, whatever the keys' bias does": (Attention, mse, coupled(ADAM), r"together as alone: at .*weight"),
    "members mixed": (mlp, mse, coupled(optax.sgd(0.1)), r"together as alone: at .*weight"),
    "draws of its own": (mlp, drawing, ADAM, r"training alone is not the same twice, .* does the loss draw without"),
    "chaos": (mlp, chaotic_loss, optax.sgd(0.1), "this is inconclusive, because rounding alone changes the losses by"),
}


@pytest.mark.parametrize("name", quick_or_slow(WRONG, "members mixed", "draws of its own"))
def test_what_is_wrong_is_found(name):
    make, loss, optimiser, text = WRONG[name]
    with pytest.raises(AssertionError, match=text):
        ee.testing.check_independent(
            make, loss, optimiser, DATA, num_members=2, steps=6, plans=[ee.plan.Vmap()], key=KEY
        )


def test_a_loss_that_remembers_is_found():
    calls = []

    def remembering(model, batch, key):
        calls.append(1)
        return mse(model, batch, key) * len(calls)

    with pytest.raises(
        AssertionError, match=r"FAILED  Vmap\(\): trained together as alone: at `\[0\]\.layers\[0\]\.weight`: rel"
    ):
        ee.testing.check_independent(mlp, remembering, optax.sgd(0.1), DATA, steps=3, key=KEY)


def test_one_data_set_for_all_members(unhooked):
    with pytest.raises(TypeError, match="trains all members on the same `data`: pass it without `Each`"):
        ee.testing.check_independent(mlp, mse, optax.sgd(0.1), ee.Each(DATA), key=KEY)


def test_a_constructor_that_remembers_is_found():
    """All checks are listed, also those that pass."""
    widths = iter(range(4, 90))
    make = lambda key: eqx.nn.MLP(3, 1, next(widths), 1, key=key)
    with pytest.raises(AssertionError, match="FAILED  each member equals what `make` gives alone: at ") as caught:
        ee.testing.check_independent(make, mse, ADAM, DATA, steps=2, plans=[ee.plan.Chunked(2)], key=KEY)
    assert "\nok      Chunked(2): with a member of NaN\n" in str(caught.value)
