"""What holds for every function of members: weights count members, and dtypes are those of the computation."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, uncertainty

RNG = np.random.default_rng(0)
LOGITS = (2 * RNG.normal(size=(3, 20, 4))).astype(np.float32)
LABELS = RNG.integers(4, size=20)
MEAN, VARIANCE = RNG.normal(size=(3, 20)).astype(np.float32), RNG.uniform(0.1, 3, size=(3, 20)).astype(np.float32)
TARGETS = RNG.normal(size=20).astype(np.float32)
LEVELS = np.array([0.2, 0.6], np.float32)

# The arrays with a `members` axis, what else is passed, and options.
WEIGHTED = {
    combine.mean: ((MEAN,), (), {}),
    combine.log_mixture: ((MEAN,), (), {}),
    combine.moments: ((MEAN,), (), {}),
    combine.median: ((MEAN,), (), {}),
    combine.trimmed_mean: ((MEAN,), (), {"cut": 0.25}),
    combine.mixture: ((LOGITS,), (), {}),
    combine.mean_logits: ((LOGITS,), (), {}),
    combine.vote: ((LOGITS,), (), {}),
    combine.gaussian: ((MEAN, VARIANCE), (), {}),
    combine.product_gaussian: ((MEAN, VARIANCE), (), {"power": 2.0}),
    uncertainty.decompose_entropy: ((LOGITS,), (), {}),
    uncertainty.decompose_variance: ((MEAN, VARIANCE), (), {}),
    uncertainty.decompose_squared_error: ((MEAN,), (TARGETS,), {}),
    uncertainty.decompose_nll: ((LOGITS,), (LABELS,), {}),
    uncertainty.jensen_shannon: ((LOGITS,), (), {}),
    uncertainty.pairwise_kl: ((LOGITS,), (), {}),
    uncertainty.variation_ratio: ((LOGITS,), (), {}),
    uncertainty.disagreement: ((LOGITS,), (), {}),
    uncertainty.quantile: ((MEAN,), (LEVELS,), {}),
    uncertainty.interval: ((MEAN,), (), {"level": 0.5}),
    uncertainty.gaussian_mixture_quantile: ((MEAN, VARIANCE), (LEVELS,), {}),
    uncertainty.gaussian_mixture_interval: ((MEAN, VARIANCE), (), {}),
    uncertainty.least_confidence: ((LOGITS,), (), {}),
    uncertainty.free_energy: ((LOGITS,), (), {}),
}
# Samples depend on their number of members; the others have no weights.
OTHERS = {
    uncertainty.sample_gaussian_mixture,
    uncertainty.sample_class_mixture,
    uncertainty.entropy,
    uncertainty.gaussian_interval,
    uncertainty.pairwise_disagreement,
    uncertainty.q_statistic,
    uncertainty.error_correlation,
}

NAMED = pytest.mark.parametrize("function", WEIGHTED, ids=lambda function: function.__name__)


def _assert_close(got, want, **tolerance):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, **{"rtol": 1e-4, "atol": 1e-5} | tolerance)


def test_no_function_is_left_out():
    public = {value for room in (combine, uncertainty) for value in vars(room).values() if inspect.isfunction(value)}
    assert public == set(WEIGHTED) | OTHERS


@NAMED
def test_weights_count_members(function):
    arrays, rest, options = WEIGHTED[function]
    call = lambda index, weights=None: function(*(x[index] for x in arrays), *rest, weights=weights, **options)
    everyone = np.arange(3)
    _assert_close(call(everyone, np.ones(3)), call(everyone))
    _assert_close(call(everyone, np.array([2, 1, 1])), call(np.array([0, 0, 1, 2])))
    _assert_close(call(everyone, np.array([0, 1, 0])), call(np.array([1])))
    _assert_close(call(np.array([2, 0, 1]), np.array([3, 1, 2])), call(everyone, np.array([1, 2, 3])))
    one, other = (jax.tree.leaves(call(everyone, np.array(weights)))[0] for weights in ([1, 1, 7], [7, 1, 1]))
    assert not np.allclose(one, other, rtol=1e-2)


@NAMED
def test_jit_vmap_and_dtypes(function):
    arrays, rest, options = WEIGHTED[function]
    eager = function(*arrays, *rest, **options)
    assert {leaf.dtype for leaf in jax.tree.leaves(eager)} == {jnp.dtype("float32")}
    weights = jnp.array([1.0, 2.0, 3.0])
    weighted = lambda *arrays, weights: function(*arrays, *rest, weights=weights, **options)
    mapped = jax.jit(jax.vmap(lambda *arrays: weighted(*arrays, weights=weights)))(*(x[None] for x in arrays))
    _assert_close(jax.tree.map(lambda x: x[0], mapped), weighted(*arrays, weights=weights))
    half = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    _assert_close(
        function(*half, *rest, **options), function(*(x.astype(jnp.float32) for x in half), *rest, **options), rtol=1e-6
    )
    with jax.enable_x64(True):
        wide = function(*(x.astype(np.float64) for x in arrays), *rest, **options)
        assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype("float64")}
    for one, other in zip(jax.tree.leaves(eager), jax.tree.leaves(wide), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_a_common_offset_moves_the_centre_and_nothing_else(offset):
    """Values near 1e4 with a variance near 1, in float32 compared with float64."""
    mean = (offset + RNG.normal(size=(16, 40))).astype(np.float32)
    variance = RNG.uniform(0.5, 2, size=(16, 40)).astype(np.float32)
    exact, precision = mean.astype(np.float64), 1 / variance.astype(np.float64)
    centre = np.average(exact, axis=0, weights=precision)
    np.testing.assert_allclose(combine.product_gaussian(mean, variance).mean, centre, rtol=1.2e-7, atol=1e-6)
    np.testing.assert_allclose(combine.median(mean), np.median(exact, axis=0), rtol=1.2e-7, atol=1e-6)
    parts = uncertainty.decompose_variance(mean, variance)
    np.testing.assert_allclose(parts.epistemic, np.var(exact, axis=0), rtol=1e-5)
    np.testing.assert_allclose(uncertainty.error_correlation(mean), np.corrcoef(exact), rtol=1e-4, atol=1e-6)
    if offset:
        plain = np.mean(mean**2, axis=0) - np.mean(mean, axis=0) ** 2
        assert not np.allclose(plain, np.var(exact, axis=0), rtol=0.5)  # what E[x^2] - E[x]^2 gives
