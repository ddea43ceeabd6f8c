import jax
import numpy as np

from eqx_ensemble import scores

LOWER, UPPER = np.array([0, 1, 2], np.float32), np.array([1, 4, 2], np.float32)
SETS = np.array([[True, True, False], [True, False, False], [False, False, False]])


def test_width():
    assert scores.width(LOWER, UPPER) == np.float32(4 / 3)
    np.testing.assert_array_equal(scores.width(LOWER, UPPER, reduction="none"), [1, 3, 0])
    assert scores.width(LOWER, np.array([1, np.inf, 2], np.float32)) == np.inf
    # The common offset cancels exactly.
    assert scores.width(LOWER + 1e4, UPPER + 1e4) == np.float32(4 / 3)


def test_sets():
    labels = np.array([1, 2, 0])
    np.testing.assert_array_equal(scores.set_coverage(SETS, labels, reduction="none"), [1, 0, 0])
    np.testing.assert_allclose(scores.set_coverage(SETS, labels), 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(scores.set_coverage(SETS, labels * 0), 2 / 3, rtol=1e-6)
    np.testing.assert_array_equal(scores.set_size(SETS, reduction="none"), [2, 1, 0])
    mask = np.array([True, False, True])
    assert scores.set_size(SETS, row_weights=mask) == 1
    assert scores.set_coverage(SETS, np.array([1, -7, 0]), row_weights=mask) == 0.5
    traced = jax.jit(lambda labels: scores.set_coverage(SETS, labels, reduction="none"))(np.array([1, 3, 0]))
    np.testing.assert_array_equal(traced, [1, np.nan, 0])
