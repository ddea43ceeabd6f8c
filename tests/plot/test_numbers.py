"""What is drawn is what NumPy computes."""

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.collections import LineCollection

from eqx_ensemble import plot, scores, train, uncertainty

RNG = np.random.default_rng(0)


def softmax(logits):
    powers = np.exp(np.asarray(logits, np.float64))
    return powers / powers.sum(-1, keepdims=True)


def bins_of(probabilities, labels, num_bins):
    """One bin after another, `lower < confidence <= upper`: its edge, rows, mean confidence and share that is right."""
    confidence, right = probabilities.max(-1).ravel(), (probabilities.argmax(-1) == labels).ravel()
    found = []
    for k in range(num_bins):
        inside = (confidence > k / num_bins) & (confidence <= (k + 1) / num_bins)
        if inside.any():
            found.append((k / num_bins, inside.sum(), confidence[inside].mean(), right[inside].mean()))
    return map(np.array, zip(*found, strict=True))


def heights(container):
    return np.array([bar.get_height() for bar in container])


def band(collection):
    """The lower and the upper edge of a filled band, by its place."""
    vertices = collection.get_paths()[0].vertices
    places = np.unique(vertices[:, 0])
    return np.array([[f(vertices[vertices[:, 0] == x, 1]) for x in places] for f in (np.min, np.max)])


@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.6, 0.3, 0.0])])
def test_reliability_diagram(ax, weights):
    labels = RNG.integers(3, size=(20, 15))
    logits = (2 * RNG.normal(size=(4, 20, 15, 3)) + np.eye(3)[labels]).astype(np.float32)
    mixture = np.average(softmax(logits), axis=0, weights=weights)
    left, counts, confidence, right = bins_of(mixture, labels, 7)
    plot.reliability_diagram(logits, labels, num_bins=7, weights=weights, show_members=True, ax=ax)
    bars, gaps = ax.containers
    np.testing.assert_allclose([bar.get_x() for bar in bars], left, atol=1e-12)
    np.testing.assert_allclose([bar.get_width() for bar in bars], 1 / 7, rtol=1e-5)  # between float32 edges
    np.testing.assert_allclose(heights(bars), right, rtol=1e-6)
    np.testing.assert_allclose([bar.get_y() for bar in gaps], right, rtol=1e-6)
    np.testing.assert_allclose(heights(gaps), confidence - right, rtol=1e-4, atol=1e-6)
    assert [text.get_text() for text in ax.texts] == [str(count) for count in counts]
    # What the bars show sums up to the error that the legend names.
    error = scores.ece(logits, labels, num_bins=7, weights=weights)
    np.testing.assert_allclose(np.sum(counts * np.abs(heights(gaps))) / counts.sum(), error, rtol=1e-4)
    assert f"ECE {float(error):.3f}" in bars.get_label()
    # Bins of one member are other bins, and so is one more or less of them.
    assert not np.array_equal(counts, list(bins_of(softmax(logits[0]), labels, 7))[1])
    curves = ax.lines[1:]
    assert len(curves) == (4 if weights is None else 3)
    for member, curve in zip(softmax(logits), curves, strict=False):
        _, _, confidence, right = bins_of(member, labels, 7)
        np.testing.assert_allclose(curve.get_xdata(), confidence, rtol=1e-5)
        np.testing.assert_allclose(curve.get_ydata(), right, rtol=1e-6)


def inside_of(bars, confidence):
    """Which of the rows are in each bar; its upper end is included."""
    left = np.array([bar.get_x() for bar in bars])
    right = left + [bar.get_width() for bar in bars]
    return (left[:, None] + 1e-6 < confidence) & (confidence <= right[:, None] + 1e-6)


@pytest.mark.parametrize("binning", ["width", "mass"])
def test_reliability_diagram_of_some_rows(ax, binning):
    labels, mask = RNG.integers(3, size=(20, 15)), RNG.uniform(size=(20, 15)) < 0.7
    logits = (2 * RNG.normal(size=(4, 20, 15, 3)) + np.eye(3)[labels]).astype(np.float32)
    kept = logits[:, mask], labels[mask]
    logits[:, ~mask], labels[~mask] = np.nan, -1
    plot.reliability_diagram(logits, labels, num_bins=7, binning=binning, row_weights=mask, show_members=True, ax=ax)
    bars, gaps = ax.containers
    counts = inside_of(bars, np.mean(softmax(kept[0]), axis=0).max(-1)).sum(1)
    if binning == "width":
        assert counts.tolist() == [int(text.get_text()) for text in ax.texts]
    else:
        assert f"{counts.min()} to {counts.max()} rows each" in bars.get_label()
        assert not ax.texts
        assert bars[0].get_x() == pytest.approx(1 / 3)  # no confidence in three classes is lower
    error = scores.ece(*kept, num_bins=7, binning=binning)
    np.testing.assert_allclose(np.sum(counts * np.abs(heights(gaps))) / counts.sum(), error, rtol=1e-4)
    assert f"ECE {float(error):.3f}" in bars.get_label()
    assert counts.sum() == mask.sum()
    assert (np.ptp(counts) <= 2) == (binning == "mass")
    for member, curve in enumerate(ax.lines[1:]):
        assert len(curve.get_xdata()) <= 7
        if binning == "mass":
            alone = np.sort(softmax(kept[0][member]).max(-1))
            np.testing.assert_allclose(np.mean(curve.get_xdata()), alone.mean(), rtol=2e-2)


def test_edges_of_bins_are_those_of_the_calibration_error(ax):
    # 0.5 is an edge of four bins: it is the only value in (0.25, 0.5].
    logits = np.log(np.array([[[0.5, 0.5], [0.6, 0.4]]], np.float32))
    plot.reliability_diagram(logits, np.array([1, 0]), num_bins=4, ax=ax)
    assert [bar.get_x() for bar in ax.containers[0]] == [0.25, 0.5]
    assert heights(ax.containers[0]).tolist() == [0, 1]


def test_rank_histogram(ax):
    counts = jnp.array([3, 0, 5, 2, 10])
    plot.rank_histogram(counts, ax=ax)
    np.testing.assert_array_equal(heights(ax.containers[0]), counts)
    assert [bar.get_x() + bar.get_width() / 2 for bar in ax.containers[0]] == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(ax.lines[0].get_ydata(), 4)
    area = ax.patches[-1]  # a rectangle, before matplotlib 3.9 a polygon
    low, high = area.get_patch_transform().transform_path(area.get_path()).get_extents().intervaly
    np.testing.assert_allclose([low, high], 4 + np.array([-2, 2]) * np.sqrt(20 * 0.2 * 0.8))
    assert ax.get_xlabel() == "rank of the target among the members"


def test_rank_histogram_of_a_pit_goes_from_zero_to_one(ax):
    plot.rank_histogram(np.array([3, 0, 5, 2]), kind="pit", ax=ax)
    edges = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.containers[0]]
    np.testing.assert_allclose(edges, [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)])
    assert ax.get_xlabel() == "PIT of the target"


def history(loss, validation=None, steps=(), begun=0):
    ends = begun + 1 + np.arange(np.shape(loss)[1])
    return train.History(np.asarray(loss, np.float32), None, validation, ends, np.array(steps, np.int64))


LOSS = np.abs(RNG.normal(size=(9, 10))).astype(np.float32)
LOSS[2, 4:], LOSS[5, 7] = np.nan, np.inf


def test_training_curves_of_every_step(ax):
    plot.training_curves(history(LOSS, begun=100), level=0.6, ax=ax)
    median, *members = ax.lines
    carried = LOSS.copy()
    carried[2, 4:] = LOSS[2, 3]  # this member ended; member 5 goes on after step 7
    finite = [carried[np.isfinite(carried[:, step]), step] for step in range(10)]
    assert [len(column) for column in finite] == [9] * 7 + [8] + [9] * 2
    np.testing.assert_array_equal(median.get_xdata(), np.arange(101, 111))
    np.testing.assert_allclose(median.get_ydata(), [np.median(column) for column in finite])
    assert not np.allclose(median.get_ydata(), [np.mean(column) for column in finite], rtol=1e-2)
    for line, curve in zip(members, LOSS, strict=True):
        np.testing.assert_allclose(line.get_ydata(), np.where(np.isfinite(curve), curve, np.nan))
    for edge, q in zip(band(ax.collections[0]), (0.2, 0.8), strict=True):
        # The smallest of the sorted numbers that is at least as large as this share of them.
        want = [np.sort(column)[int(np.ceil(q * len(column) - 1e-9)) - 1] for column in finite]
        np.testing.assert_allclose(edge, want)


def test_good_members_that_stop_do_not_move_the_median(ax):
    loss = np.repeat([[0.1], [0.2], [0.3], [8.0], [9.0], [np.nan]], 5, axis=1)
    loss[0, 1:], loss[1, 2:], loss[2, 2:] = np.nan, np.inf, np.nan
    plot.training_curves(history(loss), ax=ax)
    assert ax.lines[0].get_ydata().tolist() == pytest.approx([0.3] * 5)
    lower, upper = band(ax.collections[0])
    assert (lower.tolist(), upper.tolist()) == (pytest.approx([0.2] * 5), pytest.approx([8.0] * 5))
    assert np.isfinite(ax.lines[1].get_ydata()).sum() == 1  # the member's own line ends
    label = ax.get_legend().get_texts()[0].get_text()
    assert label == "training, median of 6 members\n(3 ended: their last value)"
    whole = plot.training_curves(history(loss[3:5])).get_legend().get_texts()[0].get_text()
    assert whole == "training, median of 2 members"


@pytest.mark.parametrize(("members", "level"), [(4, 0.5), (10, 0.8), (9, 0.5)])
def test_the_band_of_training_curves_is_central(ax, members, level):
    loss = RNG.normal(size=(members, 5)).astype(np.float32)
    plot.training_curves(history(loss), level=level, ax=ax)
    found = band(ax.collections[0])
    np.testing.assert_allclose(found, np.stack(uncertainty.interval(loss, level=level)), rtol=1e-6)
    turned = band(plot.training_curves(history(-loss), level=level).collections[0])
    np.testing.assert_allclose(turned, -found[::-1], rtol=1e-6)


def test_training_curves_of_means(ax):
    plot.training_curves(history(LOSS), stride=4, ax=ax)
    median, *members = ax.lines
    parts = [slice(0, 4), slice(4, 8), slice(8, 10)]
    np.testing.assert_array_equal(median.get_xdata(), [4, 8, 10])
    for line, curve in zip(members, LOSS, strict=True):
        want = [np.mean(curve[part][np.isfinite(curve[part])]) if np.isfinite(curve[part]).any() else np.nan
                for part in parts]  # fmt: skip
        np.testing.assert_allclose(line.get_ydata(), want, rtol=1e-6)


def test_points_that_no_member_has_are_left_out(ax):
    loss = LOSS.copy()
    loss[:, 3] = np.nan
    plot.training_curves(history(loss), ax=ax)
    assert 4 not in ax.lines[0].get_xdata()
    assert len(ax.lines[0].get_xdata()) == 9


def test_validation_curves_are_drawn_at_their_steps(ax):
    validation = np.arange(6.0).reshape(2, 3)
    plot.training_curves(history(LOSS[:2], validation, [4, 8, 12]), curve="validation", ax=ax)
    assert ax.lines[0].get_xdata().tolist() == [4, 8, 12]
    assert ax.lines[0].get_ydata().tolist() == [1.5, 2.5, 3.5]
    assert len(ax.lines) == 3  # a history does not contain which weights were kept


@pytest.mark.parametrize("x", [None, np.array([3.0, 1.0, 2.0, 0.0])])
def test_prediction_bands(ax, x):
    predictions = RNG.normal(size=(10, 4)).astype(np.float32)
    centre = predictions.mean(0)
    targets = np.array([centre[0], 9.0, centre[2], -9.0])
    plot.prediction_bands(predictions, x=x, targets=targets, levels=(0.4, 0.8), ax=ax)
    order = np.argsort(centre if x is None else x)
    at = np.arange(4) if x is None else np.sort(x)
    line, inside, outside = ax.lines
    np.testing.assert_array_equal(line.get_xdata(), at)
    np.testing.assert_allclose(line.get_ydata(), centre[order], rtol=1e-5)
    # Of ten members the quantile of level q is midway between those in place 10 q, counted from one, and after it.
    ranked = np.sort(predictions, axis=0)[:, order]
    wide, narrow = ax.collections
    np.testing.assert_allclose(band(wide), (ranked[[0, 8]] + ranked[[1, 9]]) / 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(band(narrow), (ranked[[2, 6]] + ranked[[3, 7]]) / 2, rtol=1e-5, atol=1e-6)
    for points, rows in ((inside, {0, 2}), (outside, {1, 3})):
        places = [i for i, row in enumerate(order) if row in rows]
        np.testing.assert_array_equal(points.get_xdata(), at[places])
        np.testing.assert_array_equal(points.get_ydata(), targets[order][places])


def test_bands_of_weighted_members(ax):
    predictions, weights = RNG.normal(size=(6, 5)).astype(np.float32), np.array([1, 4, 0, 2, 3, 3])
    counted = np.repeat(predictions, weights, axis=0)  # 13: no quantile of 0.2 and 0.8 is between two
    predictions[2] = np.nan
    plot.prediction_bands(predictions, weights=weights, levels=(0.6,), ax=ax)
    order = np.argsort(counted.mean(0))
    np.testing.assert_allclose(ax.lines[0].get_ydata(), counted.mean(0)[order], rtol=1e-5, atol=1e-6)
    want = np.quantile(counted, [0.2, 0.8], axis=0, method="averaged_inverted_cdf")[:, order]
    np.testing.assert_allclose(band(ax.collections[0]), want, rtol=1e-5)
    other = uncertainty.interval(np.delete(predictions, 2, axis=0), level=0.6)
    assert not np.allclose(band(ax.collections[0]), np.stack(other)[:, order], rtol=1e-2)


def test_intervals_of_the_members_are_the_bands_without(ax):
    predictions = RNG.normal(size=(8, 5)).astype(np.float32)
    given = {level: uncertainty.interval(predictions, level=level) for level in (0.5, 0.9)}
    plot.prediction_bands(predictions, intervals=given, ax=ax)
    for found, want in zip(ax.collections, plot.prediction_bands(predictions).collections, strict=True):
        np.testing.assert_array_equal(band(found), band(want))


def test_bands_that_are_given_are_drawn(ax):
    mean, variance = np.array([1.0, 0.0, 2.0], np.float32), np.array([1.0, 4.0, 9.0], np.float32)
    intervals = {level: uncertainty.gaussian_interval(mean, variance, level=level) for level in (0.5, 0.9)}
    plot.prediction_bands(mean[None], intervals=intervals, ax=ax)
    order = np.argsort(mean)
    for collection, (z, level) in zip(ax.collections, [(1.6449, "90 %"), (0.6745, "50 %")], strict=True):
        want = mean[order] + np.array([[-z], [z]]) * np.sqrt(variance)[order]
        np.testing.assert_allclose(band(collection), want, atol=1e-3)
        assert collection.get_label() == f"central {level}"


def test_uncertainty_histogram(ax):
    known, novel = RNG.gamma(1, 0.2, size=(30, 10)), RNG.gamma(4, 0.2, size=70)
    plot.uncertainty_histogram(known, novel, bins=12, ax=ax)
    edges = np.linspace(min(known.min(), novel.min()), max(known.max(), novel.max()), 13)
    for patch, values in zip(ax.patches, (known, novel), strict=True):
        data = patch.get_data()
        np.testing.assert_allclose(data.edges, edges)
        np.testing.assert_allclose(data.values, np.histogram(values, edges)[0] / values.size * 100)
        np.testing.assert_allclose(data.values.sum(), 100)


def test_values_beyond_the_edges_count_in_the_outer_bins(ax):
    plot.uncertainty_histogram(np.array([-5.0, 0.2, 0.8, 0.9]), np.array([0.1, 7.0]), bins=[0, 0.5, 1], ax=ax)
    assert [patch.get_data().values.tolist() for patch in ax.patches] == [[50, 50], [50, 50]]


def test_risk_coverage(ax):
    coverage, risk = np.arange(1, 6) / 5, np.array([0.0, 0.1, 0.1, 0.3, 0.4])
    plot.risk_coverage(coverage, risk, label="entropy", ax=ax)
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), np.stack([coverage, risk], axis=1))
    (reference,) = (collection for collection in ax.collections if isinstance(collection, LineCollection))
    assert reference.get_segments()[0].tolist() == [[0, 0.4], [1, 0.4]]
    assert ax.get_legend().get_texts()[0].get_text() == "entropy"
