import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, uncertainty


def _values(shape=(10, 7), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("members", [1, 3, 10, 64])
def test_is_numpys_averaged_inverted_cdf(members):
    values, levels = _values((members, 7)), np.round(np.linspace(0, 1, 21), 2)
    want = np.quantile(values, levels, axis=0, method="averaged_inverted_cdf")
    np.testing.assert_allclose(uncertainty.quantile(values, levels), want, rtol=1e-6)
    one = uncertainty.quantile(values, 0.3)
    np.testing.assert_allclose(one, np.quantile(values, 0.3, axis=0, method="averaged_inverted_cdf"), rtol=1e-6)
    if members > 1:
        # Neither interpolation nor the lower of two values would pass.
        assert not np.allclose(np.quantile(values, levels, axis=0), want, rtol=1e-2)
        if members == 10:
            assert not np.allclose(np.quantile(values, levels, axis=0, method="inverted_cdf"), want, rtol=1e-2)


def test_weights_count_members():
    values, weights, levels = _values((4, 7)), np.array([3, 1, 2, 2]), np.array([0.0, 0.125, 0.3, 0.5, 0.75, 0.99, 1.0])
    want = np.quantile(np.repeat(values, weights, axis=0), levels, axis=0, method="averaged_inverted_cdf")
    np.testing.assert_allclose(uncertainty.quantile(values, levels, weights=weights), want, rtol=1e-6)
    assert not np.allclose(uncertainty.quantile(values, levels), want, rtol=1e-2)


def test_tenths_meet_levels_of_tenths_though_neither_is_a_binary_number():
    values = np.arange(10, dtype=np.float32)[:, None]
    weights = np.full(10, 0.1, np.float32)
    for level in (0.1, 0.3, 0.6, 0.7, 0.9):
        want = 10 * level - 0.5  # midway between two members
        np.testing.assert_allclose(uncertainty.quantile(values, level), want, rtol=1e-6)
        np.testing.assert_allclose(uncertainty.quantile(values, level, weights=weights), want, rtol=1e-6)


def test_interval_has_its_quantiles_at_its_ends():
    values, weights = _values((40, 7)), np.arange(1, 41)
    lower, upper = uncertainty.interval(values, level=0.8, weights=weights)
    np.testing.assert_array_equal(lower, uncertainty.quantile(values, 0.1, weights=weights))
    np.testing.assert_array_equal(upper, uncertainty.quantile(values, 0.9, weights=weights))
    whole = uncertainty.interval(_values((5, 7)), level=0.9)
    np.testing.assert_array_equal(whole, (_values((5, 7)).min(0), _values((5, 7)).max(0)))
    assert isinstance(whole, uncertainty.Interval)


def test_one_half_is_the_median():
    values = _values((6, 7))
    np.testing.assert_array_equal(uncertainty.quantile(values, 0.5), combine.median(values))


def test_weight_zero_leaves_a_broken_member_out():
    values, weights, levels = _values((5, 6)), np.array([1.0, 2.0, 0.0, 1.0, 1.0]), np.array([0.0, 0.1, 0.5, 1.0])
    want = uncertainty.quantile(values[weights > 0], levels, weights=weights[weights > 0])
    for broken in (np.nan, -np.inf, np.inf):
        values[2] = broken
        np.testing.assert_array_equal(uncertainty.quantile(values, levels, weights=weights), want)
    values[2] = np.nan
    assert np.isnan(uncertainty.quantile(values, 0.1)).all()


def test_transforms():
    values, levels = _values((5, 4)), jnp.array([0.2, 0.5])
    want = uncertainty.quantile(values, levels)
    np.testing.assert_allclose(jax.jit(uncertainty.quantile)(values, levels), want, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(uncertainty.quantile, (1, None))(values, levels), want.T, rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(uncertainty.quantile(x, levels)))(values)
    np.testing.assert_allclose(np.sum(gradient, axis=0), 2, rtol=1e-6)
    assert uncertainty.quantile(values.astype(jnp.bfloat16), 0.5).dtype == jnp.float32


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match=r"uncertainty.quantile` needs `levels` from 0 to 1.\n  got 90.0, the first"):
        uncertainty.quantile(_values(), 90.0)
    with pytest.raises(ValueError, match=r"`levels` as a number or `\(levels,\)`.\n  got shape \(1, 1\)"):
        uncertainty.quantile(_values(), np.array([[0.5]]))
    with pytest.raises(ValueError, match="`uncertainty.interval` needs a `level` between 0 and 1"):
        uncertainty.interval(_values(), level=1.0)


def test_small_weights_are_met_or_missed_by_themselves():
    # A level of 1e-8 is below the weight of 5e-7 of the lowest member, and 1 - 1e-8 above that of all but the highest.
    values, weights = np.float32([[1], [2], [3]]), np.array([5e-7, 1 - 1e-6, 5e-7])
    levels = np.array([1e-8, 1e-6, 0.5, 1 - 1e-6, 1 - 1e-8])
    np.testing.assert_array_equal(uncertainty.quantile(values, levels, weights=weights)[:, 0], [1, 2, 2, 2, 3])
    # A level that is met exactly, from either end, is still midway to the next value.
    exact = np.array([0.25, 0.75])
    np.testing.assert_array_equal(uncertainty.quantile(np.float32([[1], [2], [4], [8]]), exact)[:, 0], [1.5, 6])
