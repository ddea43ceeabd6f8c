"""Models of several architectures, and the loop over them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqx_ensemble as ee

KEY = jax.random.key(0)
WIDE, NARROW = (lambda key, width=width: eqx.nn.MLP(3, 2, width, 1, key=key) for width in (8, 5))


def linear(key):
    return eqx.nn.Linear(3, 2, key=key)


MAKERS = {"wide": WIDE, "narrow": NARROW, "linear": linear}


def models(kinds):
    """A model of each kind, all with different weights."""
    keys = jax.random.split(KEY, len(kinds))
    return [MAKERS[kind](key) for kind, key in zip(kinds, keys, strict=True)]


LISTED = models(["wide", "linear", "wide", "narrow", "linear"])


def rows(count=10):
    return jax.random.normal(jax.random.key(1), (count, 3))


def looped(members, x):
    """The predictions of models one after another."""
    return np.stack([np.asarray(jax.vmap(model)(x)) for model in members])


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def make_group(key, sizes=(1, 1)):
    """A function of a key, as `load` takes it."""
    wide = ee.build(WIDE, sizes[0], key=key)
    return ee.Group({"wide": wide, "linear": ee.build(linear, sizes[1], key=key)}, renumber=True)


class Stateful(eqx.Module):
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")
        self.out = eqx.nn.Linear(3, 2, key=key)

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.out(x), state


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)
