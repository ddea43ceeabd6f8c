"""Elites and sparse weights: which members are left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine


def test_elites_are_the_best():
    scores = np.float32([0.3, 0.1, np.nan, 0.2, -np.inf])
    np.testing.assert_array_equal(combine.weights.elites(scores, 1, mode="min"), [0, 0, 0, 0, 1])
    np.testing.assert_allclose(combine.weights.elites(scores, 3, mode="min"), [0, 1 / 3, 0, 1 / 3, 1 / 3], rtol=1e-6)
    assert combine.weights.elites(scores, 4, mode="min")[2] == 0
    ties = np.array([2, 1, 1, 1])
    np.testing.assert_array_equal(combine.weights.elites(ties, 2, mode="min"), [0, 0.5, 0.5, 0])  # the first ones
    np.testing.assert_array_equal(combine.weights.elites(ties, 2, mode="max"), [0.5, 0.5, 0, 0])
    np.testing.assert_array_equal(combine.weights.elites(ties.astype(np.uint8) - 1, 1, mode="max"), [1, 0, 0, 0])
    np.testing.assert_array_equal(combine.weights.elites(np.array([np.nan, 0.5, 0.7]), 1, mode="max"), [0, 0, 1])
    close = np.array([1.00000001, 1.0])  # equal in float32
    np.testing.assert_array_equal(combine.weights.elites(close, 1, mode="min"), [0, 1])
    jitted = jax.jit(lambda x: combine.weights.elites(x, 2, mode="min"))(scores)
    np.testing.assert_array_equal(jitted, [0, 0.5, 0, 0, 0.5])
    np.testing.assert_array_equal(jax.vmap(lambda x: combine.weights.elites(x, 2, mode="min"))(scores[None])[0], jitted)


def test_sparse_weights():
    weights = np.array([0.5, 0.0, 0.125, 0.375])
    members, kept = combine.weights.sparsify(weights)
    np.testing.assert_array_equal(members, [0, 2, 3])
    np.testing.assert_allclose(kept, [0.5, 0.125, 0.375], rtol=1e-6)
    members, kept = combine.weights.sparsify(3 * weights, above=0.125)  # not those at 0.125 itself
    np.testing.assert_array_equal(members, [0, 3])
    np.testing.assert_allclose(kept, [4 / 7, 3 / 7], rtol=1e-6)
    np.testing.assert_array_equal(combine.weights.sparsify(weights, num_members=1).members, [0])
    np.testing.assert_array_equal(combine.weights.sparsify(weights, num_members=9).members, [0, 2, 3])
    np.testing.assert_array_equal(combine.weights.sparsify(np.array([1, 2, 2, 2]), num_members=2).members, [1, 2])
    assert combine.weights.sparsify(weights.astype(np.float32)).weights.dtype == jnp.float32


def test_a_sparse_combination_is_the_weighted_one():
    values, weights = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32), np.array([0.5, 0.0, 0.1, 0.4])
    members, kept = combine.weights.sparsify(weights)
    want = combine.mean(values, weights=weights)
    np.testing.assert_allclose(combine.mean(values[members], weights=kept), want, rtol=1e-6)
    assert not np.allclose(combine.mean(values[members]), want, rtol=1e-2)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match=r"elites` needs one score per member, `\(members,\)`.\n  got shape \(2, 2\)"):
        combine.weights.elites(np.ones((2, 2)), 1, mode="min")
    with pytest.raises(ValueError, match="`count` of at most the number of members.\n  got 3 of 2"):
        combine.weights.elites(np.ones(2), 3, mode="min")
    with pytest.raises(ValueError, match="`count` members with a score that is not NaN.\n  got 1, need 2"):
        combine.weights.elites(np.array([1.0, np.nan]), 2, mode="min")
    with pytest.raises(TypeError, match="needs an integer `count`, got 1.5"):
        combine.weights.elites(np.ones(2), 1.5, mode="min")
    with pytest.raises(TypeError, match="weights whose values are known.\n  got a traced array\nCall it outside"):
        jax.jit(lambda w: combine.weights.sparsify(w).weights)(np.ones(2))
    with pytest.raises(ValueError, match="finite `weights` of zero or more"):
        combine.weights.sparsify(np.array([1.0, -1.0]))
    found = combine.weights.Sparse(np.arange(2), np.ones(2))
    for call in (
        lambda: combine.weights.sparsify(found),
        lambda: combine.mean(np.ones((2, 3)), weights=found),
    ):
        with pytest.raises(TypeError, match=r"as an array `\(members,\)`.\n  got a Sparse\nPass its weights alone"):
            call()
    with pytest.raises(ValueError, match=r"below the largest weight.\n  got above=0.6; the largest weight is 0.5 of"):
        combine.weights.sparsify(np.ones(2), above=0.6)
    with pytest.raises(ValueError, match=r"one weight per member, `\(members,\)`.\n  got shape \(\)"):
        combine.weights.sparsify(np.float32(1))
