import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from .._caller import caller
from .._check import (
    check_level,
    check_sequence,
    check_weights,
    concrete,
    first_text,
    is_integer,
    kind_text,
    missing_extra_message,
    type_error,
    value_error,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
else:
    Axes = Any  # matplotlib is optional: it is imported on drawing

_MARKERS = ("None", "o", "s", "^", "D", "v")
_LINES = ("-", "--", "-.", ":")


@contextlib.contextmanager
def explain_missing() -> Iterator[None]:
    """Names the extra to install if matplotlib cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise ImportError(missing_extra_message(caller(), "matplotlib", "plot")) from error


def axes_for(ax: Axes | None) -> Axes:
    """The Axes to draw on; those of a new figure if none are given."""
    with explain_missing():
        from matplotlib.axes import Axes as Kind
    if ax is None:
        from matplotlib import pyplot

        return pyplot.subplots()[1]
    if not isinstance(ax, Kind):
        fix = "`plt.subplots(1, 2)` returns an array of Axes: pass one of them, `axes[0]`."
        raise type_error("one matplotlib Axes as `ax`", f"got {kind_text(ax)}", fix)
    return ax


def of_line(ax: Axes, options: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Options of a new line, in a style that no line on `ax` has yet, distinguishable without colour."""
    from matplotlib.cbook import normalize_kwargs
    from matplotlib.lines import Line2D

    given = normalize_kwargs(options, Line2D)
    used = [(line.get_linestyle(), line.get_marker()) for line in ax.lines]
    styles = ((line, marker) for marker, line in itertools.product(_MARKERS, _LINES))
    line, marker = next((style for style in styles if style not in used), ("-", "x"))
    return {"linestyle": line, "marker": marker, "markevery": 0.1} | defaults | given


def of_patch(options: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Options of a bar or an area, under their long names."""
    from matplotlib.cbook import normalize_kwargs
    from matplotlib.patches import Patch

    given = normalize_kwargs(options, Patch)
    if "color" in given:  # `color` and `facecolor` conflict in matplotlib
        defaults.pop("facecolor", None)
        defaults.pop("edgecolor", None)
    return defaults | given


def with_unit(label: str, unit: str | None) -> str:
    """A label, with its unit if it has one."""
    return label if unit is None else f"{label}, {unit}"


Bands = dict[float, tuple[np.ndarray, np.ndarray]]


def check_plotted(argument: str, values: Any, axes: str | None = None, *, finite: bool = True) -> np.ndarray:
    """Raises unless values are concrete real numbers, with axes such as `(members, batch)`. Returns float64."""
    host = concrete(values)
    if host is None:
        needs, fix = (
            f"a concrete `{argument}` on this host",
            "Plot outside `jax.jit`; gather distributed arrays first.",
        )
        raise type_error(needs, "got a traced or distributed array", fix)
    if not (jnp.issubdtype(host.dtype, jnp.floating) or host.dtype.kind in "biu"):
        got = f"got dtype {host.dtype}, shape {host.shape}"
        raise type_error(f"real numbers in `{argument}`", got, "Pass an array of numbers.")
    wanted = host.ndim if axes is None else len(axes.strip("(,)").split(","))
    if host.ndim != wanted:
        several = f"Pass one entry of the extra axis, `{argument}[..., 0]`."
        fix = f"One member? Add a leading axis: `{argument}[None]`." if host.ndim < wanted else several
        raise value_error(f"`{argument}` of shape {axes}", f"got shape {host.shape}", fix)
    if host.size == 0:
        raise value_error(
            f"at least one number in `{argument}`", f"got shape {host.shape}", "Was every row filtered out?"
        )
    host = host.astype(np.float64)
    if finite and not np.isfinite(host).all():
        fix = "Exclude diverged members and missing rows; `run.predict` excludes diverged members."
        raise value_error(f"finite `{argument}`", first_text(host, ~np.isfinite(host)), fix)
    return host


def _without_column(values: Any, ndim: int) -> Any:
    """Values without a last axis of length one, if they would have `ndim` axes without it."""
    host = concrete(values)
    return host[..., 0] if host is not None and host.ndim == ndim + 1 and host.shape[-1] == 1 else values


def check_weighted_members(predictions: Any, weights: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Checks predictions `(members, batch)`. Returns those of members of nonzero weight, and their weights."""
    axes, predictions = "(members, batch)", _without_column(predictions, 2)
    if weights is None:
        return check_plotted("predictions", predictions, axes), None
    every = check_plotted("predictions", predictions, axes, finite=False)
    known = check_plotted("weights", weights, "(members,)", finite=False)
    check_weights(known, len(every), jnp.dtype("float32"))
    counts = known > 0
    check_plotted("predictions", np.where(counts[:, None], every, 0), axes)
    return every[counts], known[counts]


def check_bands(
    rows: tuple[int, ...], x: Any, targets: Any, intervals: Any, levels: tuple[float, ...]
) -> tuple[np.ndarray | None, np.ndarray | None, Bands]:
    """Raises unless optional arrays have one number per row. Returns them, and the bands of `intervals`."""
    per_row = {}
    for argument, values in (("x", x), ("targets", targets)):
        per_row[argument] = None if values is None else _per_row(argument, values, rows)
    if intervals is not None and (not isinstance(intervals, Mapping) or not intervals):
        fix = "`intervals={0.9: ee.uncertainty.gaussian_interval(mean, variance, level=0.9)}`."
        raise type_error("`intervals` as a dict from level to `(lower, upper)`", f"got {kind_text(intervals)}", fix)
    if intervals is None:
        check_sequence(levels, "levels", of="levels")
    for level in levels if intervals is None else intervals:
        check_level(level)
    bands = {}
    for level, ends in (intervals or {}).items():
        names = (f"intervals[{level}] lower", f"intervals[{level}] upper")
        lower, upper = (_per_row(argument, end, rows) for argument, end in zip(names, ends, strict=True))
        if (lower > upper).any():
            fix = "Swapped? `lower` comes first."
            raise value_error(f"`{names[0]}` at or below its upper end", first_text(lower, lower > upper), fix)
        bands[level] = lower, upper
    return per_row["x"], per_row["targets"], bands


def check_risk_coverage(coverage: Any, risk: Any) -> tuple[np.ndarray, np.ndarray]:
    """Raises unless coverages are from 0 to 1 and do not decrease, with a risk at each. Returns both."""
    coverages, risks = (check_plotted("coverage", coverage, "(rows,)"), check_plotted("risk", risk, "(rows,)"))
    if coverages.shape != risks.shape:
        got = f"got `coverage` {coverages.shape}, `risk` {risks.shape}"
        raise value_error("`coverage` and `risk` of one shape", got, "They are the coordinates of one curve.")
    wrong = (coverages < 0) | (coverages > 1) | (np.diff(coverages, prepend=coverages[0]) < 0)
    if wrong.any():
        raise value_error(
            "`coverage` that rises, from 0 to 1", first_text(coverages, wrong), "Swapped? `coverage` comes first."
        )
    return coverages, risks


def check_counts(counts: Any) -> np.ndarray:
    """Raises unless counts are whole numbers of two or more bins, not all zero. Returns them."""
    host = check_plotted("counts", counts, "(ranks,)")
    fix = "Pass the number of rows for each rank, `(members + 1,)`, not the ranks: `np.bincount(ranks)`."
    if len(host) < 2:
        raise value_error("`counts` of at least two ranks", f"got {len(host)}", fix)
    if (wrong := host != np.round(host)).any():
        fix = "For values of a probability integral transform pass `scores.pit_histogram(values)`."
        raise value_error("whole `counts`", first_text(host, wrong), fix)
    if (host < 0).any():
        raise value_error("`counts` of zero or more", first_text(host, host < 0), fix)
    if not host.any():
        raise value_error("`counts` of at least one row", f"got {len(host)} zeros", fix)
    return host


def check_bin_edges(bins: Any) -> int | np.ndarray:
    """Raises unless `bins` is a number of bins, or increasing edges. Returns it."""
    if is_integer(bins):
        if bins < 1:
            raise value_error("`bins` of one or more", f"got {bins}", "20 is usual.")
        return int(bins)
    edges = check_plotted("bins", bins, "(edges,)")
    if len(edges) < 2 or (np.diff(edges) <= 0).any():
        fix = "Logarithmic bins: `bins=np.geomspace(1e-5, 1, 21)`, and `ax.set_xscale('log')`."
        raise value_error("`bins` as a number, or as two or more rising edges", f"got {edges.tolist()}", fix)
    return edges


def _per_row(argument: str, values: Any, rows: tuple[int, ...]) -> np.ndarray:
    host = check_plotted(argument, _without_column(values, 1), "(batch,)")
    if host.shape != rows:
        got = f"expected {rows}, as `predictions` are (members, batch); got {host.shape}"
        raise value_error(f"one number per row in `{argument}`", got, "Rows have the same order in all arguments.")
    return host
