import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._axes import Each
from ..._check import (
    check_array,
    check_labels,
    check_nonnegative,
    concrete,
    first_text,
    kept_rows,
    kind_text,
    needs_message,
)


def check_pair(data: Any, *, name: str) -> tuple[Any, Any]:
    """Raises unless `data` is a pair. Returns inputs and targets."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise TypeError(f"`{name}` needs `data` to be a pair `(inputs, targets)`, got {kind_text(data)}.")
    return data[0], data[1]


def check_row_weights(values: Any, kept: Any, num_rows: int, num_members: int, *, name: str) -> Any:
    """Raises for invalid row weights, shared or in an `Each`. Returns them, with zeros for masked rows."""
    own = isinstance(values, Each)
    expected = (num_members, num_rows) if own else (num_rows,)
    given = values.per_member() if isinstance(values, Each) else values
    array = jnp.ones(expected) if given is None else check_array(name, "row_weights", given)
    if array.shape != expected:
        fix = "Weights of each member, `(members, rows)`, are marked: `ee.Each(ee.resample.counts(rows, num_rows))`."
        got = f"expected {expected}, got {array.shape}"
        raise ValueError(needs_message(name, "one of `row_weights` per row", got, fix))
    check_nonnegative(name, "row_weights", array, fix="They are how often each row counts.", mask=kept)
    array = jnp.where(True if kept is None else kept, array, jnp.zeros((), array.dtype))
    array = array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.result_type(float))
    host = concrete(array)
    if host is not None and not host.any(axis=-1).all():
        fix = "All rows are masked or have weight zero: is the mask inverted?"
        raise ValueError(needs_message(name, "`row_weights` that leave a row", "got only zeros", fix))
    return Each(array) if own else array


def check_outputs(shape: Any, likelihood: str, *, name: str) -> None:
    """Raises unless the output is one floating-point array with a shape that matches the likelihood."""
    if not isinstance(shape, jax.ShapeDtypeStruct) or not jnp.issubdtype(shape.dtype, jnp.floating):
        got = f"{shape.dtype} of shape {shape.shape}" if isinstance(shape, jax.ShapeDtypeStruct) else kind_text(shape)
        raise TypeError(
            f"`{name}` needs members with one floating-point array of outputs for a row, got {got}.\n"
            "For a part of what they return pass `fn=lambda model, x: model(x)[0]`."
        )
    wanted = {
        "binary": (math.prod(shape.shape) == 1, "one logit per row", "Two logits or more are a `classification`."),
        "classification": (
            len(shape.shape) == 1 and shape.shape[0] > 1,
            "a logit for each of two classes or more",
            'One logit, of a sigmoid, is `likelihood="binary"`.',
        ),
        "regression": (math.prod(shape.shape) > 0, "at least one output", "Is the output size of the last layer zero?"),
    }
    fits, needs, fix = wanted[likelihood]
    if not fits:
        raise ValueError(
            needs_message(name, f"members with {needs} for `likelihood={likelihood!r}`", f"got {shape.shape}", fix)
        )


def check_targets(targets: Any, likelihood: str, shape: tuple[int, ...], mask: Any, *, name: str) -> Any:
    """Raises unless targets match the outputs. Returns targets `(rows, out)` or labels `(rows,)`, or an `Each`."""
    own = isinstance(targets, Each)
    array = check_array(name, "data[1]", targets.per_member() if isinstance(targets, Each) else targets)
    rows = array.shape[: 1 + own]
    if likelihood == "classification":
        logits = np.broadcast_to(np.float32(0), (*rows, *shape))  # only for its shape
        checked = check_labels(name, array, jnp.asarray(logits), mask, argument="outputs", members=False)
    else:
        checked = _check_values(array, likelihood, rows, shape, mask, name)
    return Each(checked) if own else checked


def _check_values(array: Any, likelihood: str, rows: Any, shape: Any, mask: Any, name: str) -> Any:
    size = math.prod(shape)
    if array.shape != (*rows, *shape) and not (size == 1 and array.size == math.prod(rows)):
        got = f"expected {(*rows, *shape)}, got {array.shape}"
        fix = "Targets have the shape of the outputs, with the rows in front."
        raise ValueError(needs_message(name, "one target per output and row", got, fix))
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        fix = "For complex targets pass the real and imaginary parts as two outputs."
        raise TypeError(needs_message(name, "targets that are real numbers", f"got {array.dtype}", fix))
    flat = array.reshape(*rows, size)
    if likelihood != "binary":
        return flat
    host, kept = concrete(array), kept_rows(mask)
    if host is not None and kept is not None:
        wrong = ~np.isin(host.reshape(rows), (0, 1)) & kept
        if wrong.any():
            fix = "Labels -1 and 1? Pass `(labels + 1) // 2`. Soft labels are not supported."
            raise ValueError(needs_message(name, "labels 0 and 1", first_text(host.reshape(rows), wrong), fix))
    return flat
