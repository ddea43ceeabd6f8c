import functools as ft
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._pytree import PyTree
from .._warnings import ignore_warnings
from ._outer import Outer, outer_operations

_ANOTHER_SIZE = 1009  # a prime, so that no other length is a product with it


def warn_of_two_batch_axes(fn: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Warns once if `fn(*arguments, **named)`, a loss of one member, makes two batch axes by implicit rank promotion.

    The arguments are shapes, the last two of them those of the batch and the key. The loss is traced again with another
    batch size: a length that equals the batch size by chance, such as a layer's, does not change with it.
    """
    *before, batch, key = arguments
    sizes = [x.shape[0] for x in jax.tree.leaves(batch) if _is_struct(x) and x.shape]
    if not sizes or sizes[0] < 2 or _is_known(fn, *_without_batch_size((arguments, named))):
        return
    found = [outer for outer in _outers(fn, arguments, named) if outer.lengths == (sizes[0],) * 2]
    if not found:
        return
    resized = jax.tree.map(lambda x: _resize(x, sizes[0]), batch)
    again = _outers(fn, (*before, resized, key), named)
    lines = {(outer.file, outer.line) for outer in again if outer.lengths == (_ANOTHER_SIZE,) * 2}
    for outer in {(outer.file, outer.line): outer for outer in found if (outer.file, outer.line) in lines}.values():
        rows = sizes[0]
        message = (
            f"The loss `{getattr(fn, '__name__', type(fn).__name__)}` broadcasts the batch axis against itself: line "
            f"{outer.line} of {outer.file} combines arrays of shapes {outer.shapes[0]} and {outer.shapes[1]}, and "
            f"every row is combined with all {rows} rows.\n"
            "Give both one shape, for example `jax.vmap(model)(x)[:, 0]` or `y[:, None]`. If all pairs are meant, "
            "write both axes: `a[:, None] - b[None, :]`."
        )
        warnings.warn_explicit(message, UserWarning, outer.file, outer.line)


def _resize(x: Any, size: int) -> Any:
    if not _is_struct(x) or x.shape[:1] != (size,):
        return x
    return jax.ShapeDtypeStruct((_ANOTHER_SIZE, *x.shape[1:]), x.dtype)


def _without_batch_size(args: PyTree) -> tuple[Any, tuple]:
    """The arguments without batch sizes, which change from step to step."""
    leaves, treedef = jax.tree.flatten(args)
    return treedef, tuple((x.shape[1:], x.dtype) if _is_struct(x) else x for x in leaves)


def _is_struct(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _is_known(fn: Callable[..., Any], treedef: Any, leaves: tuple) -> bool:
    """Whether the function was analysed with such arguments before."""
    marks = _marks(fn, treedef, leaves)
    marks.append(True)
    return len(marks) > 1


@ft.lru_cache(maxsize=256)
def _marks(fn: Callable[..., Any], treedef: Any, leaves: tuple) -> list[bool]:
    del fn, treedef, leaves
    return []


def _outers(fn: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Outer]:
    with ignore_warnings():  # the trace for training has shown the loss's own
        try:
            closed, _, _ = eqx.filter_make_jaxpr(fn)(*arguments, **named)
            return outer_operations(closed.jaxpr)
        except Exception:  # a loss for one batch size only, or a new kind of program: training continues
            return []
