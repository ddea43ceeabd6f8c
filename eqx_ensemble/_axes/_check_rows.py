import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._caller import caller
from .._check import MemberMismatchError, check_in_range, is_traced, kind_text
from .._warnings import warn
from ._marks import Batch, Each, is_per_member

UNBOUND_AXIS = re.compile(r"unbound axis name:? '?(\w+)")  # in errors of JAX


def check_rows_of_data(data: Any, num_members: int, *, argument: str, finite: bool = True, least: int = 1) -> int:
    """Raises unless all arrays have the same number of rows, at least `least`, and are finite if `finite`. Returns it.

    Arrays are `(rows, ...)`, in an `Each` `(members, rows, ...)`.
    """
    sizes: dict[int, str] = {}
    for path, x, axis in _data_leaves(data, argument):
        _numeric(x, path)
        check_in_range(x, path=path)
        if axis == 1 and x.shape[:1] != (num_members,):
            raise MemberMismatchError(
                f"`{caller()}` needs one data set per member in the `Each` of `{argument}`; at `{path}`: expected "
                f"({num_members}, rows, ...), got {x.shape}."
            )
        if x.ndim <= axis:
            raise ValueError(
                f"`{caller()}` needs arrays with one row per example in `{argument}`; at `{path}`: got shape {x.shape}."
            )
        sizes.setdefault(x.shape[axis], path)
        if finite:
            _finite(x, path)
    if not sizes:
        raise TypeError(f"`{caller()}` needs at least one array in `{argument}`, got {kind_text(data)}.")
    if len(sizes) > 1:
        listed = ", ".join(f"{rows} rows at `{path}`" for rows, path in sizes.items())
        hint = "\nRows one by one, as from `zip(x, y)`? Pass `(x, y)`: an iterable holds whole batches."
        raise ValueError(
            f"`{caller()}` needs arrays of one length in `{argument}`; got "
            f"{listed}.{hint if argument == 'batch' else ''}"
        )
    rows = next(iter(sizes))
    if rows < least:
        raise ValueError(f"`{caller()}` needs at least one row in `{argument}`, got none.")
    return rows


def check_some_rows(batch: Any) -> None:
    """Raises for a batch without rows, whose loss would be NaN. Arrays are as for `check_rows_of_data`."""
    sizes = [x.shape[axis] for _, x, axis in _data_leaves(batch, "batch") if np.ndim(x) > axis]
    if sizes and not any(sizes):
        raise ValueError(
            f"`{caller()}` needs at least one row in a batch, got none: the mean over no rows is NaN, and all members "
            "would count as diverged.\nLeave empty batches out."
        )


def warn_of_unmarked(batch: Any, num_members: int) -> None:
    """Warns of an array with an axis `members` and rows that is not marked, beside others of so many rows."""
    nodes = jtu.tree_flatten_with_path(batch, is_leaf=is_per_member)[0]
    marked = [np.shape(x) for _, node in nodes if isinstance(node, Each) for x in jax.tree.leaves(node.per_member())]
    shared = [(path, np.shape(x)) for path, x in nodes if not is_per_member(x)]
    rows = {shape[1] for shape in marked if len(shape) > 1} | {shape[0] for _, shape in shared if shape}
    for path, shape in shared:
        if len(shape) > 1 and shape[0] == num_members and shape[1] in rows - {num_members}:
            warn(
                f"`{caller()}` gives all of `batch{jtu.keystr(path)}`, {shape}, to every member, while other parts of "
                f"the batch have {shape[1]} rows: for one part for each of {num_members} members, mark it `Each`."
            )


def _data_leaves(data: Any, argument: str) -> Iterator[tuple[str, Any, int]]:
    """The leaves of a data set, with their paths and the axes of their rows."""
    for keys, node in jtu.tree_flatten_with_path(data, is_leaf=lambda x: isinstance(x, Each))[0]:
        path = argument + jtu.keystr(keys)
        if not isinstance(node, Each):
            yield path, node, 0
            continue
        for inner, leaf in jtu.tree_flatten_with_path(node.per_member())[0]:
            yield path + jtu.keystr(inner), leaf, 1


def _numeric(x: Any, path: str) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        fix = "Convert tables and lists first, for example `np.asarray(table)`."
        if callable(x):
            fix = "Call it, and pass the arrays that it returns."
        raise TypeError(f"`{caller()}` needs arrays in its data; at `{path}`: {kind_text(x)}.\n{fix}")
    if isinstance(x, np.ndarray) and not x.dtype.isnative:
        raise TypeError(
            f"`{caller()}` needs arrays in this machine's byte order; at `{path}`: dtype {x.dtype.str}.\n"
            "Convert them: `x.astype(x.dtype.newbyteorder('='))`."
        )
    if isinstance(x, np.ndarray) and x.dtype.kind not in "biufcV":
        raise TypeError(
            f"`{caller()}` needs arrays of numbers; at `{path}`: dtype {x.dtype}.\nEncode labels as integers."
        )


def _finite(x: Any, path: str) -> None:
    if text := _not_finite(x, path):
        raise ValueError(f"`{caller()}` needs finite numbers; {text}.\nDrop or impute those rows.")


def not_finite_text(data: Any, *, argument: str) -> str:
    """The first array of a data set that is not finite, in words; empty if all are finite."""
    return next(filter(None, (_not_finite(x, path) for path, x, _ in _data_leaves(data, argument))), "")


def _not_finite(x: Any, path: str) -> str:
    if is_traced(x) or not jnp.issubdtype(x.dtype, jnp.floating) or is_finite(x):
        return ""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return f"the array at `{path}` holds NaN or infinite values"
    bad = ~np.isfinite(np.asarray(x))
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"the array at `{path}` holds {int(bad.sum())} NaN or infinite values, the first at index {first}"


def is_finite(x: Any) -> bool:
    """Whether all elements of a floating-point array are finite."""
    far = isinstance(x, jax.Array) and (not x.is_fully_addressable or any(d.platform != "cpu" for d in x.devices()))
    if far:  # reduced on its own device
        return bool(jnp.all(jnp.isfinite(x)))
    # An element that is not finite makes the sum so. A finite array may overflow: only then all elements are checked.
    x = np.asarray(x)
    own = x.dtype if x.dtype.itemsize > 2 else np.float32  # summing in another dtype takes several times as long
    with np.errstate(over="ignore", invalid="ignore"):
        total = x.sum(dtype=own)
    return bool(np.isfinite(total) or np.isfinite(x).all())


@contextlib.contextmanager
def explain_rows(data: Any, *, argument: str = "x") -> Iterator[None]:
    """Adds the shape of a row to an error raised by a member."""
    try:
        yield
    except (TypeError, ValueError) as error:
        rows = dict.fromkeys(str(tuple(leaf.shape[axis + 1 :])) for _, leaf, axis in _data_leaves(data, argument))
        note = f"`{caller()}` calls a member with one row of `{argument}`; here a row has shape {', '.join(rows)}."
        if list(rows) == ["()"]:
            note += f" For a single example pass `{argument}[None]`."
        elif isinstance(data, tuple | list):
            note += f" A {type(data).__name__} is one argument of the member: pass inputs without targets."
        error.add_note(note)
        raise
    except NameError as error:
        if unbound := UNBOUND_AXIS.search(str(error)):
            error.add_note(
                f"`{caller()}` maps members over rows, without a batch axis {unbound[1]!r}: layers such as BatchNorm "
                "predict in inference mode.\nLeave out `inference=False`, or set `inference=True` in the layer."
            )
        raise


def check_no_batch(data: Any) -> None:
    """Raises for a `Batch`, which only an ensemble that is called takes."""
    is_batch = lambda x: isinstance(x, Batch)
    if any(map(is_batch, jax.tree.leaves(data, is_leaf=is_batch))):
        raise TypeError(f"`{caller()}` takes the rows as they are: pass `x` instead of `Batch(x)`.")
