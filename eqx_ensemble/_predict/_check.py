from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._caller import caller
from .._check import check_optional_flag
from .._combination import AbstractCombination, check_chunk_weights, scale_weights


def check_combine(combine: Any, weights: Any, num_members: int, num_rows: int) -> Any:
    """Checks `combine` and returns the weights as an array, one per member, or one per member and row."""
    if combine is None:
        if weights is not None:
            raise TypeError("`predict` takes `weights` for `combine`: weights have no effect without it.")
        return None
    if isinstance(combine, type) or not callable(combine):
        fix = f" Pass `{combine.__name__}(...)` instead of the class." if isinstance(combine, type) else ""
        raise TypeError(f"`predict` needs `combine` to be a function or a combination, got {combine!r}.{fix}")
    rows = () if isinstance(combine, AbstractCombination) else (num_rows,)
    if not rows and np.ndim(weights) == 2:
        raise ValueError(
            "`predict` needs one weight per member for a combination that takes some members at a time.\n"
            f"  expected shape ({num_members},), got {np.shape(weights)}\n"
            "Weights of each row are for functions, such as `combine=combine.mixture`, which see all members."
        )
    checked = None if weights is None else check_chunk_weights(weights, num_members, rows=rows)
    if isinstance(checked, np.ndarray) and checked.size and not checked.any():
        raise ValueError(f"`predict` needs `weights` that are not all zero, got {num_members} zeros.")
    if isinstance(checked, np.ndarray) and checked.ndim == 2 and not checked.any(axis=0).all():
        row = int(np.argmin(checked.any(axis=0)))
        raise ValueError(f"`predict` needs `weights` that are not all zero in any row, got only zeros in row {row}.")
    if not isinstance(checked, np.ndarray):
        return checked
    if not rows and checked.size:
        return scale_weights(checked)[0]  # float32 may not hold them; only ratios matter to a combination
    if rows and isinstance(weights, jax.Array) and jnp.issubdtype(weights.dtype, jnp.floating):
        return checked.astype(weights.dtype)  # functions of users get the dtype that they passed
    return checked


def check_inference(inference: Any, key: Any) -> bool:
    """Whether members are put into inference mode: with a key, which may be meant for dropout, there is no default."""
    check_optional_flag(inference, "inference")
    if inference is None and key is not None:
        raise ValueError(
            f"`{caller()}` needs `inference` with `key`: by default members are in inference mode, where dropout does "
            "nothing.\n"
            "For Monte-Carlo dropout pass `inference=False`; for members that draw random numbers in inference mode, "
            "`inference=True`."
        )
    return True if inference is None else bool(inference)


def check_rows_of_result(combined: Any, num_rows: int) -> None:
    """Raises unless the leading axis of every combined array is that of the rows."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(combined)]
    if not shapes or any(shape[:1] != (num_rows,) for shape in shapes):
        listed = ", ".join(map(str, shapes)) or "no array"
        raise ValueError(
            f"`{caller()}` needs a `combine` that treats rows independently and returns arrays `(rows, ...)`; it gave "
            f"{listed} for {num_rows} rows.\n"
            "To move an axis: `combine=lambda p: jnp.moveaxis(jnp.quantile(p, levels, axis=0), 0, -1)`. For "
            f"statistics over all rows, such as a mean over them, call the function on what `{caller()}` returns."
        )


def result_message(need: int, free: int, shapes: Any, *, combined: bool) -> str:
    """The message that there is no memory for the result."""
    listed = ", ".join(str(x.shape) for x in jax.tree.leaves(shapes))
    advice = "Call it with some rows at a time, and keep what is needed of their predictions."
    if not combined:
        advice = (
            "Combined predictions are smaller: `combine=combine.mean`, `.mixture` or `.vote`, and "
            "`uncertainty.decompose_entropy`, return arrays `(rows, ...)`."
        )
    return (
        f"`predict` has no memory for its result {listed}: {bytes_text(need)}, with {bytes_text(free)} free.\n{advice}"
    )


def bytes_text(count: int) -> str:
    """`1.5 MiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
