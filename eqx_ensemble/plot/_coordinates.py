from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from .._check import check_optional_text, check_sequence, check_text, check_word, kind_text, type_error, value_error
from ..sweep._engine import TABLE_COLUMNS
from ._axes import Axes, axes_for, check_plotted, of_line
from ._training import AnyRun


@runtime_checkable
class RankedRun(AnyRun, Protocol):
    """A run whose members are ranked by scores of one mode: a `Run`."""

    @property
    def mode(self) -> Literal["min", "max"]: ...


def check_columns(table: Any, columns: Any, log: Any, score: str | None) -> str:
    """Raises unless `table` has the given columns. Returns the name of the column that determines the shade."""
    if not callable(getattr(table, "items", None)) or not len(table):
        wanted = "a run or its table, a dict from column to values"
        raise type_error(wanted, f"got {kind_text(table)}", "Pass the `Run`, or `run.table()`.")
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
BEST = {"min": "lowest", "max": "highest"}


def default_columns(table: Any, score: str) -> list[str]:
    """The names of the columns of hyper-parameters, and of the score at the end."""
    return [column for column in table if column not in TABLE_COLUMNS and column != score] + [score]


def flat_columns(table: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The columns; one with several numbers per member becomes several columns."""
    flat = {}
    for name in names:
        values = np.asarray(table[name])
        for index in np.ndindex(values.shape[1:]):
            flat[name + "".join(f"[{i}]" for i in index)] = values[:, *index]
    return flat


def is_log(column: str, values: np.ndarray, log: Sequence[str] | None = None) -> bool:
    """Whether the scale of a column is logarithmic: as listed; by default, if positive numbers differ widely."""
    if log is not None:
        return column.split("[")[0] in log
    finite = values[np.isfinite(values)]
    return bool(finite.min() > 0 and finite.max() >= _WIDE * finite.min())


def parallel_coordinates(
    table: Any,
    *,
    columns: Sequence[str] | None = None,
    score: str | None = None,
    log: Sequence[str] | None = None,
    mode: Literal["min", "max"] | None = None,
    cmap: str = "gray",
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Parallel coordinates of a sweep: each member is a line through its hyper-parameters and its score.

    Each column is scaled from its lowest value at the bottom to its highest at the top. Better scores have darker
    lines; the best member's line is thick and dashed, those of diverged members are dotted.

    **Arguments:**

    - `table`: a [`eqx_ensemble.Run`][]; or its [`eqx_ensemble.Run.table`][], a dict from names to columns `(members,)`
        or `(members, ...)`, or a data frame.
    - `columns`: the names of columns, from left to right; by default the hyper-parameters and the score.
    - `score`: the column that determines the shade; by default `"validation"`, or `"loss"` if there is none.
    - `log`: the columns on a logarithmic scale; by default those of positive numbers whose highest is at least 100
        times the lowest.
    - `mode`: `"min"` if lower scores are better, `"max"` if higher ones are. By default that of the run, or `"min"`.
    - `cmap`: the matplotlib colour map of the scores, from best to worst.

    ```python
    table = {"lr": np.geomspace(1e-4, 1e-1, 8), "loss": np.linspace(1, 2, 8) ** 2}
    ax = ee.plot.parallel_coordinates(table)
    ```

    ??? cite
        [The Plane with Parallel Coordinates](https://doi.org/10.1007/BF01898350)
    """
    if isinstance(table, RankedRun):
        mode, table = table.mode if mode is None else mode, table.table()
    mode = "min" if mode is None else mode
    score = check_columns(table, columns, log, score)
    lines = check_lines(flat_columns(table, default_columns(table, score) if columns is None else columns), log)
    scores = check_plotted(score, table[score], "(members,)", finite=False)
    check_text(cmap, "cmap")
    check_word(mode, "mode", ("min", "max"))
    # By rank, not by value: one bad score would make all others look alike.
    costs = np.where(np.isfinite(scores), scores if mode == "min" else -scores, np.inf)
    rank = np.argsort(np.argsort(costs, kind="stable"), kind="stable")
    diverged = np.asarray(table["status"]) == "diverged" if "status" in table else ~np.isfinite(scores)
    heights = np.stack([_height(x, is_log(column, x, log)) for column, x in lines.items()], axis=1)

    ax = axes_for(ax)
    from matplotlib import colormaps

    shades = colormaps[cmap](0.8 * rank / max(len(rank) - 1, 1))
    for i in np.argsort(-rank).tolist():
        style = {"color": shades[i], "linewidth": 1.0, "linestyle": ":" if diverged[i] else "-", "label": None}
        if diverged[i] and i == np.argmax(diverged):
            style["label"] = "diverged"
        elif rank[i] == 0:
            member = np.asarray(table["member"])[i] if "member" in table else i
            style |= {"linewidth": 2.5, "linestyle": "--", "label": f"{BEST[mode]} {score}: member {member}"}
        ax.plot(heights[i], **of_line(ax, options, **style, marker="None"))
    for i, (column, x) in enumerate(lines.items()):
        ax.axvline(i, color="0.6", linewidth=0.8, zorder=1)
        finite = x[np.isfinite(x)]
        ax.text(i, -0.03, f"{finite.min():.3g}", ha="center", va="top", fontsize="small")
        scale = "\n(log)" if is_log(column, x, log) else ""
        ax.text(i, 1.03, f"{finite.max():.3g}{scale}", ha="center", va="bottom", fontsize="small")
    # Names that would overlap are written in two rows.
    crowded = sum(map(len, lines)) > _MOST_CHARACTERS
    ax.set_xticks(range(len(lines)), ["\n" * (crowded and i % 2) + column for i, column in enumerate(lines)])
    # Room for the numbers at the outer columns, and for the legend above those at the top.
    ax.set(xlim=(-0.4, len(lines) - 0.6), ylim=(-0.12, 1.36), yticks=[])
    ax.set(ylabel="each from its lowest value to its highest")
    ax.legend(loc="upper center", ncols=2, fontsize="small")
    return ax


def _height(values: np.ndarray, log: bool) -> np.ndarray:  # noqa: FBT001
    """From 0, the lowest, to 1, the highest; all in the middle if they are equal, NaN where not finite."""
    values = np.where(np.isfinite(values), values, np.nan)
    values = np.log(values) if log else values
    low, high = np.nanmin(values), np.nanmax(values)
    return (values - low) / (high - low) if high > low else 0.5 + 0 * values
