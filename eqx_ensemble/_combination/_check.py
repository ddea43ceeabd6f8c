from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._check import (
    Size,
    check_logits,
    check_moments,
    check_nonnegative_weights,
    check_values,
    check_weight_count,
    concrete,
)


def check_members(predictions: Any, *, name: str) -> Size:
    """Raises unless all predictions have the same leading axis of at least one member. Returns its length."""
    shapes = {np.shape(leaf) for leaf in jax.tree.leaves(predictions)}
    counts = {shape[:1] for shape in shapes}
    if len(counts) != 1 or counts & {(), (0,)}:
        raise ValueError(
            f"`{name}` needs predictions with a leading `members` axis of at least one member.\n"
            f"  got shapes {', '.join(map(str, sorted(shapes)))}\nOne member? Add a leading axis: `prediction[None]`."
        )
    return counts.pop()[0]


def check_chunk_weights(weights: Any, num_members: Size, *, name: str, rows: tuple[Size, ...] = ()) -> Any:
    """Raises unless a chunk's weights are finite and non-negative; all may be zero. Returns NumPy's array if concrete.

    With `rows`, the shape of the rows, weights per row are also accepted.
    """
    check_weight_count(weights, num_members, name=name, rows=rows)
    check_nonnegative_weights(name, weights)
    host = concrete(weights)
    if host is not None:
        return host.astype(np.float64)
    array = jnp.asarray(weights)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)


def check_seen(partial: Any, *, name: str) -> None:
    """Raises unless at least one member of positive weight was seen."""
    if partial is None:
        raise ValueError(f"`{name}` needs at least one member of positive weight before `finish`.")


def check_one_array(predictions: Any, *, name: str) -> Any:
    """Raises unless predictions are one array; NumPy would stack a tuple along a new axis."""
    if isinstance(predictions, tuple | list | dict):
        raise TypeError(
            f"`{name}` needs predictions that are one array, got {_several_text(predictions)}.\n"
            "Pairs `(mean, variance)` are for `combine.gaussian` and `uncertainty.decompose_variance`; to keep one of "
            "several outputs: `predict(..., fn=lambda model, x: model(x)[0])`."
        )
    return predictions


def check_pair(predictions: Any, *, name: str) -> tuple[Any, Any]:
    """Raises unless predictions are a pair of a mean and a variance. Returns both."""
    if not isinstance(predictions, tuple | list) or len(predictions) != 2:
        got = f"{type(predictions).__name__} of shape {np.shape(predictions)}"
        if isinstance(predictions, tuple | list | dict):
            got = _several_text(predictions)
        raise TypeError(
            f"`{name}` needs predictions that are a pair `(mean, variance)`, got {got}.\n"
            "Other outputs become a pair by `predict(..., fn=lambda model, x: (mean, variance))`; for point "
            "predictions use `combine.moments`."
        )
    return predictions[0], predictions[1]


def check_one_values(name: str, predictions: Any) -> Any:
    """Raises unless predictions are one floating-point array `(members, ...)`. Returns it."""
    return check_values(name, "predictions", check_one_array(predictions, name=name))


def check_one_logits(name: str, predictions: Any) -> Any:
    """Raises unless predictions are logits `(members, *batch, classes)`. Returns them."""
    return check_logits(name, check_one_array(predictions, name=name))


def check_pair_of_moments(name: str, predictions: Any) -> tuple[Any, ...]:
    """Raises unless predictions are means and variances of one shape. Returns both."""
    return check_moments(name, *check_pair(predictions, name=name))


def _several_text(predictions: Any) -> str:
    return f"a {type(predictions).__name__} of {len(predictions)}"
