"""Plots that are legible in greyscale: each draws on the given Axes, and returns them."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Integer, Real

from ._caller import caller
from ._check import check_package, value_error
from .combine import mean
from .scores._engine import Binning, mean_gap, reliability
from .uncertainty import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:
    Axes = Figure = Any  # matplotlib is optional: it is imported on drawing

__all__ = ["prediction_bands", "rank_histogram", "reliability_diagram", "training_curves"]

_ENDS = {"stopped": "s", "diverged": "x"}
_LABELS = {"loss": "training loss", "validation": "validation score"}
_OUTLINED = {"facecolor": "0.75", "edgecolor": "black", "linewidth": 0.8}
_HOLLOW: dict[str, Any] = {"linestyle": "None", "markerfacecolor": "none", "zorder": 3}


def prediction_bands(
    predictions: Float[ArrayLike, "members batch ..."],
    *,
    x: Real[ArrayLike, "batch ..."] | None = None,
    targets: Real[ArrayLike, "batch ..."] | None = None,
    intervals: Mapping[float, Any] | None = None,
    levels: tuple[float, ...] = (0.5, 0.9),
    weights: Real[ArrayLike, " members"] | None = None,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """The members' mean prediction, with bands for central intervals.

    Without `intervals`, a band is the [`eqx_ensemble.uncertainty.interval`][] of the members' predictions: it shows the
    disagreement between members, without noise. Targets outside the widest band are hollow diamonds.

    **Arguments:**

    - `predictions`: one number per member and row, `(members, batch)` or `(members, batch, 1)`.
    - `x`: the horizontal positions of the rows, `(batch,)` or `(batch, 1)`, in any order; by default rows are in the
        order of their mean prediction.
    - `targets`: `(batch,)` or `(batch, 1)`, drawn as points.
    - `intervals`: bands that should cover targets: a dict from level to `(lower, upper)`, each `(batch,)`, such as
        `{0.9: ee.uncertainty.gaussian_interval(mean, variance, level=0.9)}`.
    - `levels`: the levels of the bands if `intervals` are not given.
    - `weights`: weights over members, `(members,)`.

    ```python
    x = jnp.linspace(-1, 1, 50)
    predictions = x[None] + 0.3 * jax.random.normal(key, (8, 1)) * x[None] ** 2
    ax = ee.plot.prediction_bands(predictions, x=x, targets=x)
    ```
    """
    members = _without_column(predictions, 2)
    centre = np.asarray(mean(members, weights=weights))
    if centre.ndim != 1:
        fix = "One member? Add a leading axis: `predictions[None]`."
        raise value_error("`predictions` of shape (members, batch)", f"got shape {np.shape(predictions)}", fix)
    bands = intervals or {level: interval(members, level=level, weights=weights) for level in levels}
    bands = {level: [_without_column(end, 1) for end in bands[level]] for level in sorted(bands, reverse=True)}

    ax = _axes(ax)
    order = np.argsort(centre if x is None else _without_column(x, 1), kind="stable")
    at = np.arange(len(order)) if x is None else _without_column(x, 1)[order]
    line = _line(ax, at, centre[order], {"label": "mean of the members", "zorder": 2.5} | options)
    for (level, (lower, upper)), alpha in zip(bands.items(), np.linspace(0.2, 0.45, max(len(bands), 2)), strict=False):
        face, label = (line.get_color(), float(alpha)), f"central {100 * level:g} %"
        ax.fill_between(at, lower[order], upper[order], facecolor=face, linewidth=0, label=label)
    if targets is not None:
        points = _without_column(targets, 1)[order]
        lower, upper = next(iter(bands.values()), (np.full(len(order), -np.inf), np.full(len(order), np.inf)))
        inside = (lower[order] <= points) & (points <= upper[order])
        ax.plot(at[inside], points[inside], "o", color="black", markersize=3, label="target", zorder=3)
        if not inside.all():
            ax.plot(at[~inside], points[~inside], marker="D", color="black", label="target outside", **_HOLLOW)
    ax.set(xlabel="rows, in the order of their mean prediction" if x is None else "x", ylabel="prediction")
    ax.legend()
    return ax


def reliability_diagram(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: Bool[ArrayLike, "*batch"] | None = None,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Reliability diagram: the accuracy of the mixture of the members against its confidence.

    Rows are binned by their confidence, as in [`eqx_ensemble.scores.ece`][], whose value is in the legend. The height
    of a bar is the accuracy of its rows; the hatched area is the gap to their mean confidence. The number of rows is at
    the foot of each bar, or in the legend for bins of equal mass.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`, or log-probabilities; of one member, `logits[i][None]`.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `num_bins`, `binning`: as for `ece`.
    - `weights`: weights over members, `(members,)`.
    - `row_weights`: booleans `(*batch,)`; rows of `False` are ignored.

    ```python
    logits = 3 * jax.random.normal(key, (8, 500, 4))
    ax = ee.plot.reliability_diagram(logits, jnp.argmax(logits[0], axis=-1), num_bins=10)
    ```

    ??? cite
        [On Calibration of Modern Neural Networks](https://arxiv.org/abs/1706.04599)
    """
    of_rows = {"weights": weights, "row_weights": row_weights}
    bins = reliability(logits, labels, num_bins=num_bins, binning=binning, **of_rows)
    filled, inner = np.flatnonzero(bins.count), np.asarray(bins.edges)
    counts, confidence, right = (np.asarray(x)[filled] for x in (bins.count, bins.probability, bins.frequency))
    # The largest of several probabilities is at least their mean, so a bin of equal mass does not start at zero.
    lowest = min(1 / jnp.shape(logits)[-1], *inner) if binning == "mass" else 0
    edges = np.concatenate([[lowest], inner, [1]])
    left, width = edges[:-1][filled], np.diff(edges)[filled]
    rows = f", {counts.min():.0f} to {counts.max():.0f} rows each" if binning == "mass" else ""

    ax = _axes(ax)
    label = f"share that is right{rows} (ECE {float(mean_gap(bins, debiased=False)):.3f})"
    style: Any = {"label": label} | _bar(options)
    ax.bar(left, right, width, align="edge", **style)
    gaps = {"align": "edge", "fill": False, "edgecolor": "0.3", "linewidth": 0.5, "hatch": "///"}
    ax.bar(left, confidence - right, width, bottom=right, label="gap to the mean confidence", **gaps)
    ax.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1, label="calibrated")
    for middle, count in zip(left + width / 2, counts, strict=True) if binning == "width" else ():
        text: dict[str, Any] = {"ha": "center", "va": "bottom", "rotation": 90 if num_bins > 10 else 0}
        ax.text(middle, 0.01, f"{count:.0f}", fontsize="x-small", **text)
    # Room for the legend above bars of any height.
    ax.set(xlim=(0, 1), ylim=(0, 1.24), yticks=np.linspace(0, 1, 6))
    ax.set(xlabel="confidence", ylabel="share of rows that is right")
    ax.legend(loc="upper left", fontsize="small")
    return ax


def rank_histogram(
    counts: Real[ArrayLike, " ranks"], *, kind: Literal["rank", "pit"] = "rank", ax: Axes | None = None, **options: Any
) -> Axes:
    r"""Rank histogram of the target among the members' predictions: flat if these are calibrated.

    A U shape means that the ensemble is underdispersed, a hump that it is overdispersed, a slope that it is biased.
    With $n$ rows and $k$ ranks, the line is at $n / k$, the count expected of a calibrated ensemble; the band around it
    is plus or minus two standard deviations of one bar, $\sqrt{n (1 - 1/k) / k}$, for independent rows.

    **Arguments:**

    - `counts`: `(members + 1,)`, from [`eqx_ensemble.scores.rank_histogram`][]; or, with `kind="pit"`, those of
        [`eqx_ensemble.scores.pit_histogram`][].
    - `kind`: `"rank"` or `"pit"`, for the horizontal axis.

    ```python
    members = jax.random.normal(key, (9, 1000))
    targets = jax.random.normal(jax.random.key(1), (1000,))
    ax = ee.plot.rank_histogram(ee.scores.rank_histogram(members, targets, key=key))
    ```

    ??? cite
        [Interpretation of Rank Histograms for Verifying Ensemble
        Forecasts](https://doi.org/10.1175/1520-0493(2001)129%3C0550:IORHFV%3E2.0.CO;2)
    """
    heights = np.asarray(counts)
    total, ranks = heights.sum(), len(heights)
    expected, spread = total / ranks, 2 * math.sqrt(total * (1 - 1 / ranks) / ranks)
    middle, width, label = np.arange(ranks), 1.0, "rank of the target among the members"
    if kind == "pit":
        middle, width, label = (middle + 0.5) / ranks, 1 / ranks, "PIT of the target"

    ax = _axes(ax)
    ax.bar(middle, heights, width, **_bar(options))
    ax.set(xlabel=label, ylabel="rows", ylim=(0, 1.25 * max(heights.max(), expected + spread)))
    ax.axhline(expected, color="black", linestyle="--", linewidth=1, label="calibrated")
    band: dict[str, Any] = {"color": "black", "alpha": 0.15, "linewidth": 0}
    ax.axhspan(expected - spread, expected + spread, label="two standard deviations of one bar", **band)
    ax.legend(loc="upper center", fontsize="small")
    return ax


def training_curves(
    run: Any,
    *,
    curve: Literal["loss", "validation"] = "loss",
    stride: int = 1,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Learning curves: one thin line for each member, their median, and a band for the central half of them.

    A member's line ends where it stopped (a square) or diverged (a cross); median and band then use its last value.
    Other values that are not finite are ignored. Validation curves have a dot at the step whose weights were kept.

    **Arguments:**

    - `run`: the [`eqx_ensemble.Run`][].
    - `curve`: `"loss"`, the training loss of every recorded step, or `"validation"`, the scores on validation data.
    - `stride`: the number of consecutive points to average.

    ```python
    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    run = ee.fit(ensemble, loss, optax.adam(1e-3), jnp.ones((100, 3)), epochs=5, key=key)
    ax = ee.plot.training_curves(run)
    ```
    """
    values, table = getattr(run.history, curve), run.table()
    if values is None or not np.isfinite(values).any():
        fix = "Was it trained without `validation=`, or did all members diverge?"
        raise value_error(f"a finite number in `history.{curve}`", "got none", fix)
    steps = np.asarray(run.history.step if curve == "loss" else run.history.validation_step)
    steps, curves = _means(steps, np.asarray(values, np.float64), stride)
    last = curves.shape[1] - 1 - np.argmax(np.isfinite(curves)[:, ::-1], axis=1)[:, None]
    carried = np.where(np.arange(curves.shape[1]) > last, np.take_along_axis(curves, last, axis=1), curves)
    lower, middle, upper = np.nanquantile(carried, [0.25, 0.5, 0.75], axis=0, method="averaged_inverted_cdf")

    ax = _axes(ax)
    name = _LABELS[curve].split()[0]
    num_ended = int(np.isfinite(carried[:, -1]).sum() - np.isfinite(curves[:, -1]).sum())
    ended = f"\n({num_ended} ended: their last value)" if num_ended else ""
    line = _line(
        ax, steps, middle, {"label": f"{name}, median of {len(curves)} members{ended}", "zorder": 2.5} | options
    )
    like: dict[str, Any] = {"color": line.get_color(), "linestyle": line.get_linestyle()}
    ax.plot(steps, curves.T, linewidth=0.6, alpha=0.5, **like)
    edges: dict[str, Any] = {"edgecolor": like["color"], "linestyle": like["linestyle"], "linewidth": 0.8}
    ax.fill_between(steps, lower, upper, facecolor=(like["color"], 0.15), label=f"{name}, central 50 %", **edges)
    for word, marker in _ENDS.items():
        (ends,) = np.nonzero((np.asarray(table["status"]) == word) & np.isfinite(curves).any(axis=1))
        if len(ends):
            at = last[ends, 0]
            ax.plot(
                steps[at], curves[ends, at], marker=marker, color=like["color"], label=f"{len(ends)} {word}", **_HOLLOW
            )
    if curve == "validation":
        kept = np.isin(table["best_step"], run.history.validation_step)
        best, scores = table["best_step"][kept], table["validation"][kept]
        ax.plot(best, scores, "o", color=like["color"], markersize=4, label="weights kept")
    ax.set(xlabel="step", ylabel=_LABELS[curve] + (f", mean of {stride} steps" if stride > 1 else ""))
    ax.legend(fontsize="small")
    return ax


def figure_of_run(run: Any, *, stride: int | None) -> Figure:
    """A figure of the training and validation curves, and of the scores against each hyperparameter: `Run.plot`."""
    check_package("matplotlib", what=caller(), extra="plot")
    from matplotlib import pyplot

    history, table, mode = run.history, run.table(), run.mode
    shown: list[Any] = ["loss"]
    if history.validation is not None and np.isfinite(history.validation).any():
        shown += ["validation"]
    columns = {name: np.asarray(values) for name, values in table.items() if name not in _COLUMNS}
    count = len(shown) + len(columns)
    shape = -(-count // 4), min(count, 4)
    size = max(4.2 * shape[1], 6.4), 3.6 * shape[0]
    figure, grid = pyplot.subplots(*shape, figsize=size, layout="constrained", squeeze=False)
    for ax in grid.flat[count:]:
        ax.remove()
    for curve, ax in zip(shown, grid.flat, strict=False):
        averaged = stride or max(1, len(history.step) // 100)
        training_curves(run, curve=curve, stride=averaged if curve == "loss" else 1, ax=ax)
        ax.set_yscale(_scale(getattr(history, curve), "min" if curve == "loss" else mode))
        place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.45, 1), "ncols": 2, "columnspacing": 1}
        ax.legend(fontsize="small", frameon=False, **place)  # above the plot, where it hides no curve
    for (column, values), ax in zip(columns.items(), grid.flat[len(shown) :], strict=False):
        _draw_scores(ax, values, table, shown[-1], mode)
        ax.set(xlabel=column, ylabel="best validation score" if len(shown) > 1 else "training loss at the end")
    return figure


# Of a run's table, in addition to those of its hyperparameters.
_COLUMNS = ("member", "loss", "validation", "best_step", "status", "stopped_at")


def _draw_scores(ax: Axes, values: np.ndarray, table: Any, score: str, mode: Literal["min", "max"]) -> None:
    """A dot for each member; the best one has a ring, and diverged ones are crosses at the edge of bad scores."""
    values, scores = values.astype(np.float64), np.asarray(table[score], np.float64)
    diverged = np.asarray(table["status"]) == "diverged"
    known = np.isfinite(scores) & ~diverged
    ax.plot(values[known], scores[known], "o", color="C0", markersize=4, label=f"{known.sum()} members")
    if known.any():
        best = int(np.argmin(np.where(known, scores if mode == "min" else -scores, np.inf)))
        label = f"{'lowest' if mode == 'min' else 'highest'}: member {table['member'][best]}"
        ax.plot(values[best], scores[best], marker="o", color="black", markersize=9, label=label, **_HOLLOW)
    if diverged.any():
        edge, across = np.full(diverged.sum(), 0.97 if mode == "min" else 0.03), ax.get_xaxis_transform()
        ax.plot(values[diverged], edge, "x", color="black", transform=across, label=f"{diverged.sum()} diverged")
    finite = values[np.isfinite(values)]
    log = finite.min() > 0 and finite.max() >= 100 * finite.min()
    ax.set(xscale="log" if log else "linear", yscale=_scale(scores[known], mode))
    ax.legend(fontsize="small")


def _scale(values: Any, mode: str) -> str:
    """The scale of losses and scores: logarithmic if lower is better, and positive values differ by a factor of 10."""
    finite = np.asarray(values)[np.isfinite(values)]
    return "log" if mode == "min" and finite.size and 0 < 10 * finite.min() <= finite.max() else "linear"


def _means(steps: np.ndarray, curves: np.ndarray, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Means of the finite values in `stride` consecutive steps of `(members, steps)`, at the last of these steps."""
    starts = np.arange(0, len(steps), stride)
    finite = np.isfinite(curves)
    total = np.add.reduceat(np.where(finite, curves, 0), starts, axis=1)
    count = np.add.reduceat(finite, starts, axis=1, dtype=int)
    means = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    some = (count > 0).any(axis=0)
    return steps[np.minimum(starts + stride, len(steps)) - 1][some], means[:, some]


def _axes(ax: Axes | None) -> Axes:
    """The Axes to draw on; those of a new figure if none are given."""
    check_package("matplotlib", what=caller(), extra="plot")
    if ax is not None:
        return ax
    from matplotlib import pyplot

    return pyplot.subplots()[1]


def _line(ax: Axes, x: np.ndarray, y: np.ndarray, options: dict[str, Any]) -> Any:
    """A line in a style that none on these Axes has yet: further ones differ without colour."""
    used = {line.get_linestyle() for line in ax.lines}
    style: Any = next((style for style in ("-", "--", "-.", ":") if style not in used), "-")
    return ax.plot(x, y, **(options if "ls" in options else {"linestyle": style} | options))[0]


def _bar(options: dict[str, Any]) -> dict[str, Any]:
    """Options of bars; a `color` is that of their faces and edges."""
    return options if "color" in options else _OUTLINED | options


def _without_column(values: Any, ndim: int) -> np.ndarray:
    """Values of rows, without a last axis of length one."""
    values = np.asarray(values)
    return np.squeeze(values, -1) if values.ndim == ndim + 1 else values
