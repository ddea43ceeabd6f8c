import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import scores

NAMES = ("roc_curve", "precision_recall_curve")


def _rows(seed, num_rows=40):
    """Scores with many ties, which rows are positive, and weights of which some are zero."""
    rng = np.random.default_rng(seed)
    values = np.round(2 * rng.normal(size=num_rows)).astype(np.float32)
    positives = rng.uniform(size=num_rows) < 0.4
    return values, positives, rng.integers(0, 4, size=num_rows).astype(np.float32)


def _points(name, values, positives, weights=None):
    """Those of scikit-learn, from the highest threshold to the lowest."""
    metrics = pytest.importorskip("sklearn.metrics")
    if name == "roc_curve":
        kept = None if weights is None else weights > 0
        if kept is not None:
            values, positives, weights = values[kept], positives[kept], weights[kept]
        return np.stack(metrics.roc_curve(positives, values, sample_weight=weights, drop_intermediate=False), -1)
    kept = slice(None) if weights is None else weights > 0
    weights = None if weights is None else weights[kept]
    found = metrics.precision_recall_curve(positives[kept], values[kept], sample_weight=weights)
    precision, recall, thresholds = (x[::-1] for x in found)
    return np.stack([precision, recall, np.concatenate([[np.inf], thresholds])], -1)


def assert_same_points(curve, want):
    points = np.stack([np.asarray(x, np.float64) for x in curve], -1)
    _, first = np.unique(-points[:, -1], return_index=True)
    np.testing.assert_allclose(points[first], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_scikit_learn_agrees(name, seed):
    values, positives, weights = _rows(seed)
    function = getattr(scores, name)
    plain = function(values, positives)
    assert all(part.shape == (41,) for part in plain)
    assert_same_points(plain, _points(name, values, positives))
    weighted = function(np.where(weights == 0, np.nan, values), positives, row_weights=0.3 * weights)
    assert_same_points(weighted, _points(name, values, positives, weights))
    # The other kind called positive would not pass.
    with pytest.raises(AssertionError):
        assert_same_points(function(values, ~positives), _points(name, values, positives))


@pytest.mark.parametrize("name", NAMES)
def test_masks_while_tracing(name):
    values, positives, weights = _rows(7)
    function, mask = getattr(scores, name), weights > 1
    spoilt = np.where(mask, values, np.nan)
    traced = jax.jit(lambda row_weights: function(spoilt, positives, row_weights=row_weights))
    got, want = traced(mask), function(values[mask], positives[mask])
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one[: other.size], other, rtol=1e-6)
        np.testing.assert_allclose(one[other.size :], other[-1], rtol=1e-6)  # the last point again


def test_areas_are_the_scores():
    values, positives, weights = _rows(9)
    roc = scores.roc_curve(values, positives, row_weights=weights)
    area = jnp.trapezoid(roc.true_positive_rate, roc.false_positive_rate)
    np.testing.assert_allclose(area, scores.auroc(values, positives, row_weights=weights), rtol=1e-5)
    curve = scores.precision_recall_curve(values, positives, row_weights=weights)
    area = jnp.sum(jnp.diff(curve.recall) * curve.precision[1:])
    np.testing.assert_allclose(area, scores.aupr(values, positives, row_weights=weights), rtol=1e-5)
    assert not np.isclose(jnp.trapezoid(curve.precision, curve.recall), area, rtol=1e-3)
    np.testing.assert_allclose(curve.precision[-1], np.average(positives, weights=weights), rtol=1e-6)


def test_rates_never_fall():
    rng = np.random.default_rng(0)
    values, positives = rng.normal(size=20_000).astype(np.float32), rng.uniform(size=20_000) < 0.5
    weights = rng.exponential(size=20_000) ** 4
    for name in NAMES:
        curve = getattr(scores, name)(values, positives, row_weights=weights)
        assert (np.diff(curve[1]) >= 0).all()
        assert curve[1][0] == 0
        np.testing.assert_allclose(curve[1][-1], 1, rtol=1e-6)
        assert np.max(curve[1]) <= 1


def test_nan_is_nan():
    values, positives, _ = _rows(3)
    values[5] = np.nan
    for name in NAMES:
        assert np.isnan(getattr(scores, name)(values, positives)[1][1:]).all()


def test_infinite_scores_are_thresholds():
    values = np.array([np.inf, 1.0, -np.inf, 0.0], np.float32)
    curve = scores.roc_curve(
        values, np.array([True, False, True, False]), row_weights=np.array([True, True, True, False])
    )
    np.testing.assert_array_equal(curve.thresholds, [np.inf, np.inf, 1, -np.inf, -np.inf])
    np.testing.assert_array_equal(curve.true_positive_rate, [0, 0.5, 0.5, 1, 1])


@pytest.mark.usefixtures("unhooked")
def test_messages():
    values, positives, _ = _rows(3)
    for name in NAMES:
        with pytest.raises(ValueError, match=f"`scores.{name}` needs positive and negative rows"):
            getattr(scores, name)(values, np.ones(40, bool))
        with pytest.raises(TypeError, match=f"`scores.{name}` needs boolean `positives`"):
            getattr(scores, name)(values, positives.astype(int))
