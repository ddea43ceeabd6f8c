import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)


def bits(keys):
    return np.asarray(jax.random.key_data(keys))


def test_the_documented_formula():
    keys = ee.member_keys(KEY, 5)
    base = jax.random.fold_in(KEY, zlib.crc32(b"build"))
    np.testing.assert_array_equal(bits(keys), np.stack([bits(jax.random.fold_in(base, i)) for i in range(5)]))
    purpose = ee.member_keys(KEY, 3, purpose="mask")
    expected = jax.random.fold_in(jax.random.fold_in(KEY, zlib.crc32(b"mask")), 2)
    np.testing.assert_array_equal(bits(purpose)[2], bits(expected))


def test_a_key_depends_on_the_position_alone():
    keys = bits(ee.member_keys(KEY, 8))
    np.testing.assert_array_equal(bits(ee.member_keys(KEY, 3)), keys[:3])
    np.testing.assert_array_equal(bits(ee.member_keys(ee.member_keys(KEY, 8)[5:], 3)), keys[5:])


def test_purposes_steps_and_splits_do_not_collide():
    """Without a tag, `split(key, n)[i]` is `fold_in(key, i)`."""
    np.testing.assert_array_equal(bits(jax.random.split(KEY, 4)[3]), bits(jax.random.fold_in(KEY, 3)))
    streams = [ee.member_keys(KEY, 50, purpose=p) for p in ("build", "loss", "rows", "shared rows", "predict", "call")]
    at_step = lambda step: jax.vmap(lambda key: jax.random.fold_in(key, step))(streams[1])
    streams += [at_step(step) for step in (0, 1, 2, 1000)]
    streams += [jax.random.split(KEY, 50)]
    everything = np.concatenate([bits(keys) for keys in streams])
    assert len(np.unique(everything, axis=0)) == len(everything)


def test_a_legacy_key_is_the_typed_key():
    legacy = jax.random.PRNGKey(0)
    np.testing.assert_array_equal(bits(ee.member_keys(legacy, 4)), bits(ee.member_keys(KEY, 4)))
    np.testing.assert_array_equal(bits(ee.member_keys(np.asarray(legacy), 4)), bits(ee.member_keys(KEY, 4)))


def test_these_are_the_keys_that_build_gives():
    make = lambda key: eqx.nn.Linear(2, 1, key=key)
    ensemble = ee.build(make, 3, key=KEY)
    np.testing.assert_array_equal(ensemble[1].weight, make(ee.member_keys(KEY, 3)[1]).weight)


def test_under_jit():
    drawn = jax.jit(lambda key: ee.member_keys(key, 4))(KEY)
    np.testing.assert_array_equal(bits(drawn), bits(ee.member_keys(KEY, 4)))


@pytest.mark.slow
def test_keys_of_a_call():
    dropout = ee.stack([eqx.nn.Sequential([eqx.nn.Linear(3, 64, key=KEY), eqx.nn.Dropout()])] * 3)
    x = jnp.ones(3)
    same = np.asarray(dropout(x, key=KEY)) == 0
    own = np.asarray(dropout(x, key=ee.Each(ee.member_keys(KEY, 3, purpose="call")))) == 0
    assert (same[0] == same[1]).all()
    assert (own[0] != own[1]).any()
    assert (own[1] != own[2]).any()


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_other_generators_are_refused_because_vmap_changes_them(implementation):
    keys = jax.random.split(jax.random.key(0, impl=implementation), 3)
    together = jax.vmap(lambda key: jax.random.normal(key, (2,)))(keys)
    alone = jnp.stack([jax.random.normal(key, (2,)) for key in keys])
    assert (np.asarray(together) != np.asarray(alone)).any()
    with pytest.raises(TypeError, match="threefry"):
        ee.member_keys(keys[0], 3)


@pytest.mark.slow
def test_another_default_generator_is_no_reason_to_fail(tmp_path):
    """`jax_default_prng_impl="rbg"` is usual on TPUs; keys that the library makes itself are threefry keys."""

    class Noisy(eqx.Module):
        linear: eqx.nn.Linear
        key: jax.Array
        rate: jax.Array

        def __init__(self, key, rate=0.0):
            self.linear, self.key, self.rate = eqx.nn.Linear(3, 2, key=key), key, jnp.asarray(rate)

        def __call__(self, x):
            return self.linear(x)

    def loss(model, batch, key):
        return jnp.mean((jax.vmap(model)(batch[0]) + 0.1 * jax.random.normal(key, (8, 2)) - batch[1]) ** 2)

    x = jnp.ones((8, 3)), jnp.zeros((8, 2))

    def everything(folder):
        ensemble = ee.build(Noisy, zip={"rate": [0.1, 0.2]}, key=KEY)
        run = ee.fit(
            ensemble, loss, optax.sgd(0.1), x, epochs=2, plan=ee.plan.Blocks(1), checkpoint=folder / "run", key=KEY
        )
        ee.save(folder / "saved", run.ensemble)
        loaded = ee.load(folder / "saved", Noisy)
        template = ee.methods.adapters.low_rank(eqx.nn.Linear(3, 2, key=KEY), 2, rank=1, key=KEY)
        return loaded.stacked.linear.weight, template.stacked.down, ee.member_keys(jax.random.key_data(KEY), 2)

    wanted = everything(tmp_path / "threefry")
    with jax.default_prng_impl("rbg"):
        for got, want in zip(everything(tmp_path / "rbg"), wanted, strict=True):
            assert (got == want).all()
