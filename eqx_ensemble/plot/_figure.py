from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .._check import check_optional_text
from ._axes import Axes, check_plotted, new_panels, with_unit
from ._coordinates import BEST, RankedRun, default_columns, flat_columns, is_log, parallel_coordinates
from ._training import check_curves, training_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any  # matplotlib is optional: it is imported on drawing

_MOST_POINTS = 100
_MOST_PANELS = 4  # of hyper-parameters; more are drawn as parallel coordinates
_LABELS = {"validation": "best validation score", "loss": "training loss at the end"}


def figure_of_run(run: RankedRun, *, stride: int | None, unit: str | None) -> Figure:
    """A figure of the training and validation curves, and of the scores against each hyper-parameter."""
    check_optional_text(unit, "unit")
    check_curves(run, "loss")
    history, table, mode = run.history, run.table(), run.mode
    scored = history.validation is not None and bool(np.isfinite(history.validation).any())
    score = "validation" if scored else "loss"
    columns = flat_columns(table, default_columns(table, score)[:-1])
    together = len(columns) > _MOST_PANELS
    stride = max(1, len(history.step) // _MOST_POINTS) if stride is None else stride

    figure, (curves, scores) = new_panels(1 + scored, 1 if together else len(columns))
    training_curves(run, stride=stride, unit=unit, ax=curves[0])
    label = "training loss" if stride == 1 else f"training loss, mean of {stride} steps"
    curves[0].set(ylabel=with_unit(label, unit), yscale=_scale(history.loss))
    if scored:
        training_curves(run, curve="validation", ax=curves[1])
        curves[1].set(ylabel=with_unit("validation score", unit), yscale=_scale(history.validation, mode))
    for ax in curves:  # above the plot, where the legend hides no curve
        place = {"loc": "lower center", "bbox_to_anchor": (0.45, 1), "ncols": 2, "columnspacing": 1}
        ax.legend(fontsize="small", frameon=False, **place)
    if together:
        parallel_coordinates(table, score=score, mode=mode, ax=scores[0])
    for (column, values), ax in zip(() if together else columns.items(), scores, strict=not together):
        _draw_scores(ax, check_plotted(column, values, finite=False), table, score, mode)
        ax.set(xlabel=column, ylabel=with_unit(_LABELS[score], unit) if ax is scores[0] else "")
    return figure


def _draw_scores(
    ax: Axes, values: np.ndarray, table: Mapping[str, np.ndarray], score: str, mode: Literal["min", "max"]
) -> None:
    """A dot for each member; the best one has a ring, and diverged ones are crosses at the edge of bad scores."""
    scores, diverged = np.asarray(table[score], np.float64), table["status"] == "diverged"
    shown = np.isfinite(scores) & ~diverged
    ax.plot(values[shown], scores[shown], "o", color="C0", markersize=4, label=f"{shown.sum()} members")
    if shown.any():
        costs = np.where(shown, scores if mode == "min" else -scores, np.inf)
        best = int(np.argmin(costs))
        label = f"{BEST[mode]}: member {table['member'][best]}"
        ax.plot(values[best], scores[best], "o", color="black", markersize=9, markerfacecolor="none", label=label)
    if diverged.any():
        edge, across = 0.97 if mode == "min" else 0.03, ax.get_xaxis_transform()
        label = f"{diverged.sum()} diverged"
        ax.plot(values[diverged], np.full(diverged.sum(), edge), "x", color="black", transform=across, label=label)
    ax.set(xscale="log" if is_log("", values) else "linear", yscale=_scale(scores[shown], mode))
    ax.legend(fontsize="small")


def _scale(values: Any, mode: str = "min") -> str:
    """The scale of losses and scores: logarithmic if lower is better, and positive values differ by a factor of 10."""
    finite = np.asarray(values)[np.isfinite(values)]
    return "log" if mode == "min" and finite.size and 0 < 10 * finite.min() <= finite.max() else "linear"
