"""What every array function does with its arguments before it computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, scores, uncertainty

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 6, 4)).astype(np.float32)
LABELS = RNG.integers(0, 4, 6)
SAMPLES, TARGETS = RNG.normal(size=(3, 6)).astype(np.float32), RNG.normal(size=6).astype(np.float32)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: scores.crps(SAMPLES, TARGETS[:, None]),
            ValueError,
            "got (6, 1)\nA trailing axis",
        ),
        (lambda: scores.crps(SAMPLES[..., None], TARGETS), ValueError, "pass `samples[..., 0]`"),
        (lambda: scores.crps(SAMPLES, np.tile(TARGETS, (3, 1))), ValueError, "Repeated for every member?"),
        (lambda: scores.crps(TARGETS, TARGETS), ValueError, "`targets` of the rows of `samples`"),
        (lambda: scores.nll(LOGITS, np.eye(4)[LABELS].astype(int)), ValueError, "One-hot labels?"),
        (lambda: scores.nll(LOGITS, LABELS[:5]), ValueError, "the same rows in the same order"),
        (lambda: scores.nll(LOGITS, LABELS + 1), ValueError, "labels from 0 to 3, as there are 4 classes"),
        (lambda: scores.nll(LOGITS, LABELS * 1.0), TypeError, "integer `labels`"),
        (lambda: scores.nll(LOGITS[..., :1], LABELS), ValueError, "at least two classes"),
        (lambda: scores.crps(SAMPLES.astype(int), TARGETS), TypeError, "floating-point `samples`"),
        (lambda: scores.crps(SAMPLES[:0], TARGETS), ValueError, "at least one member"),
        (lambda: scores.nll_gaussian(SAMPLES, SAMPLES**2, TARGETS), ValueError, "takes no `members` axis"),
        (lambda: scores.crps(SAMPLES, TARGETS, reduction="sum"), ValueError, "'mean', 'none', got 'sum'"),
        (lambda: scores.width(TARGETS + 1, TARGETS), ValueError, "Swapped?"),
        (lambda: scores.width(TARGETS, TARGETS[:2]), ValueError, "`upper` of the rows of `lower`"),
        (lambda: scores.set_size(LOGITS[0]), TypeError, "boolean `sets`"),
        (lambda: scores.set_coverage(LOGITS[0] > 0, LABELS + 1), ValueError, "labels from 0 to 3"),
        (lambda: scores.pinball(TARGETS, TARGETS, level=90.0), ValueError, "a `level` between 0 and 1"),
        (lambda: scores.auroc(TARGETS, LABELS), TypeError, "boolean `positives`"),
        (lambda: scores.auroc(TARGETS, TARGETS < 99), ValueError, "positive and negative rows"),
        (lambda: scores.aurc(TARGETS[:0], TARGETS[:0]), ValueError, "at least one row"),
        (lambda: scores.by_group(TARGETS, LABELS, num_groups=2), ValueError, "`groups` from 0 to 1"),
        (lambda: scores.nll_gaussian(TARGETS, TARGETS * 0, TARGETS), ValueError, "A log-variance?"),
        (lambda: scores.rank_histogram(SAMPLES, TARGETS, key=0), TypeError, "needs one key"),
        (lambda: scores.pit_histogram(TARGETS), ValueError, "`values` from 0 to 1"),
        (lambda: scores.top_k_accuracy(LOGITS, LABELS, k=5), ValueError, "`k` of at most 4"),
        (lambda: scores.ece(LOGITS, LABELS, num_bins=0), ValueError, "`num_bins` of at least 1"),
        (
            lambda: scores.energy_score(SAMPLES[:, 0], TARGETS[0]),
            ValueError,
            "of shape (members, *batch, out)",
        ),
        (lambda: scores.variogram_score(LOGITS, LOGITS[0], order=0.0), ValueError, "`order` above zero"),
        (lambda: scores.crps(SAMPLES[:1], TARGETS, estimator="fair"), ValueError, "at least two members"),
        (lambda: combine.mixture(LOGITS, weights=[1, 2]), ValueError, "one weight per member"),
        (lambda: scores.crps(SAMPLES, TARGETS, row_weights=np.ones(5)), ValueError, "one of `row_weights` per row"),
    ],
)
def test_an_error_says_what_to_write(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
    assert str(caught.value).startswith(("`scores.", "`combine."))


def test_float64_keeps_a_common_offset():
    far = 1e9  # of which float32 would keep 64
    samples, targets = SAMPLES.astype(np.float64), TARGETS.astype(np.float64)
    for score in (scores.crps, scores.rmse, scores.mae, scores.pit):
        np.testing.assert_allclose(score(samples + far, targets + far), score(samples, targets), rtol=1e-5, atol=1e-6)
    variance = np.exp(samples[0])
    near = scores.nll_gaussian(samples[0], variance, targets)
    np.testing.assert_allclose(scores.nll_gaussian(samples[0] + far, variance, targets + far), near, rtol=1e-5)
    assert not np.allclose(np.float32(targets + far) - np.float32(far), targets, rtol=1e-2)


@pytest.mark.parametrize("scale", [1e-9, 1e-55])
def test_float64_keeps_the_order(scale):
    inside = np.arange(40) % 2 == 1
    gaps = scale * (RNG.uniform(size=40) + inside)
    values = 1 - gaps if scale > 1e-16 else -gaps
    assert scores.auroc(values, inside) == 0
    assert np.unique(np.float32(values)).size < 40


def test_a_variance_that_devices_take_for_zero_is_refused():
    with pytest.raises(ValueError, match="variances above zero"):
        scores.nll_gaussian(np.zeros(1, np.float32), np.full(1, 1e-40, np.float32), np.zeros(1, np.float32))


@pytest.mark.parametrize("held", [np.nan, np.inf])
def test_what_has_weight_zero_may_hold_anything(held):
    samples, weights, rows = SAMPLES.copy(), np.array([0.3, 0, 0.7]), np.array([1, 1, 0, 1, 2, 1.0])
    samples[1], samples[:, 2] = held, held
    targets = np.where(rows == 0, held, TARGETS)
    for score in (scores.crps, scores.rmse, scores.mae):
        call = lambda x, y, w, r, score=score: score(x, y, weights=w, row_weights=r)
        got = call(samples, targets, weights, rows)
        kept = rows > 0
        np.testing.assert_allclose(
            got, call(SAMPLES[[0, 2]][:, kept], TARGETS[kept], weights[[0, 2]], rows[kept]), rtol=1e-5
        )
        slope = jax.grad(call)(jnp.asarray(samples), targets, weights, rows)
        assert np.isfinite(slope).all()
        assert (slope[1] == 0).all()


@pytest.mark.parametrize("weights", [None, np.array([0.1, 0, 0.4, 0.2, 0.3])])
def test_the_order_of_numpy_is_that_of_xla(weights):
    """A concrete array is sorted by NumPy, a traced one by XLA."""
    values = RNG.normal(size=(5, 7)).astype(np.float32)
    for fn in (combine.median, lambda x, weights: uncertainty.quantile(x, [0.1, 0.9], weights=weights)):
        call = functools.partial(fn, weights=weights)
        np.testing.assert_array_equal(call(values), jax.jit(call)(values))
    positives = values[0] > 0
    np.testing.assert_array_equal(scores.auroc(values[1], positives), jax.jit(scores.auroc)(values[1], positives))


def test_python_numbers_take_the_dtype_of_arrays():
    with jax.enable_x64(True):
        assert combine.product_gaussian(SAMPLES, SAMPLES**2, power=2.0).mean.dtype == jnp.float32
        assert combine.product_gaussian(SAMPLES, SAMPLES**2, power=np.float64(2)).mean.dtype == jnp.float64
        assert scores.nll_gaussian(0.0, 1.0, 1.0).dtype == jnp.float64
