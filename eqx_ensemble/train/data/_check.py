import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._axes import Each
from ..._caller import caller
from ..._check import MOST_STEPS, check_positive_int, is_member_array, kind_text
from ..._warnings import warn


def check_batch_size(batch_size: Any, rows: int) -> int:
    """Raises unless `batch_size` is a count or `None`, which means 32. Returns the rows of a batch, at most `rows`."""
    size = 32 if batch_size is None else check_positive_int(batch_size, "batch_size")
    return min(int(size), rows)


def check_row_indices(rows: Any, num_members: int, num_rows: int) -> None:
    """Raises unless `rows` are indices `(members, n)` into the shared data."""
    if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
        raise TypeError(
            f"`{caller()}` needs integer `rows` of shape (members, n), got {rows.dtype} of shape {rows.shape}."
        )
    if rows.shape[0] != num_members or rows.shape[1] == 0:
        raise ValueError(
            f"`{caller()}` needs `rows` of shape ({num_members}, n) with n of at least 1, got {rows.shape}."
        )
    outside = (rows < 0) | (rows >= num_rows)
    if outside.any():
        member, position = (int(i) for i in np.argwhere(outside)[0])
        raise IndexError(
            f"`{caller()}` needs `rows` from 0 to {num_rows - 1}; {int(outside.sum())} lie outside, the first is "
            f"`rows[{member}, {position}]` = {rows[member, position]}."
        )


def check_last_step(last_step: int | None) -> None:
    """Raises if a run has more steps than compiled programs can count."""
    if last_step is not None and last_step > MOST_STEPS:
        raise ValueError(
            f"`{caller()}` counts at most {MOST_STEPS} steps, including those of earlier runs; this call would end at "
            f"step {last_step}.\nAsk for fewer steps."
        )


def check_patience_length(patience: Any, num_steps: int, per_epoch: int, first_step: int) -> None:
    """Raises if `patience` has no effect because no epoch ends."""
    if patience is not None and first_step % per_epoch + num_steps < per_epoch:
        raise ValueError(
            f"`{caller()}` cannot use `patience`: it counts validations, which are made at the end of every epoch, and "
            f"the {num_steps} steps asked for end within an epoch of {per_epoch}."
        )


def idle_patience_message() -> str:
    """The warning that `patience` had no effect."""
    return (
        "`patience` stopped no member: it counts validations, which are made at the end of every epoch, and the run "
        "ended within the first.\nPass an iterable of batches that ends after each epoch."
    )


def check_some_batches(count: int, epoch: int) -> None:
    """Raises if an epoch of an iterable of batches was empty."""
    if count > 0:
        return
    if epoch == 0:
        raise ValueError(f"`{caller()}` needs at least one batch, but the iterable of batches is empty.")
    raise ValueError(
        f"`{caller()}` found no batches in epoch {epoch + 1}: the iterable can be iterated only once, as a generator.\n"
        "Pass an object that restarts each time, or make the generator endless and give `steps`."
    )


def many_shapes_message(seen: Collection[tuple[tuple[tuple[int, ...], Any], ...]]) -> str:
    """The warning that batches of many shapes compile many programs."""
    sizes = sorted({shape for shapes in seen for shape, _ in shapes})
    return (
        f"`fit` got batches of {len(seen)} different shapes and compiled a program for each: "
        f"{', '.join(map(str, sizes[:8]))}.\nPad batches to a few sizes: compiling takes longer than training."
    )


@contextlib.contextmanager
def explain_state() -> Iterator[None]:
    """Explains an error of an iterator that is given the state that it had saved."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"`fit` cannot resume: the iterator of batches does not accept its saved state: {error!r}.\nPass the same "
            "iterator as before, or save in another file."
        ) from error


def check_not_exceeded(done: int, wanted: int | None, unit: str) -> None:
    """Raises if a run that resumes is already longer than wanted."""
    if wanted is not None and done > wanted:
        raise ValueError(
            f"`fit` cannot resume: {done} {unit} are done, and the call asks for {wanted} in all.\nAsk for at "
            "least as many, or save in another file."
        )


def cursor_not_savable_message(value: Any, path: str) -> str:
    """The message that an iterator's state cannot be saved."""
    return (
        f"`fit` cannot save the position of the iterator of batches: its state{path and f' at `{path}`'} is "
        f"{kind_text(value)}.\nIt may hold dicts, lists, tuples, strings, bytes, numbers and arrays of numbers."
    )


def integers_text(data: Any) -> str:
    """The arrays of integers in a data set, which may be class labels, with the range of their values."""
    found = []
    for path, node in jtu.tree_leaves_with_path(data, is_leaf=lambda x: isinstance(x, Each)):
        each = isinstance(node, Each)
        for inner, x in jtu.tree_leaves_with_path(node.per_member() if each else node):
            if jnp.issubdtype(x.dtype, jnp.integer) and x.ndim - each <= 2:
                name = f"data{jtu.keystr(path)}{jtu.keystr(inner)}"
                found.append(f"`{name}` holds integers from {int(x.min())} to {int(x.max())}")
    return "; ".join(found)


def warn_of_training_data(validation: Any, data: Any) -> None:
    """Warns if the validation data are those of the training data, or copies."""
    if isinstance(data, Iterator):
        return
    trained = [x for x in jtu.tree_leaves(data) if is_member_array(x)]
    arrays = [x for x in jtu.tree_leaves(validation) if is_member_array(x)]
    if arrays and all(any(_same(x, other) for other in trained) for x in arrays):
        warn(
            f"`{caller()}` got the training data as `validation`: scores on them do not measure how well members "
            "generalise, and best weights, `patience` and `target` follow them.\nPass rows that are not in `data`."
        )


def _same(x: Any, other: Any) -> bool:
    if x is other or x.shape != other.shape or x.dtype != other.dtype or not jnp.issubdtype(x.dtype, jnp.number):
        return x is other
    return all(getattr(a, "is_fully_addressable", True) for a in (x, other)) and np.array_equal(x, other)
