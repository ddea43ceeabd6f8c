import jax
import numpy as np
import pytest

from eqx_ensemble import scores

metrics = pytest.importorskip("sklearn.metrics", reason="the reference scores are scikit-learn's")


def _data(shape=(5, 30), seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[1:]).astype(np.float32)


@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.4, 0.2, 0.2, 0.1])])
def test_rmse_is_scikit_learns(weights):
    predictions, targets = _data()
    ensemble = metrics.root_mean_squared_error(targets, np.average(predictions, axis=0, weights=weights))
    each = [metrics.root_mean_squared_error(targets, member) for member in predictions]
    np.testing.assert_allclose(scores.rmse(predictions, targets, weights=weights), ensemble, rtol=1e-5)
    members = np.average(each, weights=weights)
    np.testing.assert_allclose(scores.mean_member_rmse(predictions, targets, weights=weights), members, rtol=1e-5)
    assert not np.allclose(ensemble, members, rtol=1e-2)
    assert not np.allclose(scores.rmse(predictions, targets[::-1], weights=weights), ensemble, rtol=1e-2)


def test_weights_count_members_and_zero_leaves_out():
    predictions, targets = _data((3, 30))
    predictions[2] = np.inf
    for score in (scores.rmse, scores.mean_member_rmse):
        got = score(predictions, targets, weights=np.array([2, 1, 0]))
        np.testing.assert_allclose(got, score(predictions[[0, 0, 1]], targets), rtol=1e-5)
        assert not np.isfinite(score(predictions, targets))


def test_a_large_offset_costs_no_precision():
    predictions, targets = _data((64, 30))
    predictions, targets = predictions + np.float32(1e4), targets + np.float32(1e4)
    want = np.sqrt(np.mean((predictions.astype(np.float64).mean(0) - targets) ** 2))
    np.testing.assert_allclose(scores.rmse(predictions, targets), want, rtol=1e-5)


def test_a_perfect_fit_has_a_finite_gradient():
    predictions = np.ones((2, 3), np.float32)
    for score in (scores.rmse, scores.mean_member_rmse):
        value, slope = jax.jit(jax.value_and_grad(score))(predictions, predictions[0])
        assert value == 0
        np.testing.assert_array_equal(slope, 0)


def test_rows_of_any_shape():
    predictions, targets = _data((4, 6, 5))
    np.testing.assert_allclose(
        scores.rmse(predictions, targets), scores.rmse(predictions.reshape(4, 30), targets.reshape(30)), rtol=1e-6
    )
    np.testing.assert_allclose(
        scores.mean_member_rmse(predictions[:, 0, 0], targets[0, 0]),
        np.abs(predictions[:, 0, 0] - targets[0, 0]).mean(),
        rtol=1e-6,
    )


def test_coverage_counts_both_ends():
    lower, upper = np.zeros(6, np.float32), np.ones(6, np.float32)
    targets = np.array([-0.1, 0.0, 0.5, 1.0, 1.1, np.nan], np.float32)
    rows = scores.coverage(lower, upper, targets, reduction="none")
    np.testing.assert_array_equal(rows, [0, 1, 1, 1, 0, np.nan])
    np.testing.assert_allclose(scores.coverage(lower[:5], upper[:5], targets[:5]), 0.6, rtol=1e-6)
    assert scores.coverage(lower - np.inf, upper + np.inf, lower) == 1
