from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Integer, Real

from .._check import check_counted_rows, check_flag, check_word, first_text, value_error
from ..combine import mixture
from ..scores._engine import Binning, check_bins, mean_gap, of_top_label
from ._axes import Axes, axes_for, check_counts, check_plotted, of_line, of_patch


def check_rates(rates: Mapping[str, Any], *, rising: tuple[str, ...]) -> list[np.ndarray]:
    """Raises unless rates are from 0 to 1, of one shape, and those in `rising` do not decrease. Returns them."""
    found = {argument: check_plotted(argument, values, "(points,)") for argument, values in rates.items()}
    if len({values.shape for values in found.values()}) > 1:
        got = "got " + ", ".join(f"`{argument}` {values.shape}" for argument, values in found.items())
        both = " and ".join(f"`{argument}`" for argument in found)
        raise value_error(f"{both} of one shape", got, "They are the coordinates of one curve.")
    for argument, values in found.items():
        wrong = (values < 0) | (values > 1)
        if argument in rising:
            wrong |= np.diff(values, prepend=values[0]) < 0
        if wrong.any():
            kind = "that rises, from 0 to 1" if argument in rising else "from 0 to 1"
            fix = f"Swapped? `{next(iter(found))}` comes first, and its points begin at the highest threshold."
            raise value_error(f"`{argument}` {kind}", first_text(values, wrong), fix)
    return list(found.values())


def roc_curve(
    false_positive_rate: Real[ArrayLike, " points"],
    true_positive_rate: Real[ArrayLike, " points"],
    *,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """ROC curve: true against false positive rate, with the diagonal of a random ranking.

    **Arguments:**

    - `false_positive_rate`, `true_positive_rate`: rising from 0 to 1, `(points,)`, from
        [`eqx_ensemble.scores.roc_curve`][].

    ```python
    scores = jax.random.normal(key, (200,))
    curve = ee.scores.roc_curve(scores, scores + jnp.sin(jnp.arange(200)) > 0)
    ax = ee.plot.roc_curve(curve.false_positive_rate, curve.true_positive_rate)
    ```

    ??? cite
        [An Introduction to ROC Analysis](https://doi.org/10.1016/j.patrec.2005.10.010)
    """
    rates = {"false_positive_rate": false_positive_rate, "true_positive_rate": true_positive_rate}
    false, hits = check_rates(rates, rising=tuple(rates))

    ax = axes_for(ax)
    if not ax.lines:
        from matplotlib.collections import LineCollection  # not a line, whose style curves would avoid

        ax.add_collection(LineCollection([[(0, 0), (1, 1)]], colors="0.5", linestyles=":", linewidths=0.8))
    ax.plot(false, hits, **of_line(ax, options))
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="false positive rate", ylabel="true positive rate")
    if ax.get_legend_handles_labels()[1]:
        ax.legend(loc="lower right")
    return ax


def precision_recall_curve(
    precision: Real[ArrayLike, " points"], recall: Real[ArrayLike, " points"], *, ax: Axes | None = None, **options: Any
) -> Axes:
    """Precision-recall curve, in steps; the dotted line at the fraction of positive rows is a random ranking.

    The area under the steps is [`eqx_ensemble.scores.aupr`][].

    **Arguments:**

    - `precision`: from 0 to 1, `(points,)`; the last value is that of all rows.
    - `recall`: rising from 0 to 1, `(points,)`. Both are from [`eqx_ensemble.scores.precision_recall_curve`][].

    ```python
    scores = jax.random.normal(key, (200,))
    curve = ee.scores.precision_recall_curve(scores, scores + jnp.sin(jnp.arange(200)) > 1)
    ax = ee.plot.precision_recall_curve(curve.precision, curve.recall)
    ```

    ??? cite
        [The Relationship Between Precision-Recall and ROC Curves](https://doi.org/10.1145/1143844.1143874)
    """
    precisions, recalls = check_rates({"precision": precision, "recall": recall}, rising=("recall",))

    ax = axes_for(ax)
    # Between two points the precision is that of the higher recall, as in the area.
    (line,) = ax.plot(recalls, precisions, **of_line(ax, options, drawstyle="steps-pre"))
    ax.hlines(precisions[-1], 0, 1, color=line.get_color(), linestyle=":", linewidth=0.8)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision")
    if ax.get_legend_handles_labels()[1]:
        ax.legend()
    return ax


def reliability_diagram(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    show_members: bool = False,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Reliability diagram: the accuracy of the mixture of the members against its confidence.

    Rows are binned by their confidence, as in [`eqx_ensemble.scores.ece`][], whose value is in the legend. The height
    of a bar is the accuracy of its rows; the hatched area is the gap to their mean confidence. The number of rows is at
    the foot of each bar, or in the legend for bins of equal mass.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`, or log-probabilities.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `num_bins`, `binning`: as for `ece`.
    - `weights`: weights over members, `(members,)`.
    - `row_weights`: booleans `(*batch,)`, or 0 and 1; rows of `False` or 0 are ignored.
    - `show_members`: whether to also draw each member's curve, as a thin line.

    ```python
    logits = 3 * jax.random.normal(key, (8, 500, 4))
    ax = ee.plot.reliability_diagram(logits, jnp.argmax(logits[0], axis=-1), num_bins=10)
    ```

    ??? cite
        [On Calibration of Modern Neural Networks](https://arxiv.org/abs/1706.04599)
    """
    check_flag(show_members, "show_members")
    counted = check_counted_rows(row_weights, np.shape(labels)).counted
    checked, targets, convex, kept = check_bins(logits, labels, num_bins, binning, weights, counted)
    check_plotted("logits", jnp.exp(mixture(checked, weights=convex)))
    bins = _binned(checked, targets, convex, kept, num_bins, binning)

    ax = axes_for(ax)
    filled = np.flatnonzero(bins.count)
    counts, confidence, right = (np.asarray(x)[filled] for x in (bins.count, bins.probability, bins.frequency))
    # The largest of several probabilities is at least their mean, so a bin of equal mass does not start at zero.
    lowest = min(1 / checked.shape[-1], *np.asarray(bins.edges)) if binning == "mass" else 0
    edges = np.concatenate([[lowest], np.asarray(bins.edges), [1]])
    left, width = edges[:-1][filled], np.diff(edges)[filled]
    bars = {"align": "edge", "facecolor": "0.75", "edgecolor": "black", "linewidth": 0.8}
    rows = f", {counts.min():.0f} to {counts.max():.0f} rows each" if binning == "mass" else ""
    label = f"share that is right{rows} (ECE {float(mean_gap(bins, debiased=False)):.3f})"
    ax.bar(left, right, width, **of_patch(options, label=label, **bars))
    gaps = {"align": "edge", "fill": False, "edgecolor": "0.3", "linewidth": 0.5, "hatch": "///"}
    ax.bar(left, confidence - right, width, bottom=right, label="gap to the mean confidence", **gaps)
    ax.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1, label="calibrated")
    for x, count in zip(left + width / 2, counts, strict=True) if binning == "width" else ():
        rotation = 90 if num_bins > 10 else 0
        ax.text(x, 0.01, f"{count:.0f}", ha="center", va="bottom", fontsize="x-small", rotation=rotation)
    if show_members:
        present = np.arange(len(checked)) if convex is None else np.flatnonzero(np.asarray(convex))
        for i in present.tolist():
            own = _binned(checked[i : i + 1], targets, None, kept, num_bins, binning)
            filled = np.flatnonzero(own.count)
            curve = np.asarray(own.probability)[filled], np.asarray(own.frequency)[filled]
            label = "a member" if i == present[0] else "_nolegend_"
            ax.plot(*curve, color="0.45", linewidth=0.6, label=label)
    # Room for the legend above bars of any height.
    height = 1.24 if not show_members else 1.3
    ax.set(xlim=(0, 1), ylim=(0, height), yticks=np.linspace(0, 1, 6))
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
    - `kind`: `"rank"` or `"pit"`, for the label of the axis.

    ```python
    members = jax.random.normal(key, (9, 1000))
    targets = jax.random.normal(jax.random.key(1), (1000,))
    ax = ee.plot.rank_histogram(ee.scores.rank_histogram(members, targets, key=key))
    ```

    ??? cite
        [Interpretation of Rank Histograms for Verifying Ensemble
        Forecasts](https://doi.org/10.1175/1520-0493(2001)129%3C0550:IORHFV%3E2.0.CO;2)
    """
    check_word(kind, "kind", ("rank", "pit"))
    heights = check_counts(counts)

    ax = axes_for(ax)
    total, ranks = heights.sum(), len(heights)
    expected, deviation = total / ranks, np.sqrt(total * (1 - 1 / ranks) / ranks)
    bars = {"facecolor": "0.75", "edgecolor": "black", "linewidth": 0.8}
    width, label = (1.0, "rank of the target among the members") if kind == "rank" else (1 / ranks, "PIT of the target")
    middle = np.arange(ranks) if kind == "rank" else (np.arange(ranks) + 0.5) / ranks
    ax.bar(middle, heights, **of_patch(options, width=width, **bars))
    ax.set(xlabel=label, ylabel="rows", ylim=(0, 1.25 * max(heights.max(), expected + 2 * deviation)))
    ax.axhline(expected, color="black", linestyle="--", linewidth=1, label="calibrated")
    label = "two standard deviations of one bar"
    ax.axhspan(expected - 2 * deviation, expected + 2 * deviation, color="black", alpha=0.15, linewidth=0, label=label)
    ax.legend(loc="upper center", fontsize="small")
    return ax


_binned = partial(jax.jit, static_argnames=("num_bins", "binning"))(of_top_label)
