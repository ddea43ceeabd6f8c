"""Combinations of members: NumPy, closed forms, extremes, and weights of each row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, scores, uncertainty

stats = pytest.importorskip("scipy.stats")


VALUES = np.random.default_rng(0).normal(size=(10, 7)).astype(np.float32)
MEAN = VALUES[:4, :6]
WEIGHTS = np.random.default_rng(1).uniform(0.1, 1, size=(4, 6))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("weights", "got"),
    [
        ([1.0, 2.0], "one weight per member.\n  expected shape (3,), got (2,)"),
        ([[1.0], [1.0], [1.0]], "one weight per member.\n  expected shape (3,) or (3, 2), got (3, 1)"),
        (np.ones((2, 3)), "got (2, 3)\nThe axis `members` comes first"),
        ([1.0, -2.0, 1.0], "finite `weights` of zero or more.\n  got -2.0 at index (1,)"),
        ([1.0, 1.0, np.nan], "finite `weights` of zero or more.\n  got nan at index (2,)"),
        ([[1, 1], [np.inf, 1], [1, 1]], "finite `weights` of zero or more.\n  got inf at index (1, 0)"),
        ([0.0, 0.0, 0.0], "`weights` that are not all zero.\n  got 3 zeros"),
        ([[1, 0], [1, 0], [1, 0]], "`weights` that are not all zero in any row.\n  got only zeros in row (1,)"),
    ],
)
def test_invalid_weights(weights, got):
    with pytest.raises(ValueError, match="`combine.mean` needs ") as caught:
        combine.mean(VALUES[:3, :2], weights=np.array(weights))
    assert got in str(caught.value)


def test_log_mixture_far_from_one_and_impossible():
    logs = np.float32([[-1e4, 300.0, -np.inf, 0.0], [-1e4 - 1, 299.0, -np.inf, -np.inf]])
    want = [-1e4 + np.log((1 + np.exp(-1)) / 2), 300 + np.log((1 + np.exp(-1)) / 2), -np.inf, -np.log(2)]
    np.testing.assert_allclose(combine.log_mixture(logs), want, rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(combine.log_mixture(x)[jnp.array([0, 1, 3])]))(logs)
    assert np.isfinite(gradient).all()


def test_a_weight_of_zero_has_no_gradient():
    values, weights = np.float32([[np.nan], [3.0], [7.0]]), jnp.array([0.0, 1.0, 1.0])
    gradient = jax.grad(lambda w: combine.mean(values, weights=w)[0])(weights)
    np.testing.assert_allclose(gradient, [0, -1, 1], rtol=1e-6)


def test_weights_of_rows_of_any_size():
    values = np.array([[1.0, 1.0], [3.0, 5.0]], np.float32)
    np.testing.assert_allclose(combine.mean(values, weights=np.full((2, 2), 2e38)), [2, 3], rtol=1e-6)
    large = np.array([[3_000_000_000] * 2, [1_000_000_000] * 2])
    np.testing.assert_allclose(combine.mean(values, weights=large), [1.5, 2], rtol=1e-6)


def test_mixture_of_impossible_classes_has_a_finite_gradient():
    logits = jnp.log(jnp.array([[[0.5, 0.5, 0.0]], [[1.0, 0.0, 0.0]]]))
    np.testing.assert_allclose(np.exp(combine.mixture(logits)), [[0.75, 0.25, 0.0]], rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(jnp.exp(combine.mixture(x))[:, 0]))(logits)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).sum() > 0


def test_vote_gives_ties_to_the_lowest_class():
    np.testing.assert_array_equal(combine.vote(np.array([[[1.0, 2.0, 2.0]], [[3.0, 3.0, 3.0]]])), [[0.5, 0.5, 0.0]])


def test_mean_logits_a_class_that_one_member_rules_out():
    logits = jnp.log(jnp.array([[[0.5, 0.5, 0.0]], [[0.2, 0.3, 0.5]]]))
    want = np.array([np.sqrt(0.1), np.sqrt(0.15), 0])
    np.testing.assert_allclose(np.exp(combine.mean_logits(logits))[0], want / want.sum(), rtol=1e-5)
    loss = lambda x, w: combine.mean_logits(x, weights=w)[0, 0]
    for gradient in jax.grad(loss, (0, 1))(logits, jnp.array([0.5, 0.5])):
        assert np.isfinite(gradient).all()
    np.testing.assert_allclose(
        combine.mean_logits(logits, weights=np.array([0, 1])), jax.nn.log_softmax(logits[1]), rtol=1e-5
    )
    disjoint = jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    assert np.isnan(combine.mean_logits(disjoint)).all()


def test_product_of_high_and_low_precision():
    mean = np.float32([[0.0, 0.0, 0.0, 0.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0, 4.0, 1e10]])
    variance = np.float32([[0.0, 1e-36, np.inf, 0.0, np.inf, 1.0], [1.0, 1e36, 2.0, 0.0, np.inf, 1e30]])
    got = combine.product_gaussian(mean, variance, power=2.0)
    np.testing.assert_allclose(got.mean, [0, 0, 1, 0.5, 3, 1], atol=1e-6)
    np.testing.assert_allclose(got.variance, [0, 1e-36, 2, 0, np.inf, 1], rtol=1e-5)
    loss = lambda m, v: jnp.sum(combine.product_gaussian(m, v).mean)
    for gradient in jax.grad(loss, (0, 1))(mean, variance):
        assert np.isfinite(gradient).all()


def test_infinite_means_and_variances():
    inf, nan = np.inf, np.nan
    mean, ones = np.float32([[1, inf, inf, 5], [2, 1, -inf, inf]]), np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(combine.gaussian(mean, ones), [[1.5, inf, nan, inf], [1.25, inf, nan, inf]])
    one_unsure = np.float32([[1, 1, 1, 1], [1, 1, 1, inf]])
    np.testing.assert_array_equal(combine.gaussian(mean[:, :1], one_unsure[:, 3:]), [[1.5], [inf]])
    # A member without any precision has no influence, wherever its mean is.
    np.testing.assert_array_equal(combine.product_gaussian(mean, one_unsure), [[1.5, inf, nan, 5], [1, 1, 1, 2]])


@pytest.mark.parametrize("cut", [0.0, 0.2, 0.3])
def test_trimmed_mean_of_whole_members_is_scipys(cut):
    # scipy rounds the count of members down: with an epsilon more, 0.3 * 10 does not become 2.
    want = stats.trim_mean(VALUES.astype(np.float64), cut + 1e-9, axis=0)
    np.testing.assert_allclose(combine.trimmed_mean(VALUES, cut=cut), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", [None, np.full(30, 0.1)])
@pytest.mark.parametrize("cut", [0.1, 0.4])
def test_what_rounding_leaves_of_a_member_that_is_cut_off_does_not_count(cut, weights):
    values, number = np.random.default_rng(0).normal(size=(30, 7)).astype(np.float32), round(30 * cut)
    order = np.argsort(values, axis=0)
    far = np.copy(values)
    np.put_along_axis(far, order[:number], -1e30, axis=0)
    np.put_along_axis(far, order[-number:], 1e29, axis=0)
    want = combine.trimmed_mean(values, cut=cut, weights=weights)
    np.testing.assert_allclose(combine.trimmed_mean(far, cut=cut, weights=weights), want, rtol=1e-5, atol=1e-6)


def test_weights_that_turn_out_to_be_all_zero():
    values = jnp.arange(6.0).reshape(3, 2)
    for f in (combine.mean, combine.median, combine.trimmed_mean):
        assert np.isnan(jax.jit(lambda w: f(values, weights=w))(jnp.zeros(3))).all()  # noqa: B023


def test_infinite_values_are_cut_off_or_taken():
    inf = np.inf
    values = np.float32([[1, inf, inf], [2, 1, -inf], [3, 3, 4]])
    np.testing.assert_array_equal(combine.trimmed_mean(values, cut=0.34), [2, 3, 4])
    np.testing.assert_allclose(combine.trimmed_mean(values, cut=0.1), [2, inf, np.nan], rtol=1e-6)


def test_weights_of_several_axes_of_rows():
    values, weights = VALUES[:6].reshape(3, 2, 7), WEIGHTS[:3, :2]
    each = np.broadcast_to(weights[..., None], values.shape)
    for own in (weights, each):
        np.testing.assert_allclose(combine.mean(values, weights=own), np.average(values, 0, each), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    "call",
    [
        lambda: combine.median(MEAN, weights=WEIGHTS),
        lambda: scores.crps(MEAN, MEAN[0], weights=WEIGHTS),
        lambda: uncertainty.quantile(MEAN, [0.5], weights=WEIGHTS),
    ],
)
def test_others_say_how_they_take_them(call):
    with pytest.raises(ValueError, match="such as a gate's, map the function over rows with `jax.vmap`"):
        call()
