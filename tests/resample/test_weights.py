import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqx_ensemble as ee
from eqx_ensemble import resample

from ..factories import assert_close, distance, mlp, mse

stats = pytest.importorskip("scipy.stats", reason="the exact laws are scipy's")

KEY = jax.random.key(3)
FALSE_ALARM = 1e-6


def is_poisson(weights, rate=1.0):
    """Pearson's test of the values 0 to 5 and of all above."""
    law = stats.poisson(rate)
    expected = np.append(law.pmf(range(6)), law.sf(5)) * weights.size
    found = np.bincount(np.minimum(weights.ravel(), 6).astype(int), minlength=7)
    return stats.chisquare(found, expected).pvalue > FALSE_ALARM


def test_poisson_weights_are_poisson():
    weights = np.asarray(resample.poisson_weights(500, 40, key=KEY))
    assert weights.dtype == np.float32
    assert is_poisson(weights)
    assert not is_poisson(np.random.default_rng(0).poisson(1.1, weights.shape))
    assert not is_poisson(np.asarray(resample.counts(resample.bootstrap(2, 10_000, key=KEY), 2)))


def test_poisson_sums_vary_as_they_should():
    """Sums of members are Poisson again, independent of each other; those of a bootstrap do not vary."""
    is_right = lambda sums: FALSE_ALARM / 2 < stats.chi2(400).cdf(np.sum((sums - 500) ** 2 / 500)) < 1 - FALSE_ALARM / 2
    assert is_right(np.asarray(resample.poisson_weights(500, 400, key=KEY)).sum(axis=1))
    assert not is_right(np.asarray(resample.counts(resample.bootstrap(500, 400, key=KEY), 500)).sum(axis=1))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**31))
def test_bayesian_weights_sum_to_the_rows(num_rows, seed):
    weights = np.asarray(resample.bayesian_weights(num_rows, 3, key=jax.random.key(seed)))
    assert weights.shape == (3, num_rows)
    assert weights.dtype == np.float32
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=1, dtype=np.float64), num_rows, rtol=1e-6)


@pytest.mark.parametrize("num_rows", [2, 3, 10])
def test_bayesian_weights_are_of_the_dirichlet_law(num_rows):
    """One weight is `num_rows` times a Beta(1, n - 1) variable, of variance (n - 1) / (n + 1)."""
    weights = np.asarray(resample.bayesian_weights(num_rows, 5000, key=KEY), np.float64) / num_rows
    law = stats.beta(1, num_rows - 1)
    np.testing.assert_allclose(law.var() * num_rows**2, (num_rows - 1) / (num_rows + 1))
    for row in range(num_rows):
        assert stats.kstest(weights[:, row], law.cdf).pvalue > FALSE_ALARM / num_rows
    if num_rows > 2:
        assert stats.kstest(weights[:, :2].sum(axis=1), stats.beta(2, num_rows - 2).cdf).pvalue > FALSE_ALARM
    uniform = np.random.default_rng(0).uniform(size=weights.shape)
    assert stats.kstest((uniform / uniform.sum(axis=1, keepdims=True))[:, 0], law.cdf).pvalue < FALSE_ALARM


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([1, 4, 13]), st.sampled_from([1, 3]), st.sampled_from([1, 6]), st.integers(0, 2**31))
def test_counts_are_those_of_numpy(num_rows, members, size, seed):
    rows = np.random.default_rng(seed).integers(num_rows, size=(members, size))
    counts = resample.counts(rows, num_rows)
    assert counts.dtype == jnp.float32
    np.testing.assert_array_equal(counts, np.stack([np.bincount(own, minlength=num_rows) for own in rows]))
    np.testing.assert_array_equal(jax.jit(resample.counts, static_argnums=1)(rows, num_rows), counts)


def test_rows_of_a_group_have_one_weight():
    groups = np.array([0, 0, 0, 1, 2, 2])
    drawn = resample.bootstrap(3, 8, key=KEY)
    weights = np.asarray(resample.counts(drawn, 3))[:, groups]
    for member, own in enumerate(np.asarray(drawn)):
        rows = np.concatenate([np.flatnonzero(groups == group) for group in own])
        np.testing.assert_array_equal(weights[member], np.bincount(rows, minlength=6))


def weighted(model, batch, key):
    x, y, weight = batch
    return jnp.sum(weight * jnp.mean((jax.vmap(model)(x) - y) ** 2, axis=1)) / jnp.sum(weight)


def test_fit_with_counts_is_fit_on_the_rows():
    """A full batch of weighted rows has the gradient of the rows repeated."""
    x = jax.random.normal(jax.random.key(0), (20, 25))
    y = jnp.sin(x[:, :2])
    rows, sgd = resample.bootstrap(20, 3, key=KEY), optax.sgd(0.05, momentum=0.9)
    ensemble, options = ee.build(mlp, 3, key=KEY), {"steps": 10, "batch_size": 20, "key": KEY}
    repeated = ee.fit(ensemble, mse, sgd, (x, y), rows=rows, **options)
    counts = resample.counts(rows, 20).astype(x.dtype)
    run = ee.fit(ensemble, weighted, sgd, (x, y, ee.Each(counts)), **options)
    assert_close(run.ensemble, repeated.ensemble, 1e-5)
    run = ee.fit(ensemble, weighted, sgd, (x, y, ee.Each(counts[::-1])), **options)
    assert distance(run.ensemble, repeated.ensemble) > 1e-3
