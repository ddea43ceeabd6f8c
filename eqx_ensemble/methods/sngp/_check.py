from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..._check import check_number, check_positive_int, is_traced, kind_text
from ..._leaf_text import leaf_text

_MODEL = "methods.sngp.SNGP"


def check_positive_number(value: Any, argument: str, *, name: str) -> float:
    """Raises unless `value` is a finite number above zero. Returns it."""
    number = check_number(value, argument, name=name)
    if number <= 0:
        raise ValueError(f"`{name}` needs `{argument}` to be above 0, got {value!r}.")
    return number


def check_outputs(out_size: Any, likelihood: str) -> int:
    """Raises unless the likelihood supports this number of outputs. Returns it."""
    size = check_positive_int(out_size, "out_size", name=_MODEL)
    if likelihood == "bernoulli" and size != 1:
        raise ValueError(f"`{_MODEL}` needs `out_size=1` for `likelihood='bernoulli'`, got {size}: it has one logit.")
    if likelihood == "categorical" and size < 2:
        raise ValueError(
            f"`{_MODEL}` needs `out_size` of at least two classes for `likelihood='categorical'`, got {size}."
        )
    return size


def check_hidden(hidden: Any, in_size: int) -> None:
    """Raises unless `hidden` holds the floating-point hidden units of one row."""
    if not isinstance(hidden, jax.Array) or hidden.shape != (in_size,):
        got = leaf_text(hidden) if isinstance(hidden, jax.Array) else kind_text(hidden)
        raise ValueError(
            f"`{_MODEL}` needs a network that gives `in_size` hidden units of one row, ({in_size},), got {got}.\n"
            "A batch of rows? Map the model: `jax.vmap(model)(x)`."
        )
    if not jnp.issubdtype(hidden.dtype, jnp.floating):
        raise TypeError(f"`{_MODEL}` needs floating-point hidden units, got {leaf_text(hidden)}.")


def check_sngp(stacked: Any, kind: type) -> None:
    """Raises unless members are `SNGP`."""
    if not isinstance(stacked, kind):
        raise TypeError(
            f"`methods.sngp.update_covariance` needs members that are `SNGP`, got {kind_text(stacked)}.\n"
            "Make them so: `methods.sngp.SNGP(network, in_size, out_size, key=key)`."
        )


def check_bound(bound: Any, *, name: str) -> None:
    """Raises unless `bound` is a number above zero; a traced one is not checked."""
    if is_traced(bound):
        if bound.ndim:
            raise TypeError(f"`{name}` needs one number `bound` per member, got {leaf_text(bound)}.")
        return
    check_positive_number(
        bound.item() if isinstance(bound, jax.Array) and bound.ndim == 0 else bound, "bound", name=name
    )


def check_matrices(select: Callable[[Any], Any], positions: Any, leaves: list[Any], *, name: str) -> list[int]:
    """Raises unless an array of two or more axes is selected. Returns the positions of all such arrays."""
    fix = "Say which parts are bounded: `where=lambda model: model.layers[:-1]`."
    try:
        selected = jax.tree.leaves(select(positions))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"`{name}` needs `where` to select parts of a member; it raised an error.\n{fix}") from error
    found = [i for i in selected if isinstance(i, int) and not isinstance(i, bool) and leaves[i].ndim >= 2]
    if not found:
        raise ValueError(f"`{name}` needs `where` to select trained arrays of two or more axes, got none.\n{fix}")
    complex_ones = [leaves[i] for i in found if jnp.iscomplexobj(leaves[i])]
    if complex_ones:
        raise TypeError(f"`{name}` needs real weights, got {leaf_text(complex_ones[0])}.")
    return found


def params_message(name: str) -> str:
    """The message for an `update` without weights."""
    return f"`{name}` bounds weights: call `update(grads, state, params)` with the weights."
