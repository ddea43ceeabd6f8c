"""The figure of a run."""

import builtins
from dataclasses import replace

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import History, Status

from .test_run import run  # noqa: F401


def of_label(ax, start):
    return next(line for line in ax.lines if str(line.get_label()).startswith(start))


def test_one_call_draws_curves_and_scores(run):  # noqa: F811
    figure = run.plot(stride=2, unit="V²")
    assert plt.get_fignums() == [figure.number]
    loss, validation, score = figure.axes
    assert [ax.get_xlabel() for ax in figure.axes] == ["step", "step", "lr"]
    assert loss.get_ylabel() == "training loss, mean of 2 steps, V²"
    assert validation.get_ylabel() == "validation score, V²"
    assert score.get_ylabel() == "best validation score, V²"
    median = of_label(loss, "training, median")
    np.testing.assert_array_equal(median.get_xdata(), run.history.step[1::2])
    kept = of_label(validation, "weights kept")
    np.testing.assert_array_equal(kept.get_ydata(), run.best_score[run.best_step > 0])
    figure.canvas.draw()


def test_scores_are_at_the_hyper_parameters(run):  # noqa: F811
    score = run.plot().axes[2]
    members = of_label(score, "3 members")
    np.testing.assert_allclose(members.get_xdata(), [1e-3, 1e-2, 1e-1], rtol=1e-6)
    np.testing.assert_array_equal(members.get_ydata(), run.best_score[:3])
    best = int(np.argmin(run.best_score[:3]))
    ring = of_label(score, f"lowest: member {best}")
    assert ring.get_xydata().tolist() == [members.get_xydata()[best].tolist()]
    cross = of_label(score, "1 diverged")
    assert cross.get_marker() == "x"
    assert cross.get_xdata().tolist() == [np.float32(1e38)]
    assert cross.get_ydata().tolist() == [0.97]  # of the height, not of the score
    assert score.get_xscale() == "log"


def test_ends_are_marked(run):  # noqa: F811
    ended = jnp.array([Status.OK, Status.STOPPED, Status.OK, Status.DIVERGED], jnp.int8)
    loss = np.array(run.history.loss)
    loss[1, 8:] = np.nan
    history = History(loss, None, run.history.validation, run.history.step, run.history.validation_step)
    known = replace(run, train_state=replace(run.train_state, status=ended), history=history)
    ax = ee.plot.training_curves(known)
    mark = of_label(ax, "1 stopped")
    assert mark.get_marker() == "s"
    assert mark.get_xydata().tolist() == [[history.step[7], loss[1, 7]]]
    assert of_label(ax, "1 diverged").get_marker() == "x"
    assert all("stopped" not in str(line.get_label()) for line in ee.plot.training_curves(history).lines)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_panels_follow_the_hyper_parameters(run, count):  # noqa: F811
    hyper = {f"h{i}": jnp.arange(4.0) + i for i in range(count)}
    figure = replace(run, train_state=replace(run.train_state, hyper=hyper or None)).plot()
    assert [ax.get_xlabel() for ax in figure.axes] == ["step", "step", *hyper]
    # Up to four in a row, whose first has the label of all.
    labelled = [i for i, ax in enumerate(figure.axes[2:]) if ax.get_ylabel() == "best validation score"]
    assert labelled == {0: [], 1: [0], 2: [0], 7: [0, 4]}[count]


def test_each_number_of_a_hyper_parameter_has_a_panel(run):  # noqa: F811
    hyper = {"betas": jnp.arange(8.0).reshape(4, 2)}
    figure = replace(run, train_state=replace(run.train_state, hyper=hyper)).plot()
    *_, first, second = figure.axes
    assert (first.get_xlabel(), second.get_xlabel()) == ("betas[0]", "betas[1]")
    np.testing.assert_array_equal(of_label(second, "3 members").get_xdata(), [1, 3, 5])


def test_the_best_score_may_be_the_highest(run):  # noqa: F811
    score = replace(run, mode="max").plot().axes[2]
    ring = of_label(score, f"highest: member {np.argmax(run.best_score[:3])}")
    assert ring.get_ydata().tolist() == [run.best_score[:3].max()]
    assert of_label(score, "1 diverged").get_ydata().tolist() == [0.03]


def test_rows_of_one_column_are_rows():
    predictions = np.random.default_rng(0).normal(size=(4, 6, 1)).astype(np.float32)
    x, y = np.arange(6.0)[:, None], np.ones((6, 1))
    columns = ee.plot.prediction_bands(predictions, x=x, targets=y)
    flat = ee.plot.prediction_bands(predictions[..., 0], x=x[:, 0], targets=y[:, 0])
    for line, same in zip(columns.lines, flat.lines, strict=True):
        np.testing.assert_array_equal(line.get_xydata(), same.get_xydata())


def test_names_the_extra_without_matplotlib(run, monkeypatch):  # noqa: F811
    import_module = builtins.__import__

    def blocked(module, *arguments, **options):
        if module.split(".")[0] == "matplotlib":
            raise ImportError(module)
        return import_module(module, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", blocked)
        with pytest.raises(ImportError, match=r"`Run.plot` needs matplotlib.\nInstall it"):
            run.plot()
