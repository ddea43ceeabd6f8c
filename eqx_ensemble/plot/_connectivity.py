from typing import Any

import numpy as np
from jaxtyping import ArrayLike, Real

from .._check import check_optional_text
from ._axes import Axes, axes_for, of_line, with_unit
from ._check import check_lines


def connectivity(
    losses: Real[ArrayLike, "... points"],
    *,
    label: str | None = None,
    unit: str | None = None,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Losses on the straight lines between members' weights, one thin line for each member, and their median.

    The legend has the median height of the barriers, the largest loss above the line between the two ends, as
    [`eqx_ensemble.methods.alignment.barrier`][] defines it. Call it twice, before and after alignment, to draw both on
    the same Axes: the second call uses another line style.

    **Arguments:**

    - `losses`: `(members, points)` at equally spaced points, from
        [`eqx_ensemble.methods.alignment.connectivity`][] without the row of the reference, which is the same
        everywhere: `losses[1:]`. Or `(points,)` of one line.
    - `label`: the label of these lines, such as `"before alignment"`.
    - `unit`: the unit of the loss, such as `"nats"`, for the axis label.
    - `ax`: the matplotlib Axes to draw on; those of a new figure if not given.
    - `options`: passed to `matplotlib.axes.Axes.plot` for the line of the median; its colour is used for all lines.

    **Returns:**

    The Axes.

    **Raises:**

    - `TypeError` for losses that are not real numbers.
    - `ValueError` for fewer than three points, and for losses that are not finite.
    - `ImportError` without matplotlib (extra `plot`).

    ```python
    points = jnp.linspace(0, 1, 11)
    before = jnp.stack([2 * points * (1 - points), 3 * points * (1 - points)])
    ax = ee.plot.connectivity(before, label="before alignment")
    ax = ee.plot.connectivity(before / 10, label="after alignment", ax=ax)
    ```
    """
    name = "plot.connectivity"
    check_optional_text(label, "label", name=name)
    check_optional_text(unit, "unit", name=name)
    curves = check_lines(name, losses)
    points = np.linspace(0, 1, curves.shape[1])
    base = curves[:, :1] + points * (curves[:, -1:] - curves[:, :1])
    height = float(np.median(np.max(curves - base, axis=1)))

    ax = axes_for(name, ax)
    text = f"barrier {height:.3g}" if len(curves) == 1 else f"median barrier {height:.3g} of {len(curves)} members"
    text = text if label is None else f"{label}: {text}"
    (median,) = ax.plot(points, np.median(curves, axis=0), **of_line(ax, options, label=text, zorder=2.5))
    if len(curves) > 1:
        style = {"color": median.get_color(), "linestyle": median.get_linestyle()}
        ax.plot(points, curves.T, linewidth=0.6, alpha=0.5, **style)
    ax.set(xlabel="position between the two members", ylabel=with_unit("loss", unit))
    _make_room(ax, ax.legend(loc="upper center"))
    return ax


def _make_room(ax: Axes, legend: Any) -> None:
    """Extends a linear axis upwards, such that a legend at the top covers no line."""
    if ax.get_yscale() != "linear":
        legend.set_loc("best")
        return
    heights = np.concatenate([np.asarray(line.get_ydata(), float) for line in ax.lines])
    low, high = float(np.nanmin(heights)), float(np.nanmax(heights))
    taken = min(legend.get_window_extent().height / ax.bbox.height + 0.04, 0.6)
    ax.update_datalim([(0.5, low + (high - low) / (1 - taken))])
    ax.autoscale_view()
