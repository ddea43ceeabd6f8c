from typing import Any

from jax import Array
from jax.typing import ArrayLike

from .._check import (
    check_values,
    kind_text,
    needs_message,
)
from ._folds import Folds


def check_held_out(
    name: str, predictions: ArrayLike, shape: tuple[int, ...] | None = None, axes: str = "rows"
) -> Array:
    """Raises unless predictions are `(members, rows, ...)`. Returns them in the compute dtype."""
    array = check_values(name, "predictions", predictions)
    if array.ndim < 2:
        fix = "One member? Add a leading axis: `predictions[None]`."
        raise ValueError(
            needs_message(name, "`predictions` of shape (members, rows, ...)", f"got shape {array.shape}", fix)
        )
    if shape is not None and array.shape[:2] != shape:
        fix = 'Predictions of all rows are `rows="all"`, of `folds.test` alone `rows="test"`.'
        got = f"expected ({shape[0]}, {shape[1]}, ...), got {array.shape}"
        raise ValueError(
            needs_message(name, f"`predictions` (members, {axes}, ...) of the members and rows of the folds", got, fix)
        )
    return array


def check_folds(name: str, value: Any) -> None:
    """Raises unless the argument is a `Folds`."""
    if not isinstance(value, Folds):
        fix = "For other splits use `from_splits(splits, num_rows)`."
        raise TypeError(needs_message(name, "`folds` to be a `Folds`", f"got {kind_text(value)}", fix))
