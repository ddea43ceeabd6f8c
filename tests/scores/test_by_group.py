import jax
import numpy as np
import pytest

from eqx_ensemble import scores

RNG = np.random.default_rng(0)
SETS, LABELS = RNG.uniform(size=(60, 4)) < 0.5, RNG.integers(4, size=60)
GROUPS, VALUES = RNG.integers(3, size=60), RNG.normal(size=60).astype(np.float32)
MASK = RNG.uniform(size=60) < 0.7
INSIDE, SIZES = SETS[np.arange(60), LABELS], SETS.sum(-1)


def _loop(values, groups, num_groups, mask):
    rows = [values[mask & (groups == g)] for g in range(num_groups)]
    return [np.mean(np.float64(x)) if len(x) else np.nan for x in rows], [len(x) for x in rows]


def test_is_the_loop():
    spoilt, groups = np.where(MASK, VALUES, np.nan), np.where(MASK, GROUPS, -1)
    want = _loop(VALUES, GROUPS, 4, MASK)
    got = scores.by_group(spoilt.reshape(6, 10), groups.reshape(6, 10), num_groups=4, row_weights=MASK.reshape(6, 10))
    np.testing.assert_allclose(got.mean, want[0], rtol=1e-5)
    np.testing.assert_array_equal(got.count, want[1])
    assert got.count[3] == 0
    assert np.isnan(got.mean[3])
    traced = jax.jit(lambda x, g: scores.by_group(x, g, num_groups=4))
    # While tracing, rows of other groups do not count: not from the end, and not in the last group.
    np.testing.assert_allclose(traced(VALUES, np.where(MASK, GROUPS, -1)).mean, want[0], rtol=1e-5)
    np.testing.assert_allclose(traced(VALUES, np.where(MASK, GROUPS, 9)).mean, want[0], rtol=1e-5)
    assert not np.allclose(traced(VALUES, GROUPS).mean[:3], want[0][:3], rtol=1e-3)


def test_coverage_by_class_and_by_size():
    labels = np.where(MASK, LABELS, -7)
    by_class = scores.class_conditional_coverage(SETS, labels, row_weights=MASK)
    by_size = scores.size_stratified_coverage(SETS, labels, row_weights=MASK)
    for got, groups, count in ((by_class, LABELS, 4), (by_size, SIZES, 5)):
        want = _loop(INSIDE, groups, count, MASK)
        np.testing.assert_allclose(got.mean, want[0], rtol=1e-6)
        np.testing.assert_array_equal(got.count, want[1])
    # Sums of rows are those of all rows.
    covered = scores.set_coverage(SETS, labels, row_weights=MASK)
    for got in (by_class, by_size):
        total = np.nansum(np.asarray(got.mean) * np.asarray(got.count)) / MASK.sum()
        np.testing.assert_allclose(total, covered, rtol=1e-6)
    assert not np.allclose(by_class.mean, scores.class_conditional_coverage(~SETS, LABELS).mean)
    traced = jax.jit(scores.size_stratified_coverage)(SETS, np.where(np.arange(60) == 0, 4, LABELS))
    assert np.isnan(traced.mean[SIZES[0]])


@pytest.mark.slow
def test_many_equal_rows_keep_their_mean():
    """In float32, one accumulator loses percents of the sum of 0.1 over four million rows."""
    rows = 4_000_000
    zeros, tenth, right = np.zeros(rows, np.int32), np.full(rows, 0.1, np.float32), np.arange(rows) < rows // 2
    near = lambda value: pytest.approx(value, rel=1e-4)
    for num_groups in (1, 2000):
        assert scores.by_group(tenth, zeros, num_groups=num_groups).mean[0] == near(0.1), num_groups
    sets, options = np.stack([right, ~right], axis=-1), {"row_weights": tenth}
    assert scores.balanced_accuracy(sets[None].astype(np.float32), zeros, **options) == near(0.5)
    assert scores.class_conditional_coverage(sets, zeros, **options).mean[0] == near(0.5)
    assert scores.size_stratified_coverage(sets, zeros, **options).mean[1] == near(0.5)
    assert scores.aurc(zeros.astype(np.float32), tenth) == near(0.1)
    assert scores.quantile_calibration_error(0 * tenth, num_levels=1, **options) == near(0.5)
