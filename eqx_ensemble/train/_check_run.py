from typing import Any

import numpy as np

from .._axes import not_finite_text
from .._caller import caller
from .._check import CountedRows, check_nonnegative_weights, check_weight_count
from .._foreign import as_numpy
from .._warnings import warn
from ..distributed import to_host
from ._status import DivergedError, NotSavedError, Status
from .data._check import integers_text
from .data._source import AbstractSource, in_memory


def diverged_message(
    ids: Any, stopped_at: Any, faults: Any, *, first_step: int = -1, integers: str = "", fault: str = ""
) -> str:
    """The warning that lists the diverged members of a run from `first_step`.

    `integers` describes integer data, and `fault` data that are not finite.
    """
    each = zip(ids.tolist(), stopped_at.tolist(), faults.tolist(), strict=True)
    listed = ", ".join(f"{member} at step {step} (`{fault}`)" for member, step, fault in each)
    lines = [
        f"{len(ids)} member(s) diverged and keep their last finite weights (id, step, first non-finite value): "
        f"{listed}.",
        "`run.healthy` leaves them out; a smaller learning rate or gradient clipping often helps.",
    ]
    of_loss = faults == "loss"
    if (of_loss & (stopped_at == first_step)).all():
        lines[1] = (
            "Their loss was not finite before any update: the cause is the loss, the model or the data, not the "
            "learning rate."
        )
    if of_loss.any() and integers:
        lines.append(f"{integers}: a class label beyond a model's outputs makes the loss NaN.")
    if fault:
        lines.append(
            f"The data are not finite, which is a likely cause: {fault}.\nDrop or impute those rows; or mask the "
            "values in the loss, by `jnp.where` before they are used, since a NaN times zero is NaN."
        )
    return "\n".join(lines)


def undefined_scores_message(ids: Any, undefined: np.ndarray, steps: np.ndarray) -> str:
    """The warning that validation scores `(members, validations)` were NaN where `undefined`."""
    members = np.flatnonzero(undefined.any(axis=1))
    listed = ", ".join(f"{ids[i]} at step {steps[np.argmax(undefined[i])]}" for i in members.tolist())
    return (
        f"`fit` got validation scores that are NaN, which select no weights and count as no improvement for "
        f"`patience`; the first of each member (id, step): {listed}.\n"
        "A metric may be undefined for these rows, such as the recall of a class that they lack: return a number there."
    )


def excluded_message(ids: Any, healthy: Any) -> str:
    """The warning, or the error, that diverged members are excluded from predictions."""
    if not healthy.any():
        return f"`{caller()}` cannot predict: all {len(ids)} members diverged."
    return f"`{caller()}` excludes {len(ids)} member(s) that diverged: {', '.join(map(str, ids.tolist()))}."


def check_run_weights(weights: Any, healthy: np.ndarray, combine: Any) -> np.ndarray | None:
    """Raises for invalid weights. Returns those of the healthy members, normalised to sum to 1."""
    if weights is None:
        return None
    if combine is None:
        raise TypeError(f"`{caller()}` needs `combine=` with `weights`: weights have no effect without `combine`.")
    if np.ndim(weights) > 1:
        raise ValueError(
            f"`{caller()}` needs one weight per member: expected shape ({len(healthy)},), got {np.shape(weights)}.\n"
            "For weights of each row: `ee.predict(run.ensemble, x, combine=..., weights=weights)`, with zeros for the "
            "members that diverged."
        )
    check_weight_count(weights, len(healthy))
    check_nonnegative_weights(weights, rows=CountedRows(known=healthy), all_zero=False)
    kept = as_numpy(weights, "weights").astype(float)[healthy]
    return kept / kept.sum() if kept.size else kept


def check_no_state(state: Any) -> None:
    """Raises if members have a state that is not selected with them."""
    if state is not None:
        raise TypeError(
            f"`{caller()}` returns members without their states, which would stay in another order.\n"
            "Get both: `best = run[run.ranking(...)]` has `best.ensemble` and `best.state`."
        )


def check_outcome(
    run: Any, lost_before: np.ndarray, how: Any, *, saver: Any, first_step: int, source: AbstractSource
) -> None:
    """Raises if a checkpoint was not written, or for newly diverged members with `"raise"`; else warns of them."""
    if saver is not None and saver.failed is not None:
        raise NotSavedError(saver.failed, run) from saver.failed
    lost = run.status == Status.DIVERGED
    if lost.any():
        message = _diverged_text(run, to_host(run.train_state.ids), first_step, source.integers(), source.fault())
        if how == "raise" and (lost & ~lost_before).any():
            raise DivergedError(message, run)
        warn(message)


def warn_of_diverged(run: Any, ids: np.ndarray, *, first_step: int, data: Any) -> None:
    """Warns of the diverged members of a run on several workers, as `fit` does; only data in memory are looked at."""
    if (run.status == Status.DIVERGED).any():
        known = in_memory(data) and not callable(data)
        integers, fault = (integers_text(data), not_finite_text(data, argument="data")) if known else ("", "")
        warn(_diverged_text(run, ids, first_step, integers, fault))


def _diverged_text(run: Any, ids: np.ndarray, first_step: int, integers: str, fault: str) -> str:
    lost = run.status == Status.DIVERGED
    where = (ids[lost], run.stopped_at[lost], run.fault[lost])
    return diverged_message(*where, first_step=first_step, integers=integers, fault=fault)


def warn_of_undefined_scores(run: Any, validated: list[int]) -> None:
    """Warns of members that got NaN as a score while they trained, at the steps `validated` of all members."""
    scores, steps = run.history.validation, run.history.validation_step
    if scores is None:
        return
    ids = to_host(run.train_state.ids)
    trained = (run.status == Status.OK)[:, None] | (run.stopped_at[:, None] >= steps)
    trained &= (run.status != Status.DIVERGED)[:, None]  # a warning of their own names these
    trained &= ~np.isin(ids, [revival.member for revival in run.revived])[:, None]  # not before they were revived
    scored = ~np.isnan(scores) @ (steps[:, None] == steps)  # members that leave are scored apart, at the same step
    undefined = ~scored & trained & np.isin(steps, validated)
    if undefined.any():
        warn(undefined_scores_message(ids, undefined, steps))
