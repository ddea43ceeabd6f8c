import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine

stats = pytest.importorskip("scipy.stats", reason="the reference trimmed means are scipy's")


def _values(shape=(10, 7), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _trimmed(values, weights, cut):
    """The mean of the quantile function between the cuts, one entry at a time, in float64."""
    order = np.argsort(values)
    ends = np.concatenate([[0], np.cumsum(weights[order] / weights.sum())])
    kept = np.clip(ends[1:], cut, 1 - cut) - np.clip(ends[:-1], cut, 1 - cut)
    return np.sum(kept * values[order].astype(np.float64)) / np.sum(kept)


@pytest.mark.parametrize("members", [1, 2, 5, 8])
def test_median_is_numpys(members):
    values = _values((members, 7))
    np.testing.assert_allclose(combine.median(values), np.median(values, axis=0), rtol=1e-6)
    if members > 2:
        assert not np.allclose(np.mean(values, axis=0), np.median(values, axis=0), rtol=1e-2)


def test_weighted_median_counts_members():
    values, weights = _values((4, 7)), np.array([3, 1, 2, 2])
    want = np.median(np.repeat(values, weights, axis=0), axis=0)
    np.testing.assert_allclose(combine.median(values, weights=weights), want, rtol=1e-6)
    assert not np.allclose(combine.median(values), want, rtol=1e-2)


@pytest.mark.parametrize("cut", [0.0, 0.1, 0.2, 0.3, 0.4])
def test_trimmed_mean_of_whole_members_is_scipys(cut):
    values = _values()
    # scipy rounds the count of members down: with an epsilon more, 0.3 * 10 does not become 2.
    want = stats.trim_mean(values.astype(np.float64), cut + 1e-9, axis=0)
    np.testing.assert_allclose(combine.trimmed_mean(values, cut=cut), want, rtol=1e-5, atol=1e-6)
    other = 0.3 if cut == 0.4 else cut + 0.1
    assert not np.allclose(stats.trim_mean(values, other + 1e-9, axis=0), want, rtol=1e-2)


@pytest.mark.parametrize("cut", [0.0, 0.07, 0.25, 0.49])
def test_trimmed_mean_integrates_the_quantiles(cut):
    values, weights = _values((6, 5)), np.array([1.0, 3.0, 0.5, 2.0, 1.5, 2.0])
    want = [_trimmed(values[:, i], weights, cut) for i in range(5)]
    np.testing.assert_allclose(combine.trimmed_mean(values, cut=cut, weights=weights), want, rtol=1e-5, atol=1e-6)
    assert not np.allclose(combine.trimmed_mean(values, cut=cut), want, rtol=1e-2)


def test_ends_are_the_mean_and_the_median():
    values = _values((7, 5))
    np.testing.assert_allclose(combine.trimmed_mean(values, cut=0.0), combine.mean(values), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(combine.trimmed_mean(values, cut=0.499), combine.median(values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", [None, np.ones(10), np.array([2.0, 1, 1, 1, 1, 1, 1, 1, 1, 0])])
def test_members_that_are_far_off_move_nothing(weights):
    values = _values()
    far = np.copy(values)
    highest, lowest = np.argmax(values[:9], axis=0), np.argmin(values[:9], axis=0)
    far[highest, np.arange(7)], far[lowest, np.arange(7)] = 1e30, -np.inf
    for combined in (combine.median, lambda x, weights: combine.trimmed_mean(x, cut=0.3, weights=weights)):
        np.testing.assert_allclose(combined(far, weights=weights), combined(values, weights=weights), rtol=1e-6)
    assert not np.allclose(combine.mean(far[:, :1]), combine.mean(values[:, :1]))


@pytest.mark.parametrize("weights", [None, np.full(30, 0.1)])
@pytest.mark.parametrize("cut", [0.1, 0.2, 0.4])
def test_what_rounding_leaves_of_a_member_that_is_cut_off_does_not_count(cut, weights):
    values, number = _values((30, 7)), round(30 * cut)
    order = np.argsort(values, axis=0)
    far = np.copy(values)
    np.put_along_axis(far, order[:number], -1e30, axis=0)
    np.put_along_axis(far, order[-number:], 1e29, axis=0)
    want = combine.trimmed_mean(values, cut=cut, weights=weights)
    np.testing.assert_allclose(combine.trimmed_mean(far, cut=cut, weights=weights), want, rtol=1e-5, atol=1e-6)


def test_a_large_offset_costs_no_precision():
    values = (1e4 + _values((64, 50))).astype(np.float32)
    want = stats.trim_mean(values.astype(np.float64), 0.25, axis=0)
    np.testing.assert_allclose(combine.trimmed_mean(values, cut=0.25), want, rtol=1.2e-7)
    with jax.enable_x64(True):
        got = combine.trimmed_mean(values.astype(np.float64), cut=0.25)
        np.testing.assert_allclose(got, want, rtol=1e-14)


def test_weight_zero_leaves_a_broken_member_out():
    values, weights = _values((5, 6)), np.array([1.0, 2.0, 0.0, 1.0, 1.0])
    want = [f(values[weights > 0], weights=weights[weights > 0]) for f in (combine.median, combine.trimmed_mean)]
    for broken in (np.nan, -np.inf, np.inf):
        values[2] = broken
        np.testing.assert_allclose(combine.median(values, weights=weights), want[0], rtol=1e-6)
        np.testing.assert_allclose(combine.trimmed_mean(values, weights=weights), want[1], rtol=1e-5, atol=1e-6)
        for f in (combine.median, combine.trimmed_mean):
            gradient = jax.grad(lambda x: jnp.sum(f(x, weights=weights)))(values)  # noqa: B023
            assert np.isfinite(gradient).all()
            assert (gradient[2] == 0).all()
    values[2] = np.nan
    assert np.isnan(combine.median(values)).all()
    assert np.isnan(combine.trimmed_mean(values, cut=0.4)).all()


def test_gradients_jit_and_vmap():
    values = _values((5, 4))
    for f in (combine.median, lambda x: combine.trimmed_mean(x, cut=0.3)):
        gradient = jax.grad(lambda x: jnp.sum(f(x)))(values)  # noqa: B023
        np.testing.assert_allclose(np.sum(gradient, axis=0), 1, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(f)(values), f(values), rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(f, in_axes=1)(values), f(values), rtol=1e-6)
        assert f(values.astype(jnp.bfloat16)).dtype == jnp.float32
    cuts = jnp.array([0.1, 0.3])  # the cut may be traced
    both = jax.vmap(lambda cut: combine.trimmed_mean(values, cut=cut))(cuts)
    np.testing.assert_allclose(both[1], combine.trimmed_mean(values, cut=0.3), rtol=1e-5)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    for cut in (-0.1, 0.5, float("nan"), 0.5 - 1e-9):
        with pytest.raises(ValueError, match=r"combine.trimmed_mean` needs a `cut` from 0 to below 0.5.\n  got .*"):
            combine.trimmed_mean(_values(), cut=cut)
    with pytest.raises(ValueError, match=r"`cut` of shape \(\).\n  got shape \(2,\)"):
        combine.trimmed_mean(_values(), cut=np.array([0.1, 0.2]))
    with pytest.raises(TypeError, match="`combine.median` needs floating-point `values`"):
        combine.median(np.arange(3))


def test_weights_that_turn_out_to_be_all_zero():
    values = jnp.arange(6.0).reshape(3, 2)
    for f in (combine.mean, combine.median, combine.trimmed_mean):
        assert np.isnan(jax.jit(lambda w: f(values, weights=w))(jnp.zeros(3))).all()  # noqa: B023


def test_infinite_values_are_cut_off_or_taken():
    inf = np.inf
    values = np.float32([[1, inf, inf], [2, 1, -inf], [3, 3, 4]])
    np.testing.assert_array_equal(combine.trimmed_mean(values, cut=0.34), [2, 3, 4])
    np.testing.assert_allclose(combine.trimmed_mean(values, cut=0.1), [2, inf, np.nan], rtol=1e-6)
