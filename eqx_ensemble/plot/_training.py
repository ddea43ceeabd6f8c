from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from .._check import (
    check_level,
    check_optional_text,
    check_positive_int,
    check_word,
    kind_text,
    type_error,
    value_error,
)
from ._axes import Axes, axes_for, of_line, with_unit


@runtime_checkable
class AnyHistory(Protocol):
    """The curves of a run: a `History`."""

    @property
    def loss(self) -> np.ndarray: ...
    @property
    def step(self) -> np.ndarray: ...
    @property
    def validation(self) -> np.ndarray | None: ...
    @property
    def validation_step(self) -> np.ndarray: ...


@runtime_checkable
class AnyRun(Protocol):
    """A run with curves and a table: a `Run`."""

    @property
    def history(self) -> AnyHistory: ...

    def table(self) -> dict[str, np.ndarray]: ...


def check_curves(run: Any, curve: str) -> None:
    """Raises unless `run` is a run or its history, with a finite value of the given curve."""
    if not isinstance(run, AnyRun | AnyHistory):
        raise type_error("a `Run` or its `History`", f"got {kind_text(run)}", "Pass the result of `fit`.")
    check_word(curve, "curve", ("loss", "validation"))
    history = run.history if isinstance(run, AnyRun) else run
    if curve == "validation" and history.validation is None:
        raise value_error("validation scores", "got a run without", "Train with `validation=` data, or plot the loss.")
    if not np.isfinite(getattr(history, curve)).any():
        raise value_error(
            f"a finite number in `history.{curve}`", "got none", "All members diverged: do the data hold NaN?"
        )


_NAMES = {"loss": "training", "validation": "validation"}
_ENDS = {"stopped": "s", "diverged": "x"}
_MARK: dict[str, Any] = {"linestyle": "None", "markersize": 6, "markerfacecolor": "none", "zorder": 3}


def training_curves(
    run: AnyRun | AnyHistory,
    *,
    curve: Literal["loss", "validation"] = "loss",
    stride: int = 1,
    level: float = 0.5,
    unit: str | None = None,
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Learning curves: one thin line for each member, their median, and a band for a central part of them.

    A member's line ends where it stopped (a square) or diverged (a cross); median and band then use its last value.
    Other values that are not finite are ignored. Validation curves have a dot at the step whose weights were kept.

    **Arguments:**

    - `run`: the result of [`eqx_ensemble.fit`][]; or its `history`, which has no marks.
    - `curve`: `"loss"`, the training loss of every recorded step, or `"validation"`, the scores on validation data.
    - `stride`: the number of consecutive points to average.
    - `level`: the fraction of the members in the band, as in [`eqx_ensemble.uncertainty.interval`][].

    ```python
    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    run = ee.fit(ensemble, loss, optax.adam(1e-3), jnp.ones((100, 3)), epochs=5, key=key)
    ax = ee.plot.training_curves(run)
    ```
    """
    check_curves(run, curve)
    check_optional_text(unit, "unit")
    check_positive_int(stride, "stride")
    check_level(level)
    history, table = (run.history, run.table()) if isinstance(run, AnyRun) else (run, {})
    steps = history.step if curve == "loss" else history.validation_step
    steps, curves = _means(np.asarray(steps), np.asarray(getattr(history, curve), np.float64), stride)
    # Rounded, because (1 - 0.8) / 2 is less than 0.1 and would select another member.
    ends = np.round([(1 - level) / 2, (1 + level) / 2], 12)
    last = _last(curves)
    carried = np.where(np.arange(curves.shape[1]) > last, np.take_along_axis(curves, last, axis=1), curves)
    lower, upper = np.nanquantile(carried, ends, axis=0, method="averaged_inverted_cdf")

    ax = axes_for(ax)
    num_ended = int(np.isfinite(carried[:, -1]).sum() - np.isfinite(curves[:, -1]).sum())
    label = f"{_NAMES[curve]}, median of {len(curves)} members"
    label += f"\n({num_ended} ended: their last value)" if num_ended else ""
    (median,) = ax.plot(steps, np.nanmedian(carried, axis=0), **of_line(ax, options, label=label, zorder=2.5))
    color, style = median.get_color(), median.get_linestyle()
    ax.plot(steps, curves.T, color=color, linestyle=style, linewidth=0.6, alpha=0.5)
    edges: dict[str, Any] = {"edgecolor": color, "linestyle": style, "linewidth": 0.8}
    label = f"{_NAMES[curve]}, central {100 * level:g} %"
    ax.fill_between(steps, lower, upper, facecolor=(color, 0.15), label=label, **edges)
    for word, marker in _ENDS.items() if table else ():
        (ended,) = np.nonzero((table["status"] == word) & np.isfinite(curves).any(axis=1))
        if len(ended):
            at, style = last[ended, 0], _MARK | {"marker": marker, "color": color}
            ax.plot(steps[at], curves[ended, at], label=f"{len(ended)} {word}", **style)
    if curve == "validation" and "best_step" in table:
        best, scores = table["best_step"], table["validation"]
        kept = np.isin(best, history.validation_step)
        ax.plot(best[kept], scores[kept], "o", color=color, markersize=4, label="weights kept")
    ax.set(xlabel="step", ylabel=with_unit("loss", unit))
    ax.legend(fontsize="small")
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


def _last(curves: np.ndarray) -> np.ndarray:
    """The index of each member's last finite number in curves `(members, steps)`, `(members, 1)`."""
    return curves.shape[1] - 1 - np.argmax(np.isfinite(curves)[:, ::-1], axis=1)[:, None]
