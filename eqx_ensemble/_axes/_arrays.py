from typing import Any

import jax
import jax.numpy as jnp

from .._check import as_column, check_integers_fit
from .._foreign import from_foreign
from .._leaf_text import leaf_text
from .._pytree import PyTree
from ._check import too_large_message


def as_array(values: Any, *, path: str, name: str) -> jax.Array:
    """Values as a strongly typed JAX array; raises for integers that overflow."""
    values = from_foreign(values, path, name=name)
    check_integers_fit(values, argument=path, name=name)
    try:
        return strip_weak_types(jnp.asarray(values))
    except OverflowError as error:  # Python's own integers
        raise ValueError(too_large_message(values, path=path, name=name)) from error
    except TypeError as error:
        raise TypeError(f"`{name}` needs numbers at `{path}`, got {leaf_text(values)}.") from error


def strip_weak_types(tree: PyTree) -> PyTree:
    """Makes the weakly typed floating-point arrays of a tree strongly typed.

    `jnp.full(3, 0.1)` and `jnp.asarray(2.0)` are weakly typed: with bfloat16 they give bfloat16. The outputs of
    compiled programs and the arrays of files are strongly typed, so the same array would promote differently after
    training. Integer arrays do not affect the precision of others and are returned unchanged.
    """
    is_weak = lambda x: getattr(x, "weak_type", False) and jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.tree.map(lambda x: x.astype(x.dtype) if is_weak(x) else x, tree)


def where_members(chosen: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """`x` for the members where `chosen` `(members,)` is true, else `y`; both have the leading `members` axis."""
    return jnp.where(as_column(jnp.asarray(chosen), x.ndim), x, y)
