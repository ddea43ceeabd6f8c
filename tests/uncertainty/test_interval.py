import jax
import numpy as np
import pytest

from eqx_ensemble import scores, uncertainty

stats = pytest.importorskip("scipy.stats", reason="the reference quantiles are scipy's")


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 1 - 1e-9])
def test_is_scipys_interval(level):
    mean, variance = np.array([0.0, 3.0, -2.0], np.float32), np.array([1.0, 4.0, 0.25], np.float32)
    lower, upper = stats.norm.interval(level, mean, np.sqrt(variance))
    got = uncertainty.gaussian_interval(mean, variance, level=level)
    np.testing.assert_allclose(got.lower, lower, rtol=1e-6)
    np.testing.assert_allclose(got.upper, upper, rtol=1e-6)
    # A variance taken for a standard deviation would not pass.
    assert not np.allclose(stats.norm.interval(level, mean, variance)[0], lower, rtol=1e-2)


def test_covers_its_level():
    targets = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    lower, upper = uncertainty.gaussian_interval(np.zeros_like(targets), np.ones_like(targets))
    # Six standard errors of a share of 20,000: a false alarm in a billion.
    assert abs(scores.coverage(lower, upper, targets) - 0.9) < 6 * np.sqrt(0.09 / 20_000)


def test_shapes_and_jit():
    mean = np.ones((3, 4, 2))
    got = jax.jit(uncertainty.gaussian_interval)(mean, mean)
    assert isinstance(got, uncertainty.Interval)
    assert got.lower.shape == got.upper.shape == (3, 4, 2)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("level", [0.0, 1.0, 90.0, float("nan")])
def test_invalid_level(level):
    with pytest.raises(ValueError, match=r"a `level` between 0 and 1.\n  got .*\nWrite 90 % as `level=0.9`."):
        uncertainty.gaussian_interval(np.ones(3), np.ones(3), level=level)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match="`variance` of the rows of `mean`"):
        uncertainty.gaussian_interval(np.ones(3), np.ones((3, 1)))
    with pytest.raises(ValueError, match="variances of zero or more"):
        uncertainty.gaussian_interval(np.ones(3), -np.ones(3))
