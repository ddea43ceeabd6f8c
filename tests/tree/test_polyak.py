"""Polyak averages against optax, member by member."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
OLD, NEW = (ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), 3, key=key) for key in jax.random.split(KEY))


def same_arrays(got, expected, **tolerance):
    got, expected = (eqx.filter(x, eqx.is_inexact_array) for x in (got, expected))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, **tolerance)


@pytest.mark.parametrize("tau", [np.float32(0.25), 1, jnp.float32(0.3)])
def test_members_move_as_alone(tau):
    got = ee.tree.polyak(OLD, NEW, tau)
    for i in range(3):
        old, new = (eqx.filter(x[i], eqx.is_inexact_array) for x in (OLD, NEW))
        # One rounding of a fused multiply and add, relative to sums that may be smaller than their two terms.
        same_arrays(got[i], optax.incremental_update(new, old, tau), rtol=1e-6, atol=1e-7)


def test_a_long_average_is_the_closed_form():
    """After n steps towards a constant: old (1 - tau)^n + new (1 - (1 - tau)^n)."""
    old, new = {"w": jnp.float32(2.0)}, {"w": jnp.float32(-1.0)}
    step = jax.jit(lambda old: jax.lax.fori_loop(0, 200, lambda _, x: ee.tree.polyak(x, new, 0.01), old))
    left = 0.99**200
    np.testing.assert_allclose(step(old)["w"], 2 * left - (1 - left), rtol=2e-5)  # 200 roundings


def test_what_cannot_be_averaged():
    old = {"count": jnp.array(1), "key": jax.random.key(1), "p": 0.5, "f": jnp.sin, "z": jnp.array(1j), "n": np.ones(2)}
    new = old | {"count": jnp.array(7), "key": jax.random.key(2), "z": jnp.array(1 + 0j), "n": np.zeros(2)}
    got = ee.tree.polyak(old, new, 0.25)
    assert (int(got["count"]), got["p"], got["f"], complex(got["z"])) == (7, 0.5, jnp.sin, 0.25 + 0.75j)
    assert (jax.random.key_data(got["key"]) == jax.random.key_data(new["key"])).all()
    np.testing.assert_array_equal(got["n"], [0.75, 0.75])


def test_sixteen_bits_are_calculated_in_thirty_two():
    old, new = jnp.bfloat16(1.0), jnp.bfloat16(3.0)
    got = ee.tree.polyak(old, new, 0.005)
    assert got.dtype == jnp.bfloat16
    assert float(got) == float(jnp.bfloat16(0.995 + 3 * 0.005))


@pytest.mark.slow
def test_it_moves_inside_jit_and_has_gradients():
    got = eqx.filter_jit(ee.tree.polyak)(OLD, NEW, jnp.float32(0.1))
    same_arrays(got, ee.tree.polyak(OLD, NEW, 0.1), rtol=1e-6, atol=1e-7)
    slope = jax.grad(lambda tau: ee.tree.polyak(jnp.float32(1.0), jnp.float32(4.0), tau))(0.5)
    assert float(slope) == 3.0


BAD = {
    "another dtype": (
        lambda: ee.tree.polyak(jnp.ones(2), jnp.ones(2, jnp.bfloat16), 0.1),
        "MemberMismatchError: `tree.polyak` needs trees that differ only in their arrays; `new` differs "
        "from `old`.\n  at `<root>`: expected f32[2], got bf16[2]\nNothing is promoted silently: cast the leaves",
    ),
    "another rate": (lambda: ee.tree.polyak({"p": 0.5}, {"p": 0.1}, 0.1), "at `['p']`: expected 0.5, got 0.1"),
    "a tau too large": (
        lambda: ee.tree.polyak(OLD, NEW, 1.5),
        "ValueError: `tree.polyak` needs one number from 0 to 1 as `tau`, got 1.5.",
    ),
    "a tau that is none": (
        lambda: ee.tree.polyak(OLD, NEW, float("nan")),
        "ValueError: `tree.polyak` nee",
    ),
    "a tau below": (lambda: ee.tree.polyak(OLD, NEW, jnp.float32(-1)), "from 0 to 1 as `tau`, got f32[]."),
    "one tau each": (
        lambda: ee.tree.polyak(OLD, NEW, jnp.ones(3)),
        "ValueError: `tree.polyak` needs one number from 0 to 1 as `tau`, got f32[3].",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_message(unhooked, name):
    call, text = BAD[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(text.partition(": `tree")[2] or text)) as caught:
        call()
    assert text in f"{type(caught.value).__name__}: {caught.value}"
