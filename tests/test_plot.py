"""What is drawn is what NumPy computes, on the Axes that are given, and legible without colour."""

import importlib.util
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble import plot, scores, uncertainty
from eqx_ensemble.train import History

from .factories import mse

special = pytest.importorskip("scipy.special")
plt = pytest.importorskip("matplotlib.pyplot", reason="what plots are made with")

RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.normal(size=(4, 50, 3)).astype(np.float32), RNG.integers(3, size=50)


@pytest.fixture(autouse=True)
def closed():
    """No figure of one test is seen by another."""
    plt.close("all")
    yield
    plt.close("all")


@pytest.fixture
def ax():
    return plt.subplots()[1]


@pytest.fixture(scope="module")
def run():
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    data, key = (x, np.sin(x[:, :1])), jax.random.key(0)
    hyper = {"lr": jnp.array([1e-3, 1e-2, 1e-1, 1e38])}
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    options = {"hyper": hyper, "epochs": 6, "batch_size": 10, "validation": data, "key": key}
    with pytest.warns(UserWarning, match="members 3 diverged"):
        return ee.fit(ensemble, mse, lambda hyper: optax.sgd(hyper["lr"]), data, **options)


class Curves:
    """What `training_curves` reads of a run: member 2 has stopped."""

    def __init__(self, loss):
        steps = 1 + np.arange(loss.shape[1])
        self.history = History(loss, None, None, steps, np.zeros(0, int))
        self.table = lambda: {"status": np.where(np.arange(len(loss)) == 2, "stopped", "ok")}


def heights(container):
    return np.array([bar.get_height() for bar in container])


def of_label(ax, start):
    return next(line for line in ax.lines if str(line.get_label()).startswith(start))


def band(collection):
    """The lower and the upper edge of a filled band, by its place."""
    vertices = collection.get_paths()[0].vertices
    places = np.unique(vertices[:, 0])
    return np.array([[f(vertices[vertices[:, 0] == x, 1]) for x in places] for f in (np.min, np.max)])


CASES = {
    "reliability_diagram": lambda run, **options: plot.reliability_diagram(LOGITS, LABELS, **options),
    "rank_histogram": lambda run, **options: plot.rank_histogram(np.array([3, 4, 5]), **options),
    "training_curves": lambda run, **options: plot.training_curves(run, **options),
    "prediction_bands": lambda run, **options: plot.prediction_bands(LOGITS[..., 0], **options),
}


@pytest.mark.parametrize("name", plot.__all__)
def test_draws_on_the_axes_and_returns_them(name, run, monkeypatch):
    monkeypatch.setattr(plt, "show", lambda *_, **__: pytest.fail("shown"))
    figure, (ax, other) = plt.subplots(1, 2)
    assert CASES[name](run, ax=ax, color="red") is ax
    assert ax.has_data()
    assert not other.has_data()
    assert plt.get_fignums() == [figure.number]
    figure.canvas.draw()
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    drawn = ax.containers[0][0].get_facecolor() if ax.containers else ax.lines[0].get_color()
    assert drawn in ("red", (1.0, 0.0, 0.0, 1.0))
    assert CASES[name](run).figure.number == plt.get_fignums()[1]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda one: None if one == "matplotlib" else find_spec(one))
    with pytest.raises(ImportError, match=rf"`plot.{name}` needs matplotlib.\nInstall it: `pip .*\[plot\]'`."):
        CASES[name](run)
    with pytest.raises(ImportError, match="`Run.plot` needs matplotlib"):
        run.plot()


@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.6, 0.3, 0.0])])
@pytest.mark.parametrize("binning", ["width", "mass"])
def test_reliability_diagram(ax, binning, weights):
    labels, mask = RNG.integers(3, size=(20, 15)), RNG.uniform(size=(20, 15)) < 0.7
    logits = (2 * RNG.normal(size=(4, 20, 15, 3)) + np.eye(3)[labels]).astype(np.float32)
    mixture = np.average(special.softmax(np.float64(logits), -1), axis=0, weights=weights)[mask]
    confidence, right = mixture.max(-1), mixture.argmax(-1) == labels[mask]
    error = scores.ece(logits[:, mask], labels[mask], num_bins=7, binning=binning, weights=weights)
    logits[:, ~mask], labels[~mask] = np.nan, -1
    plot.reliability_diagram(logits, labels, num_bins=7, binning=binning, weights=weights, row_weights=mask, ax=ax)
    bars, gaps = ax.containers
    left = np.array([bar.get_x() for bar in bars])
    ends = left + [bar.get_width() for bar in bars]
    inside = (left[:, None] + 1e-6 < confidence) & (confidence <= ends[:, None] + 1e-6)
    counts = inside.sum(1)
    assert counts.sum() == mask.sum()
    np.testing.assert_allclose(heights(bars), [right[own].mean() for own in inside], rtol=1e-5)
    gap = [confidence[own].mean() - right[own].mean() for own in inside]
    np.testing.assert_allclose(heights(gaps), gap, rtol=1e-4, atol=1e-6)
    # What the bars show sums up to the error that the legend names.
    np.testing.assert_allclose(np.sum(counts * np.abs(heights(gaps))) / counts.sum(), error, rtol=1e-4)
    assert f"(ECE {float(error):.3f})" in bars.get_label()
    if binning == "width":
        assert counts.tolist() == [int(text.get_text()) for text in ax.texts]
    else:
        assert f"{counts.min()} to {counts.max()} rows each" in bars.get_label()
        assert left[0] == pytest.approx(1 / 3)  # no confidence in three classes is lower
    assert (bars[0].get_hatch(), gaps[0].get_hatch(), gaps[0].get_fill()) == (None, "///", False)


@pytest.mark.parametrize("kind", ["rank", "pit"])
def test_rank_histogram(ax, kind):
    counts = jnp.array([3, 0, 5, 2, 10])
    plot.rank_histogram(counts, kind=kind, ax=ax)
    np.testing.assert_array_equal(heights(ax.containers[0]), counts)
    edges = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.containers[0]]
    want = np.arange(5)[:, None] + np.array([-0.5, 0.5])
    np.testing.assert_allclose(edges, want if kind == "rank" else (want + 0.5) / 5, atol=1e-12)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), 4)
    area = ax.patches[-1]  # a rectangle, before matplotlib 3.9 a polygon
    low, high = area.get_patch_transform().transform_path(area.get_path()).get_extents().intervaly
    np.testing.assert_allclose([low, high], 4 + np.array([-2, 2]) * np.sqrt(20 * 0.2 * 0.8))


def test_training_curves_of_every_step_and_of_means(ax):
    loss = np.abs(RNG.normal(size=(9, 10))).astype(np.float32)
    loss[2, 4:], loss[5, 7], loss[:, 3] = np.nan, np.inf, np.nan
    plot.training_curves(Curves(loss), ax=ax)
    steps = np.delete(np.arange(10), 3)  # that no member has
    carried = loss.copy()
    carried[2, 4:] = loss[2, 2]  # this member ended; member 5 goes on after step 7
    finite = [carried[np.isfinite(carried[:, step]), step] for step in steps]
    median, *members = ax.lines[:-1]
    np.testing.assert_array_equal(median.get_xdata(), 1 + steps)
    np.testing.assert_allclose(median.get_ydata(), [np.median(column) for column in finite])
    for line, curve in zip(members, loss, strict=True):
        np.testing.assert_allclose(line.get_ydata(), np.where(np.isfinite(curve), curve, np.nan)[steps])
    for edge, q in zip(band(ax.collections[0]), (0.25, 0.75), strict=True):
        want = [np.quantile(column, q, method="averaged_inverted_cdf") for column in finite]
        np.testing.assert_allclose(edge, want)
    mark = of_label(ax, "1 stopped")
    assert (mark.get_marker(), mark.get_xydata().tolist()) == ("s", [[3, loss[2, 2]]])
    assert of_label(ax, "training, median of 9 members\n(1 ended: their last value)") is median
    _, *members = plot.training_curves(Curves(loss), stride=4).lines[:-1]
    for line, curve in zip(members, loss, strict=True):
        parts = [part[np.isfinite(part)] for part in (curve[:4], curve[4:8], curve[8:])]
        want = [part.mean() if part.size else np.nan for part in parts]
        np.testing.assert_allclose(line.get_ydata(), want, rtol=1e-6)
        np.testing.assert_array_equal(line.get_xdata(), [4, 8, 10])


def test_curves_of_training_and_validation(run):
    ax = plot.training_curves(run)
    training = ax.lines[0]
    plot.training_curves(run, curve="validation", ax=ax)
    validation = of_label(ax, "validation, median")
    assert training.get_linestyle() != validation.get_linestyle()  # without colour
    assert ax.lines[1].get_linewidth() < training.get_linewidth()
    np.testing.assert_array_equal(validation.get_xdata(), run.history.validation_step)
    kept, dots = run.best_step > 0, of_label(ax, "weights kept")
    np.testing.assert_array_equal(dots.get_xydata().T, [run.best_step[kept], run.best_score[kept]])
    assert of_label(ax, "1 diverged").get_marker() == "x"
    for loss, curve in ((np.nan, "loss"), (1, "validation")):
        with pytest.raises(ValueError, match=f"a finite number in `history.{curve}`"):
            plot.training_curves(Curves(np.full((4, 2), loss, np.float32)), curve=curve)


@pytest.mark.parametrize("x", [None, np.array([3.0, 1.0, 2.0, 0.0])])
def test_prediction_bands(ax, x):
    predictions = (RNG.normal(size=(10, 4)) + np.array([40, 0, -20, 15])).astype(np.float32)
    centre = predictions.mean(0)
    targets = centre + np.array([0, 9, 0, -9])
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
    assert narrow.get_facecolor()[0][3] > wide.get_facecolor()[0][3] + 0.1
    for points, rows in ((inside, {0, 2}), (outside, {1, 3})):
        places = [i for i, row in enumerate(order) if row in rows]
        np.testing.assert_array_equal(points.get_xydata().T, [at[places], targets[order][places]])
    assert (inside.get_marker(), outside.get_marker(), outside.get_markerfacecolor()) == ("o", "D", "none")
    column = lambda values: None if values is None else values[..., None]
    other = plot.prediction_bands(column(predictions), x=column(x), targets=column(targets))
    np.testing.assert_array_equal(*([line.get_xdata() for line in one.lines[:1]] for one in (ax, other)))


def test_bands_of_weighted_members_and_bands_that_are_given(ax):
    predictions, weights = RNG.normal(size=(6, 5)).astype(np.float32), np.array([1, 4, 0, 2, 3, 3])
    counted = np.repeat(predictions, weights, axis=0)  # 13: no quantile of 0.2 and 0.8 is between two
    predictions[2] = np.nan
    plot.prediction_bands(predictions, weights=weights, levels=(0.6,), ax=ax)
    order = np.argsort(counted.mean(0))
    np.testing.assert_allclose(ax.lines[0].get_ydata(), counted.mean(0)[order], rtol=1e-5, atol=1e-6)
    want = np.quantile(counted, [0.2, 0.8], axis=0, method="averaged_inverted_cdf")[:, order]
    np.testing.assert_allclose(band(ax.collections[0]), want, rtol=1e-5)
    mean, variance = np.array([1.0, 0.0, 2.0], np.float32), np.array([1.0, 4.0, 9.0], np.float32)
    given = {level: uncertainty.gaussian_interval(mean, variance, level=level) for level in (0.5, 0.9)}
    drawn = plot.prediction_bands(mean[None], intervals=given).collections
    for collection, (z, level) in zip(drawn, [(1.6449, "90 %"), (0.6745, "50 %")], strict=True):
        want = np.sort(mean) + np.array([[-z], [z]]) * np.sqrt(variance)[np.argsort(mean)]
        np.testing.assert_allclose(band(collection), want, atol=1e-3)
        assert collection.get_label() == f"central {level}"


@pytest.mark.usefixtures("unhooked")
def test_shapes_that_do_not_fit_are_refused_before_anything_is_drawn():
    for call, message in [
        (lambda: plot.prediction_bands(LOGITS[0, :, 0]), r"got shape \(50,\)\n.*`predictions\[None\]`"),
        (lambda: plot.prediction_bands(LOGITS), "squeeze"),
        (lambda: plot.prediction_bands(LOGITS[..., 0], weights=np.ones(3)), "one weight per member"),
        (lambda: plot.reliability_diagram(LOGITS, LABELS[:-1]), "`labels` for the rows of"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
        assert plt.get_fignums() == []


# The figure of a run.


@pytest.mark.parametrize("mode", ["min", "max"])
def test_one_call_draws_curves_and_scores(run, mode):
    figure = replace(run, mode=mode).plot(stride=2)
    assert plt.get_fignums() == [figure.number]
    loss, validation, score = figure.axes
    assert [ax.get_xlabel() for ax in figure.axes] == ["step", "step", "lr"]
    assert loss.get_ylabel() == "training loss, mean of 2 steps"
    assert validation.get_ylabel() == "validation score"
    np.testing.assert_array_equal(of_label(loss, "training, median").get_xdata(), run.history.step[1::2])
    members = of_label(score, "3 members").get_xydata().T
    np.testing.assert_allclose(members, [[1e-3, 1e-2, 1e-1], run.best_score[:3]], rtol=1e-6)
    best = int(np.argmin(run.best_score[:3]) if mode == "min" else np.argmax(run.best_score[:3]))
    ring = of_label(score, f"{'lowest' if mode == 'min' else 'highest'}: member {best}")
    assert ring.get_xydata().tolist() == [members[:, best].tolist()]
    cross = of_label(score, "1 diverged")
    assert cross.get_xydata().tolist() == [[np.float32(1e38), 0.97 if mode == "min" else 0.03]]  # of the height
    assert score.get_xscale() == "log"
    figure.canvas.draw()


@pytest.mark.parametrize("count", [0, 7])
def test_panels_follow_the_hyper_parameters(run, count):
    hyper = {f"h{i}": jnp.arange(4.0) + i for i in range(count)} | {"pair": jnp.arange(8.0).reshape(4, 2)}
    figure = replace(run, train_state=replace(run.train_state, hyper=hyper)).plot()
    names = [f"h{i}" for i in range(count)] + ["pair[0]", "pair[1]"]
    assert [ax.get_xlabel() for ax in figure.axes] == ["step", "step", *names]
    np.testing.assert_array_equal(of_label(figure.axes[-1], "3 members").get_xdata(), [1, 3, 5])
