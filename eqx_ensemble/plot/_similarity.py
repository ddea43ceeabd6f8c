from typing import Any

import numpy as np
from jaxtyping import ArrayLike, Real

from .._check import check_flag, check_text
from ._axes import Axes, axes_for
from ._check import check_pairs

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
    squares for up to twelve members, if they fit; the shades are then of the numbers as written, so that equal ones
    have one shade.

    **Arguments:**

    - `matrix`: one number for each pair `(members, members)`: the fraction of rows on which they disagree,
        [`eqx_ensemble.uncertainty.pairwise_disagreement`][], the correlation of their errors,
        [`eqx_ensemble.uncertainty.error_correlation`][], or a distance. Pairs with NaN are blank.
    - `ids`: the members' names `(members,)`, such as `ensemble.ids`; their positions if not given.
    - `label`: the label of the numbers, with their unit.
    - `colorbar`: whether to draw a colour bar, which takes space from `ax`.
    - `ax`: the matplotlib Axes to draw on; those of a new figure if not given.
    - `options`: for `matplotlib.axes.Axes.imshow`, such as `vmin`, `vmax` and `cmap`.

    **Returns:**

    The Axes.

    **Raises:**

    - `TypeError` for a matrix that is not of real numbers.
    - `ValueError` for a matrix that is not square, and ids that do not fit.
    - `ImportError` without matplotlib (extra `plot`).

    ```python
    errors = jax.random.normal(key, (5, 100)) + jax.random.normal(
        jax.random.key(1), (1, 100)
    )
    matrix = ee.uncertainty.error_correlation(errors)
    ax = ee.plot.member_similarity(matrix, label="correlation of errors", vmin=0, vmax=1)
    ```
    """
    name = "plot.member_similarity"
    check_text(label, "label", name=name)
    check_flag(colorbar, "colorbar", name=name)
    square, names = check_pairs(name, matrix, ids)

    ax = axes_for(name, ax)
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
