from typing import TYPE_CHECKING, Any

import numpy as np

from .._warnings import warn
from ..resample import out_of_bag_mean
from ._check_run import check_run_weights, excluded_message
from ._errors import DivergedError
from ._status import Status

if TYPE_CHECKING:
    from ._run import Run


def check_drawn_rows(drawn: Any, rows: Any) -> Any:
    """Raises if the training rows are unknown. Returns `drawn`, or else the `rows` passed to `fit`."""
    if drawn is None and rows is None:
        raise TypeError(
            "`Run.out_of_bag` needs the rows that the members were trained on: `fit` was called without `rows`.\n"
            "Pass their weights `(members, rows)` as `drawn`; without either, every member was trained on every row."
        )
    return rows if drawn is None else drawn


def check_fold_count(num_folds: int, num_members: int, *, name: str) -> None:
    """Raises unless there is one fold per member."""
    if num_folds != num_members:
        raise ValueError(f"`{name}` needs one fold per member, got {num_folds} folds and {num_members} members.")


def check_no_copies(revived: list[Any], *, name: str) -> None:
    """Raises if a member became a copy of another, and so was trained on the rows of both."""
    copied = [event for event in revived if event.donor is not None]
    if copied:
        words = ", ".join(f"{event.member} of {event.donor}" for event in copied)
        raise ValueError(
            f"`{name}` cannot determine the training rows: diverged members were revived as copies of others "
            f"({words}), which were trained on other rows.\nRe-initialise diverged members, with "
            "`on_diverge=train.Revive(make)`, or freeze them."
        )


def check_rows_of_folds(num_rows: int, folds: Any, rows: Any, *, name: str) -> None:
    """Raises unless the folds match the data and no member was trained on rows of its test fold."""
    expected = folds.in_test.shape[1]
    if num_rows != expected:
        raise ValueError(f"`{name}` needs all rows of the data of the folds: expected {expected}, got {num_rows}.")
    if rows is None:
        return
    for member, (seen, tested) in enumerate(zip(np.asarray(rows), np.asarray(folds.in_test), strict=True)):
        if tested[seen].any():
            raise ValueError(
                f"`{name}` needs the folds that were passed to `fit`: the member at index {member} was trained on "
                f"{int(tested[np.unique(seen)].sum())} of its test rows."
            )


def check_held_out_weights(run: "Run[Any]", weights: Any, *, name: str) -> np.ndarray | None:
    """Warns of diverged members, or raises if all are. Returns weights `(members,)`, zero for them; `None` if equal."""
    healthy = run.status != Status.DIVERGED
    if healthy.all():
        return weights
    message = excluded_message(np.asarray(run.ensemble.ids)[~healthy], healthy, name=name)
    if not healthy.any():
        raise DivergedError(message, run)
    warn(message)
    kept = np.zeros(len(healthy))
    given = np.ones(len(healthy)) if weights is None else weights
    kept[healthy] = check_run_weights(given, healthy, out_of_bag_mean, name=name)
    return kept
