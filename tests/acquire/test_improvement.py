"""Improvements against quadrature, against a reference of many digits, and against botorch where it is installed."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import acquire

integrate = pytest.importorskip("scipy.integrate", reason="the reference integrals are scipy's")
mpmath = pytest.importorskip("mpmath", reason="the reference logarithms are of many digits")

RNG = np.random.default_rng(0)
MEAN, VARIANCE = RNG.normal(size=(3, 7)), np.exp(RNG.normal(size=(3, 7)))
WEIGHTS, BEST = np.array([0.5, 0.2, 0.3]), 0.4
SIGN = {"max": 1, "min": -1}
FUNCTIONS = (acquire.expected_improvement, acquire.log_expected_improvement, acquire.probability_of_improvement)


def _integral(of, mean, variance, best, sign):
    """The mean of `of(improvement)` under a Gaussian, over the values that improve."""
    sigma = np.sqrt(variance)
    density = lambda x: np.exp(-0.5 * ((x - mean) / sigma) ** 2) / np.sqrt(2 * np.pi) / sigma
    far = max(best, mean) + 12 * sigma if sign > 0 else min(best, mean) - 12 * sigma
    ends = sorted((best, far))
    near = [x for x in (mean,) if ends[0] < x < ends[1]]
    value = lambda x: of(sign * (x - best)) * density(x)
    return integrate.quad(value, *ends, points=near or None, epsabs=1e-14, epsrel=1e-12, limit=200)[0]


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("per_member", [False, True])
def test_closed_forms_are_the_integrals(mode, per_member):
    best = np.array([0.4, -0.3, 1.1]) if per_member else np.float64(BEST)
    each = np.broadcast_to(best, 3)

    def mixture(of):
        return [
            sum(w * _integral(of, m, v, b, SIGN[mode]) for w, m, v, b in zip(WEIGHTS, ms, vs, each, strict=True))
            for ms, vs in zip(MEAN.T, VARIANCE.T, strict=True)
        ]

    options = {"best": best, "mode": mode, "weights": WEIGHTS}
    with jax.enable_x64(True):
        got = acquire.expected_improvement(MEAN, VARIANCE, **options)
        logs = acquire.log_expected_improvement(MEAN, VARIANCE, **options)
        above = acquire.probability_of_improvement(MEAN, VARIANCE, **options)
        assert got.dtype == logs.dtype == above.dtype == np.float64
    want = mixture(lambda x: x)
    np.testing.assert_allclose(got, want, rtol=1e-8)
    np.testing.assert_allclose(logs, np.log(want), atol=1e-8)
    np.testing.assert_allclose(above, mixture(lambda x: 1.0), rtol=1e-8)
    # Neither the Gaussian of the mixture's moments nor the other mode gives this.
    one = MEAN.T @ WEIGHTS, VARIANCE.T @ WEIGHTS + (MEAN.T**2) @ WEIGHTS - (MEAN.T @ WEIGHTS) ** 2
    assert not np.allclose(
        [_integral(lambda x: x, m, v, BEST, SIGN[mode]) for m, v in zip(*one, strict=True)], want, rtol=1e-3
    )
    other = {"max": "min", "min": "max"}[mode]
    assert not np.allclose(acquire.expected_improvement(MEAN, VARIANCE, **options | {"mode": other}), want, rtol=1e-3)


@pytest.mark.parametrize("mode", ["max", "min"])
def test_members_as_samples(mode):
    better = np.maximum(SIGN[mode] * (MEAN - BEST), 0)
    options = {"best": BEST, "mode": mode, "weights": WEIGHTS}
    got = acquire.expected_improvement(MEAN, **options)
    np.testing.assert_allclose(got, WEIGHTS @ better, rtol=1e-5, atol=1e-7)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(acquire.log_expected_improvement(MEAN, **options), np.log(got), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(acquire.probability_of_improvement(MEAN, **options), WEIGHTS @ (better > 0), rtol=1e-5)
    none = acquire.log_expected_improvement(MEAN, best=SIGN[mode] * 99.0, mode=mode)
    assert (np.asarray(none) == -np.inf).all()
    # A value that equals the best one is no improvement.
    assert acquire.probability_of_improvement(np.ones((1, 1)), best=1.0, mode=mode) == 0


def test_members_without_variance_are_samples():
    for function in FUNCTIONS:
        for mode in SIGN:
            options = {"best": BEST, "mode": mode}
            np.testing.assert_array_equal(function(MEAN, 0 * MEAN, **options), function(MEAN, **options))
            near = function(MEAN, 0 * MEAN + 1e-12, **options)
            np.testing.assert_allclose(np.exp(near), np.exp(function(MEAN, **options)), atol=1e-5)


def _log_excess(z):
    """Log of h(z) = pdf(z) + z cdf(z), to 60 digits beyond what cancels."""
    mpmath.mp.dps = 80
    z = mpmath.mpf(float(z))
    if z < -30:  # its asymptotic series, whose terms fall below 1e-40 there
        term, total = mpmath.mpf(1), mpmath.mpf(0)
        for k in range(1, 40):
            total, term = total + term, -term * (2 * k + 1) / z**2
        return -(z**2) / 2 - mpmath.log(2 * mpmath.pi) / 2 + mpmath.log(total / z**2)
    return mpmath.log(mpmath.npdf(z) + z * mpmath.ncdf(z))


SCORES = np.concatenate([-np.logspace(5, -3, 60), [0], np.logspace(-3, 3, 20), np.linspace(-2.2, -1.8, 41)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logarithm_to_machine_precision(dtype):
    rounding = 8 * np.finfo(dtype).eps
    scores = SCORES.astype(dtype)
    want = np.array([float(_log_excess(z)) for z in scores])
    with jax.enable_x64(dtype == np.float64):
        mean, variance = scores[None], np.ones_like(scores)[None]
        got = acquire.log_expected_improvement(mean, variance, best=0.0, mode="max")
        plain = acquire.expected_improvement(mean, variance, best=0.0, mode="max")
        slope = jax.grad(lambda x: jnp.sum(acquire.log_expected_improvement(x, variance, best=0.0, mode="max")))(mean)
    got, plain, slope = (np.asarray(x) for x in (got, plain, slope))
    assert got.dtype == plain.dtype == dtype
    # Where the value is near zero, its rounding is that of h.
    assert (np.abs(got - want) <= rounding * np.maximum(np.abs(want), 3)).all()
    assert want.min() < -4.9e9
    seen = want > np.log(np.finfo(dtype).tiny) + 1
    # The exponent of h rounds by half an ulp of itself.
    scale = np.maximum(np.abs(want[seen]), 3)
    assert (np.abs(plain[seen] / np.exp(want[seen]) - 1) <= rounding * scale).all()
    # Its slope is cdf / h, about |z| far below.
    mpmath.mp.dps = 80
    ends = scores > -30
    exact = [float(mpmath.ncdf(float(z)) / mpmath.exp(_log_excess(z))) for z in scores[ends]]
    np.testing.assert_allclose(slope[0][ends], exact, rtol=10 * rounding)
    np.testing.assert_allclose(slope[0][~ends], -scores[~ends] - 2 / scores[~ends], rtol=1e-5)
    # What underflows, or cancels.
    with np.errstate(divide="ignore"):
        assert np.log(np.asarray(plain)).min() == -np.inf
    cancelled = np.exp(-0.5 * scores**2) / np.sqrt(2 * np.pi) + scores * np.vectorize(_cdf)(scores)
    assert not np.allclose(cancelled[seen], np.exp(want[seen]), rtol=100 * rounding, atol=0)


def _cdf(z):
    return float(mpmath.ncdf(float(z)))


def test_extreme_variances_and_gradients():
    mean = np.float32([[-1.0, 1.0, -1.0, 0.0, -30.0], [-2.0, 1.0, 3.0, 0.0, -20.0]])
    variance = np.float32([[1e-38, 1e-38, 0.0, 0.0, 1.0], [1e30, 0.0, 1e-38, 0.0, 1e-6]])
    total = lambda mean, variance: jnp.sum(
        jnp.where(
            jnp.isfinite(found := acquire.log_expected_improvement(mean, variance, best=0.0, mode="max")), found, 0
        )
    )
    got = acquire.log_expected_improvement(mean, variance, best=0.0, mode="max")
    exact = np.log([0.5 * 1e15 / np.sqrt(2 * np.pi), 1.0, 1.5, 0.0 + 1e-300])
    np.testing.assert_allclose(got[:3], exact[:3], rtol=1e-6, atol=1e-6)
    assert got[3] == -np.inf
    np.testing.assert_allclose(got[4], float(_log_excess(-30)) + np.log(0.5), rtol=1e-6)
    for slope in jax.grad(total, argnums=(0, 1))(mean, variance):
        assert np.isfinite(slope).all()
        assert np.abs(slope).max() > 0
    for function in FUNCTIONS:
        assert np.isnan(function(np.float32([[np.nan]]), best=0.0, mode="max")).all()
        assert np.isnan(function(np.float32([[1.0]]), np.float32([[np.nan]]), best=0.0, mode="max")).all()


@pytest.mark.parametrize("mode", ["max", "min"])
def test_confidence_bound(mode):
    centre, noise = np.average(MEAN, axis=0, weights=WEIGHTS), np.average(VARIANCE, axis=0, weights=WEIGHTS)
    between = np.average((MEAN - centre) ** 2, axis=0, weights=WEIGHTS)
    for variance, total in ((VARIANCE, noise + between), (None, between)):
        got = acquire.confidence_bound(MEAN, variance, beta=3.0, mode=mode, weights=WEIGHTS)
        np.testing.assert_allclose(got, SIGN[mode] * centre + np.sqrt(3 * total), rtol=1e-5)
        assert not np.allclose(got, SIGN[mode] * centre + 3 * np.sqrt(total), rtol=1e-2)
    slope = jax.grad(lambda x: jnp.sum(acquire.confidence_bound(x, beta=3.0, mode=mode)))(np.ones((3, 2), np.float32))
    np.testing.assert_allclose(slope, SIGN[mode] / 3, rtol=1e-6)  # where members agree


@pytest.mark.parametrize("function", [*FUNCTIONS, acquire.confidence_bound], ids=lambda f: f.__name__)
def test_masks_weights_transforms_and_axes(function):
    options = {"mode": "max"} | ({"beta": 2.0} if function is acquire.confidence_bound else {"best": BEST})
    kept = np.arange(7) != 3
    want = np.array(function(MEAN, VARIANCE, **options))
    spoilt, negative = MEAN.copy(), VARIANCE.copy()
    spoilt[:, 3], negative[:, 3] = np.nan, -1
    masked = function(spoilt, negative, row_weights=kept, **options)
    np.testing.assert_allclose(masked[kept], want[kept], rtol=1e-6)
    assert masked[3] == -np.inf
    spoilt = np.concatenate([MEAN, np.full((1, 7), np.nan)])
    zero = function(spoilt, np.concatenate([VARIANCE, np.ones((1, 7))]), weights=np.array([1, 1, 1, 0]), **options)
    np.testing.assert_allclose(zero, want, rtol=1e-5)
    own = np.stack([np.array([1.0, 0, 0]), *np.eye(3), *np.eye(3)], axis=1)
    per_row = function(MEAN, VARIANCE, weights=own, **options)
    alone = [function(MEAN[[m], i], VARIANCE[[m], i], **options) for i, m in enumerate(own.argmax(0))]
    np.testing.assert_allclose(per_row, alone, rtol=1e-5, atol=1e-7)
    many = np.stack([MEAN, MEAN], axis=1)
    twice = function(many, np.stack([VARIANCE, VARIANCE], axis=1), **options)
    np.testing.assert_allclose(twice, [want, want], rtol=1e-6)
    mapped = jax.jit(jax.vmap(lambda m, v: function(m, v, **options), in_axes=1))(
        many, np.stack([VARIANCE, VARIANCE], 1)
    )
    np.testing.assert_allclose(mapped, [want, want], rtol=1e-6)
    half = function(jnp.asarray(MEAN, jnp.bfloat16), **options)
    assert half.dtype == jnp.float32


@pytest.mark.filterwarnings("ignore")  # of its imports
@pytest.mark.skipif(importlib.util.find_spec("botorch") is None, reason="needs botorch")
def test_botorch_agrees():
    import torch
    from botorch.acquisition.analytic import _ei_helper, _log_ei_helper

    with jax.enable_x64(True):
        mean, variance = SCORES[None], np.ones_like(SCORES)[None]
        got = acquire.log_expected_improvement(mean, variance, best=0.0, mode="max")
        plain = acquire.expected_improvement(mean, variance, best=0.0, mode="max")
    np.testing.assert_allclose(got, _log_ei_helper(torch.tensor(SCORES)).numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(plain, _ei_helper(torch.tensor(SCORES)).numpy(), rtol=1e-9, atol=1e-16)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    improve = acquire.expected_improvement
    with pytest.raises(ValueError, match="`acquire.expected_improvement` needs `mode` to be one of 'min', 'max'"):
        improve(MEAN, best=0.0, mode="minimise")
    with pytest.raises(TypeError, match="missing a required argument: 'mode'"):
        improve(MEAN, best=0.0)
    with pytest.raises(
        ValueError, match=r"needs `best` as one number, or one per member.\n  expected shape \(\) or \(3,"
    ):
        improve(MEAN, best=np.zeros(7), mode="max")
    with pytest.raises(ValueError, match="needs a finite `best`.\n  got -inf"):
        improve(MEAN, best=-np.inf, mode="max")
    with pytest.raises(ValueError, match="needs `variance` of the rows of `mean`"):
        improve(MEAN, VARIANCE[:2], best=0.0, mode="max")
    with pytest.raises(ValueError, match="`acquire.confidence_bound` needs a finite `beta` of zero or more.\n  got -1"):
        acquire.confidence_bound(MEAN, beta=-1.0, mode="max")
