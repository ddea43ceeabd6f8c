"""Directions of interacting particles: closed forms of their fixed points, and double loops written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial.distance import pdist

from eqx_ensemble.methods import particles

METHODS = {"svgd": particles.svgd, "wgd": particles.wgd}
RNG = np.random.default_rng(3)
POINTS = RNG.normal(size=(6, 4)).astype(np.float32)
SCORES = RNG.normal(size=(6, 4)).astype(np.float32)


def rbf_by_hand(points, scores, bandwidth, method):
    """The double loop, with the derivatives of the Gaussian kernel worked out."""
    points, scores = np.asarray(points, np.float64), np.asarray(scores, np.float64)
    moved = []
    for x, s in zip(points, scores, strict=True):
        values = np.array([np.exp(-np.sum((x - other) ** 2) / bandwidth) for other in points])
        pushes = np.array([2 / bandwidth * (x - other) * k for other, k in zip(points, values, strict=True)])
        if method == "svgd":
            moved.append(np.mean([k * own + push for k, own, push in zip(values, scores, pushes, strict=True)], axis=0))
        else:
            moved.append(s + pushes.sum(0) / values.sum())
    return np.array(moved)


@pytest.mark.parametrize("method", METHODS)
def test_each_direction_is_that_of_a_double_loop(method):
    expected = rbf_by_hand(POINTS, SCORES, 3.0, method)
    found = METHODS[method](POINTS, SCORES, kernel=particles.RBF(3.0))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    by_function = METHODS[method](POINTS, SCORES, kernel=lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2) / 3))
    np.testing.assert_allclose(by_function, expected, rtol=1e-5, atol=1e-6)
    assert (
        np.abs(np.asarray(found) - rbf_by_hand(POINTS, SCORES, 6.0, method)).max() > 1e-2
    )  # exp(-d²/2b) is another convention


def test_a_kernel_that_depends_on_more_than_differences():
    """The derivative is that of the first argument, at the other particle."""
    kernel = lambda x, y: (1 + x @ y) ** 2
    x, s = np.asarray(POINTS, np.float64), np.asarray(SCORES, np.float64)
    inner = 1 + x @ x.T
    expected = (inner**2 @ s + 2 * inner @ np.ones((6, 1)) * x) / 6
    np.testing.assert_allclose(particles.svgd(POINTS, SCORES, kernel=kernel), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bandwidth", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("method", METHODS)
def test_two_particles_come_to_rest_where_the_closed_form_says(method, bandwidth):
    """With a standard normal target at ±sqrt(b/4 log((b ± 4)/±b))."""
    ratio = (bandwidth + 4) / bandwidth if method == "svgd" else (4 - bandwidth) / bandwidth
    expected = np.sqrt(bandwidth / 4 * np.log(ratio))
    with jax.enable_x64(True):
        kernel = particles.RBF(bandwidth)
        move = lambda _, x: x + 0.5 * METHODS[method](x, -x, kernel=kernel)
        found = np.sort(jax.lax.fori_loop(0, 400, move, jnp.array([[-0.3], [0.6]])), axis=0)
    np.testing.assert_allclose(found[:, 0], [-expected, expected], rtol=1e-10)


def gaussian_target(size=3):
    rng = np.random.default_rng(0)
    factor = rng.normal(size=(size, size))
    return rng.normal(size=size), factor @ factor.T + np.eye(size)


def test_with_a_linear_kernel_mean_and_covariance_are_exact():
    """More particles than dimensions, a Gaussian target: the moments of the target, divided by n and not by n - 1."""
    mean, covariance = gaussian_target()
    with jax.enable_x64(True):
        start, precision = jnp.asarray(np.random.default_rng(1).normal(size=(7, 3))), np.linalg.inv(covariance)
        score = lambda x: -(x - mean[None]) @ precision
        move = lambda _, x: x + 0.05 * particles.svgd(x, score(x), kernel=lambda x, y: x @ y + 1)
        found = np.asarray(jax.lax.fori_loop(0, 6000, move, start))
        alone = np.asarray(jax.lax.fori_loop(0, 6000, lambda _, x: x + 0.05 * score(x), start))  # no repulsion
    np.testing.assert_allclose(found.mean(axis=0), mean, rtol=1e-10)
    np.testing.assert_allclose(np.cov(found.T, bias=True), covariance, rtol=1e-10)
    assert np.abs(np.cov(found.T) - covariance).max() > 0.1
    assert np.var(alone, axis=0).max() < 1e-12


def test_the_bandwidth_is_the_squared_median_over_the_logarithm():
    for count in (3, 4):
        points = RNG.normal(size=(count, 5)).astype(np.float32)
        expected = np.median(pdist(points)) ** 2 / np.log(count)
        found = particles.svgd(points, 0 * points)
        np.testing.assert_allclose(found, rbf_by_hand(points, 0 * points, expected, "svgd"), rtol=2e-5, atol=1e-6)
        # Of the full matrix with its diagonal, and with log(n + 1), as it is often seen.
        full = np.median(np.linalg.norm(points[:, None] - points[None], axis=-1)) ** 2 / np.log(count + 1)
        assert abs(full / expected - 1) > 0.02


@pytest.mark.parametrize("method", METHODS)
def test_a_single_particle_follows_its_score(method):
    np.testing.assert_allclose(METHODS[method](POINTS[:1], SCORES[:1]), SCORES[:1], rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_equal_particles_stay_finite_and_together(method):
    points, scores = np.repeat(POINTS[:1], 4, axis=0), np.repeat(SCORES[:1], 4, axis=0)
    np.testing.assert_allclose(METHODS[method](points, scores), scores, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_order_has_no_effect_and_every_particle_has_one(method):
    found, order = METHODS[method](POINTS, SCORES), np.array([3, 0, 5, 1, 2, 4])
    np.testing.assert_allclose(METHODS[method](POINTS[order], SCORES[order]), found[order], rtol=1e-5, atol=1e-6)
    assert np.abs(METHODS[method](POINTS[1:], SCORES[1:]) - found[1:]).max() > 1e-2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("broken", [np.nan, np.inf, 3e38])
def test_a_particle_that_is_not_active_is_as_if_left_out(method, broken):
    points, scores = np.insert(POINTS, 2, broken, axis=0), np.insert(SCORES, 2, broken, axis=0)
    found = METHODS[method](points, scores, active=np.arange(7) != 2)
    np.testing.assert_allclose(np.delete(found, 2, axis=0), METHODS[method](POINTS, SCORES), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[2], 0)
    if not np.isfinite(broken):  # the control
        assert not np.isfinite(METHODS[method](points, scores)).any()


@pytest.mark.parametrize("method", METHODS)
def test_a_kernel_that_is_not_defined_at_zero(method):
    """Of directions: particles that take no part have none."""
    norm = lambda x: jnp.sqrt(jnp.sum(x**2))
    cosine = lambda x, y: 2 + jnp.sum(x * y) / (norm(x) * norm(y))
    found = METHODS[method](POINTS, SCORES, kernel=cosine, active=np.arange(6) < 4)
    expected = METHODS[method](POINTS[:4], SCORES[:4], kernel=cosine)
    np.testing.assert_allclose(found[:4], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[4:], 0)


def test_large_offsets_and_small_distances():
    """Distances are sums of squared differences, and no differences of squares."""
    points = (100 + 1e-3 * POINTS).astype(np.float32)
    np.testing.assert_allclose(particles.svgd(points, SCORES), rbf_by_hand(
        points, SCORES, np.median(pdist(points.astype(np.float64))) ** 2 / np.log(6), "svgd"), rtol=1e-3,
        atol=1e-2)  # the repulsion is of the order 1e3; points at 100 are 4e-6 apart  # fmt: skip


@pytest.mark.slow
def test_half_precision_is_computed_in_single():
    found = particles.svgd(POINTS.astype(np.float16), SCORES.astype(np.float16))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, particles.svgd(POINTS, SCORES), atol=5e-3)


@pytest.mark.slow
def test_under_transformations():
    expected = particles.wgd(POINTS, SCORES)
    both = jax.jit(jax.vmap(particles.wgd))(np.stack([POINTS, POINTS[::-1]]), np.stack([SCORES, SCORES[::-1]]))
    np.testing.assert_allclose(both[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(both[1], expected[::-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_the_bandwidth_is_a_constant_in_derivatives(method):
    """A particle's distance to itself, of which the root has no derivative, is among those of the median."""
    total = lambda points, kernel: jnp.sum(METHODS[method](points, SCORES, kernel=kernel) ** 2)
    bandwidth = float(np.median(pdist(POINTS)) ** 2 / np.log(6))
    expected = jax.grad(total)(jnp.asarray(POINTS), particles.RBF(bandwidth))
    np.testing.assert_allclose(jax.grad(total)(jnp.asarray(POINTS), particles.RBF()), expected, rtol=1e-4, atol=1e-5)


def test_no_array_of_all_pairs_and_weights():
    shape = jax.ShapeDtypeStruct((32, 2000), jnp.float32)
    for method in METHODS.values():
        analysis = jax.jit(method).lower(shape, shape).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < 12 * 32 * 2000 * 4  # of all pairs it would be 32 of them


class Tempered(particles.AbstractKernel):
    """A kernel of one's own that adapts: with the mean distance."""

    width: jax.Array | float = 1.0

    def __call__(self, x, y):
        return jnp.exp(-jnp.sum((x - y) ** 2) / self.width)

    def adapt(self, squared_distances, active):
        return Tempered(jnp.mean(squared_distances))


def test_an_adaptive_kernel_of_ones_own():
    width = np.mean(np.sum((POINTS[:, None] - POINTS[None]) ** 2, axis=-1))
    found = particles.svgd(POINTS, SCORES, kernel=Tempered())
    np.testing.assert_allclose(found, rbf_by_hand(POINTS, SCORES, width, "svgd"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: particles.svgd(POINTS[0], SCORES[0]), r"shape \(members, size\)\.\n  got shape \(4,\)"),
        (lambda: particles.svgd(POINTS, SCORES[:, :3]), "needs `points` and `scores` of one shape"),
        (lambda: particles.wgd(POINTS.astype(int), SCORES), "needs floating-point `points`"),
        (lambda: particles.wgd(POINTS * 1j, SCORES), "needs floating-point `points`"),
        (lambda: particles.svgd(POINTS[:0], SCORES[:0]), r"got shape \(0, 4\)"),
        (lambda: particles.svgd(POINTS, SCORES, kernel=2.0), "needs `kernel` to be a function, got 2.0"),
        (lambda: particles.svgd(POINTS, SCORES, kernel=lambda x, y: x * y), r"point scalar\.\n  got shape \(4,\)"),
        (lambda: particles.svgd(POINTS, SCORES, active=np.ones(6)), "needs one boolean per member as `active`"),
        (lambda: particles.svgd(POINTS, SCORES, active=np.ones(5, bool)), r"got dtype bool, shape \(5,\)"),
        (lambda: particles.RBF(0.0), "`methods.particles.RBF` needs `bandwidth` to be above 0, got 0.0"),
        (lambda: particles.RBF(jnp.array(-1.0)), "needs `bandwidth` to be above 0, got -1.0"),
        (lambda: particles.RBF(jnp.ones(2)), "needs `bandwidth` to be a number"),
        (lambda: particles.RBF("median"), "needs `bandwidth` to be a number, got 'median'"),
    ],
)  # fmt: skip
def test_bad_particles(unhooked, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
