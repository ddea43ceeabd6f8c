from typing import Any, Literal

import numpy as np

from .._check import check_level, check_optional_text, check_positive_int
from ..train import History
from ..train._run import Run
from ._axes import Axes, axes_for, of_line, with_unit
from ._check_run import check_curves

_NAMES = {"loss": "training", "validation": "validation"}


def training_curves(
    run: Run[Any] | History,
    *,
    curve: Literal["loss", "validation"] = "loss",
    stride: int = 1,
    level: float = 0.5,
    unit: str | None = None,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Learning curves: one thin line for each member, their median, and a band for a central part of them.

    A member's line ends where it stopped or diverged. Median and band then use its last value, so that both are over
    the same members at every step; the legend has the number of members that ended. Other values that are not finite
    are ignored. Validation curves of a run have a dot at the step whose weights were kept. Call it twice to draw
    training and validation on the same Axes: the second call uses another line style.

    **Arguments:**

    - `run`: the result of [`eqx_ensemble.fit`][], or its `history`.
    - `curve`: `"loss"`, the training loss of every recorded step, or `"validation"`, the scores on validation data.
    - `stride`: the number of consecutive points to average, since the loss of single batches is noisy.
    - `level`: the fraction of the members in the band, between their quantiles `(1 - level) / 2` and `(1 + level) / 2`,
        as in [`eqx_ensemble.uncertainty.interval`][].
    - `unit`: the unit of the loss, such as `"nats"`, for the axis label.
    - `ax`: the matplotlib Axes to draw on; those of a new figure if not given.
    - `options`: passed to `matplotlib.axes.Axes.plot` for the line of the median; its colour is used for all lines.

    **Returns:**

    The Axes.

    **Raises:**

    - `TypeError` for a `run` that is not a `Run` or a `History`, and a `stride` that is not an integer.
    - `ValueError` for validation curves of a run without validation, curves without a finite number, an invalid level.
    - `ImportError` without matplotlib (extra `plot`).

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    data = jnp.ones((100, 3)), jnp.zeros((100, 1))
    held_out = jnp.ones((16, 3)), jnp.zeros((16, 1))
    run = ee.fit(ensemble, loss, optax.adam(1e-3), data, epochs=5, validation=held_out, key=key)
    ax = ee.plot.training_curves(run)
    ax = ee.plot.training_curves(run, curve="validation", ax=ax)
    ```
    """
    name = "plot.training_curves"
    check_curves(name, run, curve)
    check_optional_text(unit, "unit", name=name)
    check_positive_int(stride, "stride", name=name)
    check_level(name, level)
    history = run.history if isinstance(run, Run) else run
    steps = history.step if curve == "loss" else history.validation_step
    steps, curves = _means(np.asarray(steps), np.asarray(getattr(history, curve), np.float64), stride)
    # Rounded, because (1 - 0.8) / 2 is less than 0.1 and would select another member.
    ends = np.round([(1 - level) / 2, (1 + level) / 2], 12)
    carried = _carry(curves)
    lower, upper = np.nanquantile(carried, ends, axis=0, method="averaged_inverted_cdf")

    ax = axes_for(name, ax)
    num_ended = int(np.isfinite(carried[:, -1]).sum() - np.isfinite(curves[:, -1]).sum())
    label = f"{_NAMES[curve]}, median of {len(curves)} members"
    label += f"\n({num_ended} ended: their last value)" if num_ended else ""
    (median,) = ax.plot(steps, np.nanmedian(carried, axis=0), **of_line(ax, options, label=label, zorder=2.5))
    color, style = median.get_color(), median.get_linestyle()
    ax.plot(steps, curves.T, color=color, linestyle=style, linewidth=0.6, alpha=0.5)
    edges: dict[str, Any] = {"edgecolor": color, "linestyle": style, "linewidth": 0.8}
    label = f"{_NAMES[curve]}, central {100 * level:g} %"
    ax.fill_between(steps, lower, upper, facecolor=(color, 0.15), label=label, **edges)
    if isinstance(run, Run) and curve == "validation" and run.best_step is not None and run.best_score is not None:
        kept = np.isin(run.best_step, history.validation_step)
        ax.plot(run.best_step[kept], run.best_score[kept], "o", color=color, markersize=4, label="weights kept")
    ax.set(xlabel="step", ylabel=with_unit("loss", unit))
    ax.legend()
    return ax


def _means(steps: np.ndarray, curves: np.ndarray, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Means of the finite values in `stride` consecutive steps of `(members, steps)`, at the last of these steps."""
    starts = np.arange(0, len(steps), stride)
    finite = np.isfinite(curves)
    total = np.add.reduceat(np.where(finite, curves, 0), starts, axis=1)
    count = np.add.reduceat(finite, starts, axis=1, dtype=int)
    means = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    some = (count > 0).any(axis=0)
    return steps[np.minimum(starts + stride, len(steps)) - 1][some], means[:, some]


def _carry(curves: np.ndarray) -> np.ndarray:
    """Curves `(members, steps)` in which a member that has ended keeps its last finite number."""
    last = curves.shape[1] - 1 - np.argmax(np.isfinite(curves)[:, ::-1], axis=1)[:, None]
    return np.where(np.arange(curves.shape[1]) > last, np.take_along_axis(curves, last, axis=1), curves)
