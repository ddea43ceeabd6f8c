from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import ArrayLike, Real

from .._check import first_text, needs_message
from ._axes import Axes, axes_for, of_line
from ._check import check_plotted


def check_rates(name: str, rates: Mapping[str, Any], *, rising: tuple[str, ...]) -> list[np.ndarray]:
    """Raises unless rates are from 0 to 1, of one shape, and those in `rising` do not decrease. Returns them."""
    found = {argument: check_plotted(name, argument, values, "(points,)") for argument, values in rates.items()}
    if len({values.shape for values in found.values()}) > 1:
        got = "got " + ", ".join(f"`{argument}` {values.shape}" for argument, values in found.items())
        both = " and ".join(f"`{argument}`" for argument in found)
        raise ValueError(needs_message(name, f"{both} of one shape", got, "They are the coordinates of one curve."))
    for argument, values in found.items():
        wrong = (values < 0) | (values > 1)
        if argument in rising:
            wrong |= np.diff(values, prepend=values[0]) < 0
        if wrong.any():
            kind = "that rises, from 0 to 1" if argument in rising else "from 0 to 1"
            fix = f"Swapped? `{next(iter(found))}` comes first, and its points begin at the highest threshold."
            raise ValueError(needs_message(name, f"`{argument}` {kind}", first_text(values, wrong), fix))
    return list(found.values())


def roc_curve(
    false_positive_rate: Real[ArrayLike, " points"],
    true_positive_rate: Real[ArrayLike, " points"],
    *,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """ROC curve: true against false positive rate, with the diagonal of a random ranking.

    Call it again with the same `ax` to compare: each curve uses another line style.

    **Arguments:**

    - `false_positive_rate`, `true_positive_rate`: rising from 0 to 1, `(points,)`, as returned by
        [`eqx_ensemble.scores.roc_curve`][].
    - `ax`: the matplotlib Axes to draw on; those of a new figure if not given.
    - `options`: passed to `matplotlib.axes.Axes.plot` for the curve, such as `label`.

    **Returns:**

    The Axes.

    **Raises:**

    - `ValueError` for shapes that differ, numbers that are not finite, and rates that decrease or are outside 0 to 1.
    - `ImportError` without matplotlib (extra `plot`).

    ```python
    scores = jax.random.normal(key, (200,))
    positives = scores + jax.random.normal(jax.random.key(1), (200,)) > 0
    curve = ee.scores.roc_curve(scores, positives)
    ax = ee.plot.roc_curve(curve.false_positive_rate, curve.true_positive_rate)
    ```

    ??? cite
        [An Introduction to ROC Analysis](https://doi.org/10.1016/j.patrec.2005.10.010)
    """
    name = "plot.roc_curve"
    rates = {"false_positive_rate": false_positive_rate, "true_positive_rate": true_positive_rate}
    false, hits = check_rates(name, rates, rising=tuple(rates))

    ax = axes_for(name, ax)
    if not ax.lines:
        from matplotlib.collections import LineCollection  # not a line, whose style curves would avoid

        ax.add_collection(LineCollection([[(0, 0), (1, 1)]], colors="0.5", linestyles=":", linewidths=0.8))
    ax.plot(false, hits, **of_line(ax, options))
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="false positive rate", ylabel="true positive rate")
    if ax.get_legend_handles_labels()[1]:
        ax.legend(loc="lower right")
    return ax


def precision_recall_curve(
    precision: Real[ArrayLike, " points"],
    recall: Real[ArrayLike, " points"],
    *,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Precision-recall curve, in steps; the dotted line at the fraction of positive rows is a random ranking.

    Call it again with the same `ax` to compare: each curve uses another line style. The area under the steps is
    [`eqx_ensemble.scores.aupr`][].

    **Arguments:**

    - `precision`: from 0 to 1, `(points,)`; the last value is that of all rows.
    - `recall`: rising from 0 to 1, `(points,)`. Both are returned by [`eqx_ensemble.scores.precision_recall_curve`][].
    - `ax`: the matplotlib Axes to draw on; those of a new figure if not given.
    - `options`: passed to `matplotlib.axes.Axes.plot` for the curve, such as `label`.

    **Returns:**

    The Axes.

    **Raises:**

    - `ValueError` for shapes that differ, numbers that are not finite or outside 0 to 1, and recall that decreases.
    - `ImportError` without matplotlib (extra `plot`).

    ```python
    scores = jax.random.normal(key, (200,))
    positives = scores + jax.random.normal(jax.random.key(1), (200,)) > 1
    curve = ee.scores.precision_recall_curve(scores, positives)
    ax = ee.plot.precision_recall_curve(curve.precision, curve.recall)
    ```

    ??? cite
        [The Relationship Between Precision-Recall and ROC Curves](https://doi.org/10.1145/1143844.1143874)
    """
    name = "plot.precision_recall_curve"
    precisions, recalls = check_rates(name, {"precision": precision, "recall": recall}, rising=("recall",))

    ax = axes_for(name, ax)
    # Between two points the precision is that of the higher recall, as in the area.
    (line,) = ax.plot(recalls, precisions, **of_line(ax, options, drawstyle="steps-pre"))
    ax.hlines(precisions[-1], 0, 1, color=line.get_color(), linestyle=":", linewidth=0.8)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision")
    if ax.get_legend_handles_labels()[1]:
        ax.legend()
    return ax
