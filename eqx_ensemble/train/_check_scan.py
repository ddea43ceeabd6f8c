import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from .._check import check_positive_int, is_member_array, kind_text
from .._leaf_text import leaf_text
from .._pytree import PyTree

_STACK = "Stack a list of batches by `jax.tree.map(lambda *xs: jnp.stack(xs), *batches)`."


@contextlib.contextmanager
def explain_list(batches: Any) -> Iterator[None]:
    """Adds to an error of a step that it got a list of batches, if it did."""
    try:
        yield
    except Exception as error:
        if isinstance(batches, list) and batches and all(isinstance(item, tuple | list | dict) for item in batches):
            error.add_note(f"`batches` is a list, and each step got one row of every array in it. {_STACK}")
        raise


def check_batches(batches: PyTree, length: Any, *, name: str) -> int:
    """Raises for invalid batches. Returns the number of steps: their leading axis, or `length` without batches."""
    if length is not None:
        check_positive_int(length, "length", name=name)
    sizes: dict[int, str] = {}
    for path, leaf in _leaves(batches):
        where = f"`batches{jax.tree_util.keystr(path)}`"
        if not is_member_array(leaf):
            raise TypeError(
                f"`{name}` needs `batches` to be arrays with a leading axis of steps; {where} is {kind_text(leaf)}.\n"
                + _STACK
            )
        if leaf.ndim == 0:
            raise ValueError(
                f"`{name}` needs `batches` to be arrays with a leading axis of steps; {where} is {leaf_text(leaf)}.\n"
                "Repeat what is the same in every step, or let the step close over it."
            )
        sizes.setdefault(leaf.shape[0], f"  at {where}: {leaf.shape[0]} ({leaf_text(leaf)})")
    if not sizes and length is None:
        raise ValueError(f"`{name}` needs `batches`, or `length` for steps without a batch; got neither.")
    if len(sizes) > 1:
        listed = "\n".join(sizes.values())
        raise ValueError(
            f"`{name}` needs batches with one number of steps; their leading axes differ.\n{listed}\n{_STACK}"
        )
    count = next(iter(sizes)) if sizes else int(length or 0)
    if count == 0:
        raise ValueError(f"`{name}` needs at least one step; the leading axis of `batches` is 0.")
    if length is not None and count != length:
        raise ValueError(
            f"`{name}` needs `length` to be the number of batches; expected {count}, got {length}.\n"
            "Leave `length` out where there are batches."
        )
    return count


def _leaves(batches: Any) -> list[tuple[tuple, Any]]:
    if isinstance(batches, Iterator):  # JAX warns of flattening one
        return [((), batches)]
    return jax.tree_util.tree_flatten_with_path(batches)[0]


def check_stepped(value: Any, *, name: str) -> None:
    """Raises unless `value`, the result of a step, is a pair."""
    if not (isinstance(value, tuple) and len(value) == 2):
        got = f"a tuple of {len(value)}" if isinstance(value, tuple) else kind_text(value)
        raise TypeError(
            f"`{name}` needs `step` to return `(state, outputs)`, got {got}.\nWithout outputs: `(state, None)`."
        )
