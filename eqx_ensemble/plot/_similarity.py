from typing import Any

import numpy as np
from jaxtyping import ArrayLike, Real

from .._check import check_flag, check_optional_text, check_text
from ._axes import Axes, axes_for, check_lines, check_pairs, of_line, with_unit


def connectivity(
    losses: Real[ArrayLike, "... points"],
    *,
    label: str | None = None,
    unit: str | None = None,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Losses on the straight lines between members' weights, one thin line for each member, and their median.

    The legend has the median height of the [barriers][eqx_ensemble.methods.alignment.barrier].

    **Arguments:**

    - `losses`: `(members, points)` at equally spaced points, from
        [`eqx_ensemble.methods.alignment.connectivity`][] without the row of the reference, `losses[1:]`; or
        `(points,)`.
    - `label`: the label of these lines, such as `"before alignment"`.

    ```python
    points = jnp.linspace(0, 1, 11)
    before = jnp.stack([2 * points * (1 - points), 3 * points * (1 - points)])
    ax = ee.plot.connectivity(before, label="before alignment")
    ```
    """
    check_optional_text(label, "label")
    check_optional_text(unit, "unit")
    curves = check_lines(losses)
    points = np.linspace(0, 1, curves.shape[1])
    base = curves[:, :1] + points * (curves[:, -1:] - curves[:, :1])
    height = float(np.median(np.max(curves - base, axis=1)))

    ax = axes_for(ax)
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


_MOST_TO_WRITE_OUT = 12
_MOST_CHARACTERS = 60  # in one row of squares


def member_similarity(
    matrix: Real[ArrayLike, "members members"],
    *,
    ids: Any = None,
    label: str = "disagreement",
    colorbar: bool = True,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Similarity of members: a matrix with one square for each pair, darker for higher numbers.

    The shades range from the lowest to the highest number of two different members. Numbers are written into the
    squares for up to twelve members, if they fit.

    **Arguments:**

    - `matrix`: one number for each pair `(members, members)`, such as
        [`eqx_ensemble.uncertainty.pairwise_disagreement`][] or [`eqx_ensemble.uncertainty.error_correlation`][]. Pairs
        with NaN are blank.
    - `ids`: the members' names `(members,)`, such as `ensemble.ids`; their positions if not given.
    - `label`: the label of the numbers, with their unit.
    - `colorbar`: whether to draw a colour bar, which takes space from `ax`.

    ```python
    errors = jax.random.normal(key, (5, 100))
    matrix = ee.uncertainty.error_correlation(errors)
    ax = ee.plot.member_similarity(matrix, label="correlation of errors", vmin=0, vmax=1)
    ```
    """
    check_text(label, "label")
    check_flag(colorbar, "colorbar")
    square, names = check_pairs(matrix, ids)

    ax = axes_for(ax)
    # The diagonal would dominate the scale of the shades.
    of_pairs = ~np.eye(len(square), dtype=bool) & np.isfinite(square)
    written = _texts(square, float(np.abs(square[of_pairs]).max(initial=0)))
    for (i, j), text in written.items():
        square[i, j] = float(text)
    others = square[of_pairs]
    limits = {"vmin": others.min(), "vmax": others.max()} if others.size and "norm" not in options else {}
    image = ax.imshow(square, **{"cmap": "Greys", **limits, **options})
    if colorbar:
        ax.figure.colorbar(image, ax=ax, label=label)
    positions = range(len(names))
    if len(names) <= _MOST_TO_WRITE_OUT:
        for i, j in written:
            red, green, blue, _ = image.cmap(image.norm(square[i, j]))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            color = "white" if dark else "black"
            ax.text(j, i, written[i, j], ha="center", va="center", fontsize="small", color=color)
        ax.set_xticks(positions, names)
        ax.set_yticks(positions, names)
    elif ids is not None:
        shown = np.linspace(0, len(names) - 1, _MOST_TO_WRITE_OUT).round().astype(int).tolist()
        ax.set_xticks(shown, [names[i] for i in shown])
        ax.set_yticks(shown, [names[i] for i in shown])
    ax.set(xlabel="member", ylabel="member" if colorbar else f"member ({label})")
    return ax


def _texts(square: np.ndarray, largest: float) -> dict[tuple[int, int], str]:
    """The texts of the squares; none if they are too many or too narrow, and only the colour bar shows numbers."""
    if len(square) > _MOST_TO_WRITE_OUT:
        return {}
    known = np.argwhere(np.isfinite(square)).tolist()
    written = {(i, j): _short(float(square[i, j]), largest) for i, j in known}
    return written if len(square) * max(map(len, written.values()), default=0) <= _MOST_CHARACTERS else {}


def _short(number: float, largest: float) -> str:
    """Two decimals without the leading zero, `.25`, if these suit numbers up to `largest`."""
    if not 0.05 <= largest < 10:
        return f"{number:.2g}"
    text = f"{number:.2f}".removesuffix(".00").replace("0.", ".", 1)
    return "0" if text == "-0" else text
