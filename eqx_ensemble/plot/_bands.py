from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import ArrayLike, Float, Real

from .._check import check_optional_text
from ..combine import mean
from ..uncertainty import interval
from ._axes import Axes, axes_for, of_line, with_unit
from ._check import check_bands, check_weighted_members


def prediction_bands(
    predictions: Float[ArrayLike, "members batch"],
    *,
    x: Real[ArrayLike, " batch"] | None = None,
    targets: Real[ArrayLike, " batch"] | None = None,
    intervals: Mapping[float, Any] | None = None,
    levels: tuple[float, ...] = (0.5, 0.9),
    weights: Real[ArrayLike, " members"] | None = None,
    unit: str | None = None,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """The members' mean prediction, with bands for central intervals.

    Without `intervals` a band is the [`eqx_ensemble.uncertainty.interval`][] of the members' predictions: it shows the
    disagreement between members, without noise. Pass `intervals` for bands that should cover targets. Targets outside
    the widest band are hollow diamonds.

    **Arguments:**

    - `predictions`: one number per member and row, `(members, batch)`.
    - `x`: the horizontal positions of the rows, `(batch,)`, in any order. If not given, rows are in the order of their
        mean prediction.
    - `targets`: `(batch,)`, drawn as points.
    - `intervals`: bands instead of those of the members: a dict from level to `(lower, upper)`, each `(batch,)`, from
        any function, such as `{0.9: ee.uncertainty.gaussian_interval(mean, variance, level=0.9)}`.
    - `levels`: the levels of the bands if `intervals` are not given.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Members of weight zero are excluded.
    - `unit`: the unit of the prediction, for the axis label.
    - `ax`: the matplotlib Axes to draw on; those of a new figure if not given.
    - `options`: passed to `matplotlib.axes.Axes.plot` for the line of the mean; its colour is that of the bands.

    **Returns:**

    The Axes.

    **Raises:**

    - `ValueError` for shapes that do not fit, numbers that are not finite, levels outside 0 to 1, intervals whose
        lower end is above the upper one, and invalid weights.
    - `TypeError` for intervals that are not a dict.
    - `ImportError` without matplotlib (extra `plot`).

    ```python
    x = jnp.linspace(-1, 1, 50)
    predictions = x[None] + 0.3 * jax.random.normal(key, (8, 1)) * x[None] ** 2
    ax = ee.plot.prediction_bands(predictions, x=x, targets=x)
    ```
    """
    name = "plot.prediction_bands"
    check_optional_text(unit, "unit", name=name)
    members, convex = check_weighted_members(name, predictions, weights)
    positions, points, bands = check_bands(name, members.shape[1:], x, targets, intervals, levels)
    centre = np.asarray(mean(members, weights=convex))
    for level in levels if intervals is None else ():
        lower, upper = interval(members, level=level, weights=convex)
        bands[level] = np.asarray(lower), np.asarray(upper)

    ax = axes_for(name, ax)
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
