from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import ArrayLike, Float, Real

from .._caller import caller
from .._check import check_optional_text, check_sequence, kind_text
from ..combine import mean
from ..uncertainty import interval
from ._axes import (
    Axes,
    axes_for,
    check_bands,
    check_bin_edges,
    check_plotted,
    check_risk_coverage,
    check_weighted_members,
    of_line,
    of_patch,
    with_unit,
)


def uncertainty_histogram(
    in_distribution: Real[ArrayLike, "..."],
    out_of_distribution: Real[ArrayLike, "..."],
    *,
    bins: Any = 20,
    labels: tuple[str, str] = ("in distribution", "out of distribution"),
    unit: str | None = None,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Histograms of uncertainty in distribution, filled, and out of distribution, as an outline, in common bins.

    Each shows percentages of its rows. Values beyond the outer edges count in the outer bins.

    **Arguments:**

    - `in_distribution`, `out_of_distribution`: one uncertainty per row, of any shapes, such as `.epistemic` of
        [`eqx_ensemble.uncertainty.decompose_entropy`][].
    - `bins`: the number of bins from the lowest to the highest of all values, or the edges of the bins.
    - `labels`: the two names in the legend.

    ```python
    known = ee.uncertainty.decompose_entropy(4 * jax.random.normal(key, (8, 300, 5)))
    novel = ee.uncertainty.decompose_entropy(jax.random.normal(key, (8, 200, 5)))
    ax = ee.plot.uncertainty_histogram(known.total, novel.total, unit="nats")
    ```
    """
    check_optional_text(unit, "unit")
    listed = check_sequence(labels, "labels", of="two strings")
    if len(listed) != 2 or not all(isinstance(label, str) for label in listed):
        raise TypeError(f"`{caller()}` needs `labels` to be two strings, got {kind_text(labels)} of {len(listed)}.")
    known = np.ravel(check_plotted("in_distribution", in_distribution))
    novel = np.ravel(check_plotted("out_of_distribution", out_of_distribution))
    edges = np.histogram_bin_edges(np.concatenate([known, novel]), check_bin_edges(bins))

    ax = axes_for(ax)
    filled = {"fill": True, "facecolor": "0.8", "edgecolor": "0.3", "hatch": "///", "linewidth": 0.8}
    outline = {"edgecolor": "black", "linewidth": 2}
    for values, label, style in zip((known, novel), labels, (filled, outline), strict=True):
        counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
        ax.stairs(100 * counts / len(values), edges, **of_patch(options, label=label, **style))
    ax.set(xlabel=with_unit("uncertainty", unit), ylabel="rows, %")
    ax.legend()
    return ax


def risk_coverage(
    coverage: Real[ArrayLike, " rows"],
    risk: Real[ArrayLike, " rows"],
    *,
    unit: str | None = None,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Risk-coverage curve: the mean loss of the predicted rows against their fraction, least certain rows rejected.

    The dotted line is the risk of predicting all rows, or of rejecting at random; a good uncertainty is well below it.

    **Arguments:**

    - `coverage`: fractions of the rows that are predicted, increasing, `(rows,)`.
    - `risk`: their mean loss, `(rows,)`. Both are from [`eqx_ensemble.scores.risk_coverage`][].

    ```python
    uncertainty, wrong = jnp.array([0.1, 0.7, 0.3, 0.9]), jnp.array([0.0, 0.0, 0.0, 1.0])
    curve = ee.scores.risk_coverage(uncertainty, wrong)
    ax = ee.plot.risk_coverage(*curve, label="entropy")
    ```

    ??? cite
        [Selective Classification for Deep Neural Networks](https://arxiv.org/abs/1705.08500)
    """
    check_optional_text(unit, "unit")
    coverages, risks = check_risk_coverage(coverage, risk)

    ax = axes_for(ax)
    (line,) = ax.plot(coverages, risks, **of_line(ax, options))
    ax.hlines(risks[-1], 0, 1, color=line.get_color(), linestyle=":", linewidth=0.8)
    ax.set(xlim=(0, 1), xlabel="coverage, share of rows that are predicted", ylabel=with_unit("risk, mean loss", unit))
    if ax.get_legend_handles_labels()[1]:
        ax.legend()
    return ax


def prediction_bands(
    predictions: Float[ArrayLike, "members batch ..."],
    *,
    x: Real[ArrayLike, "batch ..."] | None = None,
    targets: Real[ArrayLike, "batch ..."] | None = None,
    intervals: Mapping[float, Any] | None = None,
    levels: tuple[float, ...] = (0.5, 0.9),
    weights: Real[ArrayLike, " members"] | None = None,
    unit: str | None = None,
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
    check_optional_text(unit, "unit")
    members, convex = check_weighted_members(predictions, weights)
    positions, points, bands = check_bands(members.shape[1:], x, targets, intervals, levels)
    centre = np.asarray(mean(members, weights=convex))
    for level in levels if intervals is None else ():
        lower, upper = interval(members, level=level, weights=convex)
        bands[level] = np.asarray(lower), np.asarray(upper)

    ax = axes_for(ax)
    order = np.argsort(centre if positions is None else positions, kind="stable")
    at = np.arange(len(order)) if positions is None else positions[order]
    (line,) = ax.plot(at, centre[order], **of_line(ax, options, label="mean of the members", zorder=2.5))
    widest_first = sorted(bands, reverse=True)
    for level, alpha in zip(widest_first, np.linspace(0.2, 0.45, max(len(bands), 2)), strict=False):
        lower, upper = bands[level]
        face, label = (line.get_color(), float(alpha)), f"central {100 * level:g} %"
        ax.fill_between(at, lower[order], upper[order], facecolor=face, linewidth=0, label=label)
    if points is not None:
        lower, upper = bands[widest_first[0]] if bands else (-np.inf, np.inf)
        inside = ((lower <= points) & (points <= upper))[order]
        ax.plot(at[inside], points[order][inside], "o", color="black", markersize=3, label="target", zorder=3)
        if not inside.all():
            hollow: dict[str, Any] = {"markersize": 5, "markerfacecolor": "none", "zorder": 3}
            ax.plot(at[~inside], points[order][~inside], "D", color="black", label="target outside", **hollow)
    label = "rows, in the order of their mean prediction" if positions is None else "x"
    ax.set(xlabel=label, ylabel=with_unit("prediction", unit))
    ax.legend()
    return ax
