from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from .._check import (
    check_level,
    check_optional_text,
    check_positive_int,
    check_sequence,
    check_text,
    check_word,
    kind_text,
    type_error,
    value_error,
)
from ..train import History
from ..train._engine import TABLE_COLUMNS, Run, check_mode
from ._axes import Axes, axes_for, check_plotted, of_line, with_unit


def check_curves(run: Any, curve: str) -> None:
    """Raises unless `run` is a run or its history, with a finite value of the given curve."""
    if not isinstance(run, Run | History):
        raise type_error("a `Run` or its `History`", f"got {kind_text(run)}", "Pass the result of `fit`.")
    check_word(curve, "curve", ("loss", "validation"))
    history = run.history if isinstance(run, Run) else run
    if curve == "validation" and history.validation is None:
        raise value_error("validation scores", "got a run without", "Train with `validation=` data, or plot the loss.")
    if not np.isfinite(getattr(history, curve)).any():
        raise value_error(
            f"a finite number in `history.{curve}`", "got none", "`run.fault` is the first value that was not finite."
        )


def check_columns(table: Any, columns: Any, log: Any, score: str | None) -> str:
    """Raises unless `table` has the given columns. Returns the name of the column that determines the shade."""
    if not callable(getattr(table, "items", None)) or not len(table):
        raise type_error("a table, a dict from column to values", f"got {kind_text(table)}", "Pass `run.table()`.")
    check_optional_text(score, "score")
    score = score or ("validation" if "validation" in table else "loss")
    for option, names in (("columns", columns), ("log", log), ("score", [score])):
        if isinstance(names, str):
            raise type_error(f"`{option}` as a list of names", f"got {names!r}", f"Pass `{option}=[{names!r}]`.")
        names = () if names is None else check_sequence(names, option, of="names")
        missing = [argument for argument in names if not isinstance(argument, str) or argument not in table]
        if missing:
            listed = ", ".join(f"`{argument}`" for argument in table)
            fix = f"Columns of the table: {listed}."
            raise value_error(f"names of columns in `{option}`", f"got {missing[0]!r}", fix)
    return score


def check_lines(lines: Mapping[str, Any], log: Any) -> dict[str, np.ndarray]:
    """Raises unless two or more columns have equally many numbers, positive on logarithmic scales. Returns them."""
    checked = {
        argument: check_plotted(argument, values, "(members,)", finite=False) for argument, values in lines.items()
    }
    if len(checked) < 2:
        fix = "A run without `hyper` has only scores; pass names of columns as `columns`."
        raise value_error("two or more columns", f"got {list(checked)}", fix)
    if len({values.shape for values in checked.values()}) > 1:
        listed = ", ".join(f"{len(values)} in `{argument}`" for argument, values in checked.items())
        raise value_error("one number per member in every column", f"got {listed}", "Rows of the table are members.")
    for argument, values in checked.items():
        finite = values[np.isfinite(values)]
        if not len(finite):
            raise value_error(f"a finite number in column `{argument}`", "got none", "Pass other columns as `columns`.")
        if argument in (log or ()) and finite.min() <= 0:
            raise value_error(
                f"positive numbers in column `{argument}`", f"got {finite.min():g}", "Zero has no logarithm."
            )
    return checked


_WIDE = 100
_MOST_CHARACTERS = 50
_BEST = {"min": "lowest", "max": "highest"}


def parallel_coordinates(
    table: Any,
    *,
    columns: Sequence[str] | None = None,
    score: str | None = None,
    log: Sequence[str] | None = None,
    mode: Literal["min", "max"] = "min",
    cmap: str = "gray",
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Parallel coordinates of a sweep: each member is a line through its hyper-parameters and its score.

    Each column is scaled from its lowest value at the bottom to its highest at the top; both are labelled. Better
    scores have darker lines; the best member's line is thick and dashed, those of diverged members are dotted.

    **Arguments:**

    - `table`: columns by name, `(members,)`, or `(members, ...)` for several columns each: the result of
        [`eqx_ensemble.Run.table`][], or a data frame.
    - `columns`: the names of columns, from left to right. If not given, the hyper-parameters and the score.
    - `score`: the column that determines the shade; `"validation"` if not given, or `"loss"` if there is none.
    - `log`: the columns on a logarithmic scale. If not given, those of positive numbers whose highest is at least
        100 times the lowest.
    - `mode`: `"min"` if lower scores are better, `"max"` if higher ones are.
    - `cmap`: the matplotlib colour map of the scores, from best to worst.
    - `ax`: the matplotlib Axes to draw on; those of a new figure if not given.
    - `options`: passed to `matplotlib.axes.Axes.plot` for the lines.

    **Returns:**

    The Axes.

    **Raises:**

    - `TypeError` for a table that is not a dict of columns, and columns that are not numbers.
    - `ValueError` for names that are not in the table, fewer than two columns, columns without a finite number, and
        numbers on a logarithmic scale that are not positive.
    - `ImportError` without matplotlib (extra `plot`).

    ```python
    table = {
        "lr": np.geomspace(1e-4, 1e-1, 8),
        "dropout": np.linspace(0, 0.5, 8),
        "loss": np.linspace(1, 2, 8) ** 2,
    }
    ax = ee.plot.parallel_coordinates(table)
    ```

    ??? cite
        [The Plane with Parallel Coordinates](https://doi.org/10.1007/BF01898350)
    """
    score = check_columns(table, columns, log, score)
    names = [column for column in table if column not in TABLE_COLUMNS and column != score] + [score]
    lines = check_lines(_flat(table, names if columns is None else columns), log)
    scores = check_plotted(score, table[score], "(members,)", finite=False)
    check_text(cmap, "cmap")
    check_mode(mode)
    # By rank, not by value: one bad score would make all others look alike.
    costs = np.where(np.isfinite(scores), scores if mode == "min" else -scores, np.inf)
    rank = np.argsort(np.argsort(costs, kind="stable"), kind="stable")
    diverged = np.asarray(table["status"]) == "diverged" if "status" in table else ~np.isfinite(scores)
    heights = np.stack([_height(x, _is_log(column, x, log)) for column, x in lines.items()], axis=1)

    ax = axes_for(ax)
    from matplotlib import colormaps

    shades = colormaps[cmap](0.8 * rank / max(len(rank) - 1, 1))
    for i in np.argsort(-rank).tolist():
        style = {"color": shades[i], "linewidth": 1.0, "linestyle": ":" if diverged[i] else "-", "label": None}
        if diverged[i] and i == np.argmax(diverged):
            style["label"] = "diverged"
        elif rank[i] == 0:
            member = np.asarray(table["member"])[i] if "member" in table else i
            style |= {"linewidth": 2.5, "linestyle": "--", "label": f"{_BEST[mode]} {score}: member {member}"}
        ax.plot(heights[i], **of_line(ax, options, **style, marker="None"))
    for i, (column, x) in enumerate(lines.items()):
        ax.axvline(i, color="0.6", linewidth=0.8, zorder=1)
        finite = x[np.isfinite(x)]
        ax.text(i, -0.03, f"{finite.min():.3g}", ha="center", va="top", fontsize="small")
        scale = "\n(log)" if _is_log(column, x, log) else ""
        ax.text(i, 1.03, f"{finite.max():.3g}{scale}", ha="center", va="bottom", fontsize="small")
    # Names that would overlap are written in two rows.
    crowded = sum(map(len, lines)) > _MOST_CHARACTERS
    ax.set_xticks(range(len(lines)), ["\n" * (crowded and i % 2) + column for i, column in enumerate(lines)])
    # Room for the numbers at the outer columns, and for the legend above those at the top.
    ax.set(xlim=(-0.4, len(lines) - 0.6), ylim=(-0.12, 1.36), yticks=[])
    ax.set(ylabel="each from its lowest value to its highest")
    ax.legend(loc="upper center", ncols=2, fontsize="small")
    return ax


def _flat(table: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The columns; one with several numbers per member becomes several columns."""
    flat = {}
    for name in names:
        values = np.asarray(table[name])
        for index in np.ndindex(values.shape[1:]):
            flat[name + "".join(f"[{i}]" for i in index)] = values[:, *index]
    return flat


def _is_log(column: str, values: np.ndarray, log: Sequence[str] | None) -> bool:
    if log is not None:
        return column.split("[")[0] in log
    finite = values[np.isfinite(values)]
    return bool(finite.min() > 0 and finite.max() >= _WIDE * finite.min())


def _height(values: np.ndarray, log: bool) -> np.ndarray:  # noqa: FBT001
    """From 0, the lowest, to 1, the highest; all in the middle if they are equal, NaN where not finite."""
    values = np.where(np.isfinite(values), values, np.nan)
    values = np.log(values) if log else values
    low, high = np.nanmin(values), np.nanmax(values)
    return (values - low) / (high - low) if high > low else 0.5 + 0 * values


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
    check_curves(run, curve)
    check_optional_text(unit, "unit")
    check_positive_int(stride, "stride")
    check_level(level)
    history = run.history if isinstance(run, Run) else run
    steps = history.step if curve == "loss" else history.validation_step
    steps, curves = _means(np.asarray(steps), np.asarray(getattr(history, curve), np.float64), stride)
    # Rounded, because (1 - 0.8) / 2 is less than 0.1 and would select another member.
    ends = np.round([(1 - level) / 2, (1 + level) / 2], 12)
    carried = _carry(curves)
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
