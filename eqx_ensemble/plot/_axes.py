import itertools
from typing import TYPE_CHECKING, Any

from .._check import kind_text, missing_extra_message, needs_message

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
else:
    Axes = Any  # matplotlib is optional: it is imported on drawing

_MARKERS = ("None", "o", "s", "^", "D", "v")
_LINES = ("-", "--", "-.", ":")


def axes_for(name: str, ax: Axes | None) -> Axes:
    """The Axes to draw on; those of a new figure if none are given."""
    try:
        from matplotlib.axes import Axes as Kind
    except ImportError as error:
        raise ImportError(missing_extra_message(name, "matplotlib", "plot")) from error
    if ax is None:
        from matplotlib import pyplot

        return pyplot.subplots()[1]
    if not isinstance(ax, Kind):
        fix = "`plt.subplots(1, 2)` returns an array of Axes: pass one of them, `axes[0]`."
        raise TypeError(needs_message(name, "one matplotlib Axes as `ax`", f"got {kind_text(ax)}", fix))
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


def with_unit(name: str, unit: str | None) -> str:
    """A label, with its unit if it has one."""
    return name if unit is None else f"{name}, {unit}"
