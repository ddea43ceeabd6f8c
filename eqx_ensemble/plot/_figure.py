from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from .._check import check_optional_text
from ..sweep._engine import TABLE_COLUMNS
from ._axes import Axes, check_plotted, explain_missing, with_unit
from ._training import AnyRun, check_curves, training_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any  # matplotlib is optional: it is imported on drawing


@runtime_checkable
class RankedRun(AnyRun, Protocol):
    """A run whose members are ranked by scores of one mode: a `Run`."""

    @property
    def mode(self) -> Literal["min", "max"]: ...


_MOST_POINTS = 100
_MOST_IN_ROW = 4
_WIDE = 100
_BEST = {"min": "lowest", "max": "highest"}
_LABELS = {"validation": "best validation score", "loss": "training loss at the end"}


def figure_of_run(run: RankedRun, *, stride: int | None, unit: str | None) -> Figure:
    """A figure of the training and validation curves, and of the scores against each hyper-parameter."""
    check_optional_text(unit, "unit")
    check_curves(run, "loss")
    history, table, mode = run.history, run.table(), run.mode
    scored = history.validation is not None and bool(np.isfinite(history.validation).any())
    score = "validation" if scored else "loss"
    columns = _hyper_parameters(table)
    stride = max(1, len(history.step) // _MOST_POINTS) if stride is None else stride

    figure, curves, rows = _new_panels(1 + scored, len(columns))
    training_curves(run, stride=stride, unit=unit, ax=curves[0])
    label = "training loss" if stride == 1 else f"training loss, mean of {stride} steps"
    curves[0].set(ylabel=with_unit(label, unit), yscale=_scale(history.loss))
    if scored:
        training_curves(run, curve="validation", ax=curves[1])
        curves[1].set(ylabel=with_unit("validation score", unit), yscale=_scale(history.validation, mode))
    for ax in curves:  # above the plot, where the legend hides no curve
        place = {"loc": "lower center", "bbox_to_anchor": (0.45, 1), "ncols": 2, "columnspacing": 1}
        ax.legend(fontsize="small", frameon=False, **place)
    for (column, values), ax in zip(columns.items(), sum(rows, []), strict=True):
        _draw_scores(ax, check_plotted(column, values, finite=False), table, score, mode)
        ax.set_xlabel(column)
    for first, *_ in rows if columns else ():
        first.set_ylabel(with_unit(_LABELS[score], unit))
    return figure


def _hyper_parameters(table: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns of hyper-parameters; one with several numbers per member becomes several columns."""
    columns = {name: np.asarray(table[name]) for name in table if name not in TABLE_COLUMNS}
    return {
        name + "".join(f"[{i}]" for i in index): values[:, *index]
        for name, values in columns.items()
        for index in np.ndindex(values.shape[1:])
    }


def _new_panels(num_curves: int, num_scores: int) -> tuple[Figure, list[Axes], list[list[Axes]]]:
    """A new figure, and Axes for its curves and for each row of its scores; few panels are all in one row."""
    with explain_missing():
        from matplotlib import pyplot

    flat = num_curves + num_scores < _MOST_IN_ROW
    split = np.array_split(range(num_scores), -(-num_scores // _MOST_IN_ROW) or 1)
    shapes = [num_curves + num_scores] if flat else [num_curves, *map(len, split)]
    size = 4.2 * max(max(shapes), 2) if max(shapes) > 1 else 6.4, 3.6 * len(shapes)
    figure = pyplot.figure(figsize=size, layout="constrained")
    parts = np.atleast_1d(np.asarray(figure.subfigures(len(shapes), 1), dtype=object))
    top, *rows = (list(part.subplots(1, count, squeeze=False)[0]) for part, count in zip(parts, shapes, strict=True))
    return figure, top[:num_curves], [top[num_curves:]] if flat else rows


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
        label = f"{_BEST[mode]}: member {table['member'][best]}"
        ax.plot(values[best], scores[best], "o", color="black", markersize=9, markerfacecolor="none", label=label)
    if diverged.any():
        edge, across = 0.97 if mode == "min" else 0.03, ax.get_xaxis_transform()
        label = f"{diverged.sum()} diverged"
        ax.plot(values[diverged], np.full(diverged.sum(), edge), "x", color="black", transform=across, label=label)
    finite = values[np.isfinite(values)]
    log = finite.min() > 0 and finite.max() >= _WIDE * finite.min()
    ax.set(xscale="log" if log else "linear", yscale=_scale(scores[shown], mode))
    ax.legend(fontsize="small")


def _scale(values: Any, mode: str = "min") -> str:
    """The scale of losses and scores: logarithmic if lower is better, and positive values differ by a factor of 10."""
    finite = np.asarray(values)[np.isfinite(values)]
    return "log" if mode == "min" and finite.size and 0 < 10 * finite.min() <= finite.max() else "linear"
