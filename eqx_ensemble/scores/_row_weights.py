"""The arguments `row_weights` and `mask`, merged into one array of row weights for compiled scores."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Shaped

from .._check import check_array, check_mask, check_nonnegative, concrete, kept_rows, needs_message
from .._weighting import blank_masked
from ._reduce import RowWeights, counts


class CountedRows(NamedTuple):
    """Row weights and the mask of rows to include, `None` for equal rows; `known` is the mask as checks can read it."""

    weights: RowWeights | None = None
    mask: Array | None = None
    known: ArrayLike | None = None

    def blank(self, values: Shaped[Array, "..."], *, before: int = 0, fill: ArrayLike = 0) -> Shaped[Array, "..."]:
        """The values, overwritten in ignored rows; `before` is the number of axes before those of the rows."""
        return blank_masked(values, self.mask, before=before, fill=fill)


def check_rows(
    name: str, row_weights: ArrayLike | None, mask: ArrayLike | None, shape: tuple[int, ...], dtype: jnp.dtype
) -> CountedRows:
    """Raises for an invalid mask or invalid row weights. Returns them, with weights scaled to a maximum below two."""
    kept = check_mask(name, mask, shape)
    if row_weights is None:
        return CountedRows(kept, kept, mask)
    array = check_row_weights(name, row_weights, shape, mask)
    host, known = concrete(row_weights), kept_rows(mask)
    if host is not None and known is not None:
        exact = np.where(known, host.astype(np.float64), 0)
        # By a power of two: integer weights remain exact.
        scaled = np.ldexp(exact, 1 - np.frexp(exact.max(initial=0))[1]).astype(dtype)
        return CountedRows(jnp.asarray(scaled), jnp.asarray(scaled != 0), scaled != 0)
    converted = array.astype(dtype) if kept is None else jnp.where(kept, array.astype(dtype), 0)
    # Values of weight zero are overwritten, so the gradient of such a weight would be wrong: it is set to zero.
    converted = jnp.where(converted == 0, 0, converted)
    exponent = jnp.frexp(jax.lax.stop_gradient(jnp.max(converted, initial=0)))[1]
    weights = jnp.ldexp(converted, 1 - exponent)
    return CountedRows(weights, counts(weights), counts(weights))


def check_row_weights(name: str, row_weights: ArrayLike, shape: tuple[int, ...], mask: ArrayLike | None) -> Array:
    """Raises unless there is one real, finite, non-negative weight per row, not all zero, in rows that `mask` keeps."""
    with np.errstate(over="ignore"):  # of float64 weights, which are scaled where concrete
        array = check_array(name, "row_weights", row_weights)
    if array.dtype == bool or jnp.issubdtype(array.dtype, jnp.complexfloating):
        fix = "Use `mask` to exclude rows; `row_weights` are numbers."
        raise TypeError(
            needs_message(name, "real numbers as `row_weights`", f"got dtype {array.dtype}, shape {array.shape}", fix)
        )
    if array.shape != shape:
        fix = "Nothing is broadcast. Weights of members are `weights`."
        if array.ndim < len(shape) and array.shape == shape[: array.ndim]:
            fix = "Several entries per row? Pass `jnp.broadcast_to(row_weights[:, None], targets.shape)`."
        got = f"expected shape {shape}, got {array.shape}"
        raise ValueError(needs_message(name, "one of `row_weights` per row", got, fix))
    if math.prod(shape) > 0:
        fix = "A row of weight zero does not count; a weight of two counts a row twice."
        check_nonnegative(name, "row_weights", row_weights, fix=fix, mask=mask, all_zero=False)
    return array
