from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Integer, Real

from .._check import check_counted_rows, check_flag, check_word
from ..combine import mixture
from ..scores._engine import Binning, mean_gap, reliability
from ._axes import Axes, axes_for, check_counts, check_plotted, of_patch


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
    options_of = {"num_bins": num_bins, "binning": binning, "row_weights": counted}
    bins = reliability(logits, labels, weights=weights, **options_of)
    checked = jnp.asarray(logits)
    check_plotted("logits", jnp.exp(mixture(checked, weights=weights)))

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
        present = np.arange(len(checked)) if weights is None else np.flatnonzero(np.asarray(weights))
        for i in present.tolist():
            own = reliability(checked[i : i + 1], labels, **options_of)
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
