"""The Gaussian prior of a mean loss, against the density of scipy and against anchors at zero."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import eqx_ensemble as ee
from eqx_ensemble.methods.priors import Anchor, gaussian_penalty

KEY = jax.random.key(0)


class Net(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    trunk: ee.train.Frozen
    count: jax.Array

    def __init__(self, key):
        self.weight, self.bias = jax.random.normal(key, (3, 2)), jnp.array([1.0, -2.0])
        self.trunk, self.count = ee.train.Frozen(jnp.full(5, 100.0)), jnp.array(3)


def test_log_density():
    """Differences between two models: the penalty leaves out the constant."""
    first, second, rows = Net(KEY), Net(jax.random.key(1)), 20
    std = lambda leaf: 0.5 * leaf.ndim
    found = rows * (gaussian_penalty(second, std, num_rows=rows) - gaussian_penalty(first, std, num_rows=rows))
    density = lambda m: sum(
        scipy.stats.norm.logpdf(np.asarray(x), scale=0.5 * x.ndim).sum() for x in (m.weight, m.bias)
    )
    np.testing.assert_allclose(found, density(first) - density(second), rtol=1e-5)


def test_an_anchor_at_zero():
    model = Net(KEY)
    weights = eqx.tree_at(
        lambda m: (m.weight, m.bias, m.trunk.value, m.count), model, (jnp.zeros((3, 2)), jnp.zeros(2), None, None)
    )
    std = jax.tree.map(lambda x: 0.7, weights)
    anchored = Anchor(weights, std).penalty(model, num_rows=8)
    np.testing.assert_allclose(gaussian_penalty(model, 0.7, num_rows=8), anchored, rtol=1e-6)
    traced = jax.jit(lambda model, std, rows: gaussian_penalty(model, std, num_rows=rows))
    np.testing.assert_allclose(traced(model, jnp.float32(0.7), 8), anchored, rtol=1e-6)
    gradient = eqx.filter_grad(lambda m: gaussian_penalty(m, 0.5, num_rows=8))(model)
    np.testing.assert_allclose(gradient.bias, model.bias / (8 * 0.5**2))
    assert not gradient.trunk.value.any()


def test_half_precision_is_summed_in_single():
    model = {"w": jnp.full(5000, 0.1, jnp.bfloat16), "b": jnp.zeros(3, jnp.float32)}
    found = gaussian_penalty(model, num_rows=1)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 5000 * np.float32(model["w"][0]) ** 2 / 2, rtol=1e-5)


def test_all_members_at_once_are_refused():
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 3, key=jax.random.key(0))
    with pytest.raises(TypeError, match="the model of one member, got an `Ensemble`"):
        gaussian_penalty(ensemble, num_rows=10)
    assert gaussian_penalty(ensemble[0], num_rows=10) > 0
