"""What all plots have in common: the Axes they draw on, what they do not change, what they reject."""

import builtins
import inspect
import sys

import jax
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from eqx_ensemble import plot, train

RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.normal(size=(4, 50, 3)).astype(np.float32), RNG.integers(3, size=50)
HISTORY = train.History(
    np.ones((4, 10), np.float32), None, np.ones((4, 2), np.float32), np.arange(1, 11), np.array([5, 10])
)

CASES = {
    "reliability_diagram": ((LOGITS, LABELS), {"color": "0.5"}),
    "rank_histogram": ((np.array([3, 4, 5]),), {"color": "0.5"}),
    "training_curves": ((HISTORY,), {"lw": 3}),
    "prediction_bands": ((LOGITS[..., 0],), {"c": "red"}),
    "uncertainty_histogram": ((LOGITS[..., 0], LOGITS[..., 1]), {"lw": 3}),
    "risk_coverage": ((np.array([0.5, 1.0]), np.array([0.1, 0.2])), {"ls": "--"}),
}
each = pytest.mark.parametrize("name", CASES)


def test_every_plot_is_here():
    assert set(CASES) == {name for name, value in vars(plot).items() if inspect.isfunction(value)}


def draw(name, **more):
    arguments, options = CASES[name]
    return getattr(plot, name)(*arguments, **options, **more)


@each
def test_draws_on_the_axes_and_returns_them(name):
    figure, (ax, other) = plt.subplots(1, 2)
    assert draw(name, ax=ax) is ax
    assert ax.has_data()
    assert not other.has_data()
    assert plt.get_fignums() == [figure.number]
    figure.canvas.draw()
    assert ax.get_xlabel()
    assert ax.get_ylabel()


@each
def test_makes_one_figure_if_none_is_given(name, monkeypatch):
    monkeypatch.setattr(plt, "show", lambda *_, **__: pytest.fail("shown"))
    settings = dict(mpl.rcParams)
    ax = draw(name)
    assert plt.get_fignums() == [ax.figure.number]
    assert dict(mpl.rcParams) == settings


@each
def test_figures_without_pyplot_will_do(name):
    ax = mpl.figure.Figure().subplots()
    assert draw(name, ax=ax) is ax
    assert plt.get_fignums() == []


@each
def test_names_the_extra_without_matplotlib(name, monkeypatch):
    import_module = builtins.__import__

    def blocked(module, *arguments, **options):
        if module.split(".")[0] == "matplotlib":
            raise ImportError(module)
        return import_module(module, *arguments, **options)

    for module in [module for module in sys.modules if module.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", blocked)
        with pytest.raises(ImportError) as error:
            draw(name)
    assert str(error.value) == (f"`plot.{name}` needs matplotlib.\nInstall it: `pip install 'eqx_ensemble[plot]'`.")


@each
def test_other_things_are_no_axes(name):
    with pytest.raises(TypeError, match=r"one matplotlib Axes as `ax`.\n  got .*\n.*pass one of them, `axes\[0\]`"):
        draw(name, ax=plt.subplots(1, 2)[1])


def test_options_reach_matplotlib():
    assert {bar.get_facecolor()[:3] for bar in draw("reliability_diagram").containers[0]} == {to_rgb("0.5")}
    assert {bar.get_facecolor()[:3] for bar in draw("rank_histogram").containers[0]} == {to_rgb("0.5")}
    assert draw("training_curves").lines[0].get_linewidth() == 3
    ax = draw("prediction_bands")
    assert ax.lines[0].get_color() == "red"
    assert to_rgb(ax.collections[0].get_facecolor()[0][:3]) == to_rgb("red")
    assert {patch.get_linewidth() for patch in draw("uncertainty_histogram").patches} == {3}
    assert draw("risk_coverage").lines[0].get_linestyle() == "--"


def _boxes(texts, figure):
    return [text.get_window_extent(figure.canvas.get_renderer()) for text in texts if text.get_text()]


def _meet(boxes):
    return [i for i, one in enumerate(boxes) for other in boxes[i + 1 :] if one.overlaps(other)]


READABLE = {
    "equal mass": lambda: plot.reliability_diagram(8 * LOGITS, LABELS, binning="mass", num_bins=15),
    "equal width": lambda: plot.reliability_diagram(8 * LOGITS, LABELS),
}


@pytest.mark.parametrize("name", READABLE)
def test_no_text_runs_into_another(name):
    ax = READABLE[name]()
    ax.figure.canvas.draw()
    legend = [] if ax.get_legend() is None else [ax.get_legend().get_window_extent()]
    assert not _meet(_boxes(ax.texts, ax.figure) + legend)
    labels = _boxes([*ax.get_xticklabels(), ax.xaxis.label], ax.figure)
    assert not _meet(labels)
    assert all(box.y0 >= 0 for box in labels)  # nor out of the figure


def looks(line):
    return line.get_linestyle(), line.get_marker()


def test_curves_on_one_axes_differ_without_colour():
    coverage, ax = np.array([0.5, 1.0]), plt.subplots()[1]
    for i in range(10):
        plot.risk_coverage(coverage, coverage * i, label=str(i), ax=ax)
    assert len({looks(line) for line in ax.lines}) == 10
    # matplotlib by itself changes hue only.
    control = plt.subplots()[1]
    for i in range(10):
        control.plot(coverage, coverage * i)
    assert len({looks(line) for line in control.lines}) == 1


def test_training_and_validation_differ_without_colour():
    ax = plot.training_curves(HISTORY)
    plot.training_curves(HISTORY, curve="validation", ax=ax)
    training, validation = ax.lines[0], ax.lines[5]
    assert looks(training) != looks(validation)
    assert looks(ax.lines[1]) == looks(training)
    assert ax.lines[1].get_linewidth() < training.get_linewidth()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "training, median of 4 members",
        "training, central 50 %",
        "validation, median of 4 members",
        "validation, central 50 %",
    ]


def test_bands_and_targets_differ_without_colour():
    ax = plot.prediction_bands(LOGITS[..., 0], targets=10 * LOGITS[0, :, 1])
    opacity = [collection.get_facecolor()[0][3] for collection in ax.collections]
    assert opacity[1] > opacity[0] + 0.1
    _, inside, outside = ax.lines
    assert {inside.get_marker(), outside.get_marker()} == {"o", "D"}
    assert outside.get_markerfacecolor() == "none"


def test_bars_and_histograms_differ_without_colour():
    bars, gaps = plot.reliability_diagram(LOGITS, LABELS).containers
    assert (bars[0].get_hatch(), gaps[0].get_hatch()) == (None, "///")
    assert bars[0].get_fill()
    assert not gaps[0].get_fill()
    known, novel = plot.uncertainty_histogram(LOGITS[..., 0], LOGITS[..., 1]).patches
    assert (known.get_hatch(), novel.get_hatch()) == ("///", None)
    assert (known.get_fill(), novel.get_fill()) == (True, False)


BAD = {
    "one_member": (
        lambda: plot.prediction_bands(LOGITS[0, :, 0]),
        r"`predictions` of shape \(members, batch\).\n  got shape \(50,\)\n.*`predictions\[None\]`",
    ),
    "trailing_axis": (lambda: plot.prediction_bands(LOGITS), r"got shape \(4, 50, 3\)\n.*`predictions\[..., 0\]`"),
    "other_rows": (
        lambda: plot.prediction_bands(LOGITS[..., 0], targets=np.ones(4)),
        r"one number per row in `targets`.\n  expected \(50,\), as `predictions` are \(members, batch\); got \(4,\)",
    ),
    "x": (lambda: plot.prediction_bands(LOGITS[..., 0], x=np.ones((50, 2))), r"`x` of shape \(batch,\)"),
    "level": (lambda: plot.prediction_bands(LOGITS[..., 0], levels=(90.0,)), "a `level` between 0 and 1"),
    "swapped_ends": (
        lambda: plot.prediction_bands(LOGITS[..., 0], intervals={0.9: (np.ones(50), np.zeros(50))}),
        "at or below its upper end.\n  got 1.0 at index .*, the first of 50 such\nSwapped",
    ),
    "nan": (
        lambda: plot.prediction_bands(np.array([[1.0, np.nan]])),
        r"finite `predictions`.\n  got nan at index \(0, 1\), the first of 1 such\nExclude diverged members",
    ),
    "weights": (
        lambda: plot.prediction_bands(LOGITS[..., 0], weights=np.ones(3)),
        r"one weight per member.\n  expected shape \(4,\), got \(3,\)",
    ),
    "nan_of_weight": (
        lambda: plot.prediction_bands(np.array([[1.0], [np.nan], [np.nan]]), weights=np.array([1, 0, 2])),
        r"finite `predictions`.\n  got nan at index \(2, 0\), the first of 1 such",
    ),
    "labels": (lambda: plot.reliability_diagram(LOGITS, LABELS[:-1]), "one label per row"),
    "num_bins": (lambda: plot.reliability_diagram(LOGITS, LABELS, num_bins=0), "`num_bins` of at least 1"),
    "binning": (
        lambda: plot.reliability_diagram(LOGITS, LABELS, binning="equal"),
        "`binning` to be one of 'width', 'mass'",
    ),
    "row_weights": (
        lambda: plot.reliability_diagram(LOGITS, LABELS, row_weights=np.ones(3, bool)),
        "one of `row_weights` per row",
    ),
    "numbers": (
        lambda: plot.reliability_diagram(LOGITS, LABELS, row_weights=2 * np.ones(len(LABELS))),
        "`row_weights` of zeros and ones",
    ),
    "nan_logits": (lambda: plot.reliability_diagram(LOGITS * np.nan, LABELS), "finite `logits`"),
    "ranks": (lambda: plot.rank_histogram(np.ones((2, 3))), r"`counts` of shape \(ranks,\)"),
    "negative": (lambda: plot.rank_histogram(np.array([1, -1])), "`counts` of zero or more"),
    "values": (lambda: plot.rank_histogram(np.array([0.2, 0.7])), "whole `counts`.\n  got 0.2.*\n.*pit_histogram"),
    "kind": (lambda: plot.rank_histogram(np.ones(2), kind="pitt"), "`kind` to be one of 'rank', 'pit'"),
    "no_rows": (lambda: plot.rank_histogram(np.zeros(3)), "`counts` of at least one row"),
    "one_rank": (lambda: plot.rank_histogram(np.ones(1)), "at least two ranks"),
    "curve": (lambda: plot.training_curves(HISTORY, curve="val"), "`curve` to be one of 'loss', 'validation'"),
    "stride": (lambda: plot.training_curves(HISTORY, stride=0), "`stride`"),
    "no_validation": (
        lambda: plot.training_curves(
            train.History(np.ones((4, 2)), None, None, np.arange(1, 3), np.zeros(0, int)), curve="validation"
        ),
        "validation scores.\n  got a run without\nTrain with `validation=` data",
    ),
    "all_nan": (
        lambda: plot.training_curves(
            train.History(np.full((4, 2), np.nan), None, None, np.arange(1, 3), np.zeros(0, int))
        ),
        "a finite number in `history.loss`",
    ),
    "empty": (lambda: plot.uncertainty_histogram(np.zeros(0), np.ones(3)), "at least one number in `in_distribution`"),
    "bins": (lambda: plot.uncertainty_histogram(np.ones(3), np.ones(3), bins=0), "`bins` of one or more"),
    "edges": (lambda: plot.uncertainty_histogram(np.ones(3), np.ones(3), bins=[1.0, 0.0]), "two or more rising edges"),
    "one_curve": (lambda: plot.risk_coverage(np.ones(3), np.ones(4)), "`coverage` and `risk` of one shape"),
    "swapped": (lambda: plot.risk_coverage(np.array([0.2, 0.1]), np.array([0.5, 1.0])), "`coverage` that rises"),
}

WRONG_KINDS = {
    "run": (lambda: plot.training_curves({}), "a `Run` or its `History`.\n  got a dict"),
    "intervals": (
        lambda: plot.prediction_bands(LOGITS[..., 0], intervals=(np.ones(50), np.ones(50))),
        "a dict from level to",
    ),
    "traced": (
        lambda: jax.jit(lambda counts: plot.rank_histogram(counts) and counts)(np.ones(3)),
        "a concrete `counts` on this host",
    ),
}


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_drawn(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()
    assert plt.get_fignums() == []


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("case", WRONG_KINDS)
def test_wrong_kinds_are_refused_before_anything_is_drawn(case):
    call, message = WRONG_KINDS[case]
    with pytest.raises(TypeError, match=message):
        call()
    assert plt.get_fignums() == []
