"""Each member is what `make(key)` gives alone."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

from .marking import slow_but

KEY = jax.random.key(0)
NUM_MEMBERS = 3
KEYS = ee.member_keys(KEY, NUM_MEMBERS)


class Holder(eqx.Module):
    """Any arrays."""

    value: object


def arithmetic(key):
    """Sums of products, which may be rounded once instead of twice."""
    first, second = jax.random.split(key)
    x, y = jax.random.normal(first, (7, 5)), jax.random.uniform(second, (7, 5), minval=-3.0)
    z = x * 0.1 + y * 0.3
    return {"sum": z, "scaled": (z * x + y) / jnp.linalg.norm(z), "product": z.T @ z, "mean": jnp.mean(z * y, axis=0)}


def several_keys(key):
    """Keys that are split, folded, kept, and drawn from in a loop."""
    keys = jax.random.split(jax.random.fold_in(key, 3), 4)
    walk = lambda carry, key: (carry * 0.9 + jax.random.normal(key), carry)
    last, path = jax.lax.scan(walk, jnp.float32(0.0), keys)
    return {"keys": keys, "last": last, "path": path, "constant": jnp.arange(3.0) / 7, "text": "any", "rate": 0.5}


DRAWN = {
    "normal": jax.random.normal,
    "truncated": functools.partial(jax.random.truncated_normal, lower=-2.0, upper=2.0),
    "bernoulli": functools.partial(jax.random.bernoulli, p=0.3),
    "randint": functools.partial(jax.random.randint, minval=0, maxval=1000),
    "permutation": lambda key, shape: jax.random.permutation(key, 20),
    "gamma": functools.partial(jax.random.gamma, a=0.7),
    "laplace": jax.random.laplace,
    "half": functools.partial(jax.random.normal, dtype=jnp.bfloat16),
    "orthogonal": lambda key, shape: jax.random.orthogonal(key, 5),
    "he": lambda key, shape: jax.nn.initializers.he_normal()(key, shape, jnp.float32),
}
MAKERS = {
    "mlp": lambda key: eqx.nn.MLP(3, 2, 8, 2, key=key),
    "conv": lambda key: eqx.nn.Conv2d(2, 3, 3, key=key),
    "recurrent": lambda key: eqx.nn.GRUCell(3, 4, key=key),
    "attention": lambda key: eqx.nn.MultiheadAttention(2, 4, dropout_p=0.1, key=key),
    "stateful": lambda key: eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch"),
    "arithmetic": lambda key: Holder(arithmetic(key)),
    "keys": lambda key: Holder(several_keys(key)),
    "layers": lambda key: eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 3, key=key))(jax.random.split(key, 4)),
    "many keys": lambda key: Holder(jax.vmap(jax.random.normal)(jax.random.split(key, 5))),
    "compiled": lambda key: eqx.filter_jit(eqx.nn.Linear)(3, 4, key=key),
    "old keys": lambda key: Holder(jax.random.normal(jax.random.key_data(key), (3,))),
    "nothing random": lambda key: Holder(jnp.ones(3)),
} | {name: lambda key, draw=draw: Holder(draw(key, shape=(4, 5))) for name, draw in DRAWN.items()}


def arrays(tree):
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    ]


def assert_same_members(made, make):
    """With the structure and the leaves that are not arrays; sums of products may be rounded differently."""
    ensemble, *state = made if isinstance(made, tuple) else (made,)
    for i, key in enumerate(KEYS):
        alone = make(key)
        got = (ensemble[i], *(ee.tree.take(x, i) for x in state)) if state else ensemble[i]
        assert jax.tree.structure(got) == jax.tree.structure(alone)
        texts = lambda tree: [x for x in jax.tree.leaves(tree) if not eqx.is_array(x)]
        assert texts(got) == texts(alone)
        for member, expected in zip(arrays(got), arrays(alone), strict=True):
            assert member.dtype == expected.dtype
            exact = jnp.issubdtype(member.dtype, jnp.integer)
            member, expected = (x if exact else np.asarray(x, np.float32) for x in (member, expected))
            np.testing.assert_allclose(member, expected, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


OTHERS = {
    "poisson": lambda key: Holder(jax.random.poisson(key, 3.0, (4,))),
    "several kinds of keys": lambda key: Holder(jnp.stack([key, jax.random.key(1)])),
    "ensembles": lambda key: ee.build(MAKERS["mlp"], 2, key=key).stacked,
}


@pytest.mark.parametrize("name", slow_but(["mlp", "keys", "permutation", "conv"], MAKERS | OTHERS))
def test_each_member_is_what_the_constructor_makes_alone(name):
    make = (MAKERS | OTHERS)[name]
    assert_same_members(ee.build(make, key=KEYS), make)


def test_arguments_of_the_members():
    make = lambda key, scale, shift: Holder(jax.random.normal(key, (4,)) * scale + shift)
    arguments = {"scale": jnp.array([1.0, 0.1, 3.0]), "shift": jnp.arange(12.0).reshape(3, 4) / 7}
    stacked = ee.build(make, key=KEYS, zip=arguments).stacked
    for i, key in enumerate(KEYS):
        alone = make(key, *(x[i] for x in arguments.values()))
        np.testing.assert_array_equal(stacked.value[i], alone.value)


def test_constants_that_a_constructor_caches_can_be_used_later():
    """They are not tracers: the constructor is mapped, not traced by `jax.jit`."""
    table = functools.lru_cache(lambda: jnp.arange(3.0))
    ee.build(lambda key: Holder(jax.random.normal(key, (3,)) * table()), key=KEYS)
    assert not isinstance(table(), jax.core.Tracer)
