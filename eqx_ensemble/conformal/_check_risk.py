import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._check import (
    as_column,
    check_floating,
    check_number,
    concrete,
    first_text,
    kept_rows,
    needs_message,
    promote,
)
from .._warnings import warn
from ._outward import enclose
from ._risk import fraction_of


def check_risk(name: str, risk: float, bound: float) -> None:
    """Raises unless `0 < risk < bound`."""
    check_number(bound, "bound", name=name)
    check_number(risk, "risk", name=name)
    if not 0 < risk < bound:
        fix = "The bound is the largest loss that a row can have; any threshold has a risk of at most that."
        raise ValueError(needs_message(name, "a `risk` between 0 and `bound`", f"got {risk} and {bound}", fix))


def check_losses(name: str, losses: ArrayLike, thresholds: ArrayLike) -> tuple[Array, Array]:
    """Raises unless losses are `(rows, thresholds)` and thresholds increase. Returns both in one dtype."""
    table, grid = check_floating(name, "losses", losses), check_floating(name, "thresholds", thresholds)
    if grid.ndim != 1 or table.ndim != 2 or table.shape[1] != grid.size or table.size == 0:
        got = f"got `losses` {table.shape} and `thresholds` {grid.shape}"
        fix = "A row of losses for each held-out row, one for each threshold."
        raise ValueError(needs_message(name, "`losses` (rows, thresholds) and `thresholds` (thresholds,)", got, fix))
    host = concrete(thresholds)
    wrong = np.zeros(0, bool) if host is None else ~(np.diff(host.astype(np.float64)) > 0)
    if host is not None and wrong.any():
        at = int(np.argmax(wrong)) + 1
        got = f"got {host[at]} after {host[at - 1]} at index {at}"
        fix = "Sort them, and the losses with them, from the largest loss to the smallest."
        raise ValueError(needs_message(name, "increasing `thresholds`", got, fix))
    first, second = promote(table, grid)
    return first, enclose(thresholds, second).upper


def check_steps(name: str, steps: ArrayLike, drops: ArrayLike) -> tuple[Array, Array]:
    """Raises unless steps and drops are floating-point `(rows, steps)`. Returns both in one dtype."""
    at, heights = check_floating(name, "steps", steps), check_floating(name, "drops", drops)
    if at.ndim != 2 or at.shape != heights.shape or at.size == 0:
        got = f"got `steps` {at.shape} and `drops` {heights.shape}"
        fix = "One step for each row? Pass `scores[:, None]`. Rows with fewer steps have drops of zero."
        raise ValueError(needs_message(name, "`steps` and `drops` of shape (rows, steps)", got, fix))
    first, second = promote(at, heights)
    return enclose(steps, first).upper, second


def check_loss_values(name: str, losses: ArrayLike, bound: float, mask: ArrayLike | None) -> None:
    """Raises if losses are NaN, exceed the bound or increase with the threshold; checked where concrete."""
    host, kept = concrete(losses), kept_rows(mask)
    if host is None or kept is None:
        return
    table, kept = host.astype(np.float64), as_column(np.broadcast_to(kept, host.shape[:1]), 2)
    rounding = 1e-5 * bound
    _check_no_nan(name, "losses", host, np.isnan(table) & kept)
    if (wrong := (table > bound + rounding) & kept).any():
        fix = "Raise `bound`, the largest loss that a row can have."
        raise ValueError(needs_message(name, f"`losses` of at most `bound` ({bound})", first_text(host, wrong), fix))
    if (wrong := (np.diff(table, axis=1, prepend=np.inf) > rounding) & kept).any():
        fix = "Take the largest loss from each threshold on: `jax.lax.cummax(losses, axis=1, reverse=True)`."
        raise ValueError(
            needs_message(name, "`losses` that never increase with the threshold", first_text(host, wrong), fix)
        )


def check_drop_values(name: str, steps: ArrayLike, drops: ArrayLike, bound: float, mask: ArrayLike | None) -> None:
    """Raises for NaN, negative drops, and drops of a row that sum to more than the bound; checked where concrete."""
    at, heights, kept = concrete(steps), concrete(drops), kept_rows(mask)
    if at is None or heights is None or kept is None:
        return
    kept = as_column(np.broadcast_to(kept, heights.shape[:1]), 2)
    _check_no_nan(name, "drops", heights, np.isnan(heights.astype(np.float64)) & kept)
    _check_no_nan(name, "steps", at, np.isnan(at.astype(np.float64)) & kept & (heights != 0))
    if (wrong := (heights < 0) & kept).any():
        fix = "A loss may not increase with the threshold."
        raise ValueError(needs_message(name, "`drops` of zero or more", first_text(heights, wrong), fix))
    total = heights.astype(np.float64).sum(axis=1)
    if (wrong := (total > bound * (1 + 1e-5)) & kept[:, 0]).any():
        fix = "They add up to the loss of the row at the lowest threshold: raise `bound`, the largest loss of a row."
        needs = f"`drops` of each row that add up to `bound` ({bound}) or less"
        raise ValueError(needs_message(name, needs, first_text(total, wrong), fix))


def _check_no_nan(name: str, argument: str, host: np.ndarray, wrong: np.ndarray) -> None:
    if wrong.any():
        raise ValueError(
            needs_message(name, f"`{argument}` without NaN", first_text(host, wrong), "Leave these rows out: `mask`.")
        )


def warn_of_no_threshold(
    name: str, found: Array, risk: float, bound: float, num_rows: int, mask: ArrayLike | None
) -> None:
    """Warns if no threshold controls the risk; checked where concrete."""
    host, kept = concrete(found), kept_rows(mask)
    if host is None or kept is None or host != jnp.inf:
        return
    count = num_rows if mask is None else int(kept.sum())
    part = fraction_of(risk, bound)
    if (count + 1) * part < 1:
        because = f"{count} rows are too few for a risk of {risk:g}"
        enough = f"Hold out {math.ceil(1 / part) - 1} rows or more, or allow" if part > 0 else "Allow"
        fix = f"{enough} a higher risk."
    else:
        because = f"no threshold has a risk of {risk:g} or less"
        fix = "Add thresholds of lower losses, hold out more rows, or allow a higher risk."
    warn(f"`{name}`: {because}; the threshold is infinite. {fix}")
