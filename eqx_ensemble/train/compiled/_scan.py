from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..._pytree import PyTree


def trace_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, traced only by the first of several calls with the same shapes, and inlined into the calling program.

    Tracing a step takes as long as compiling a small one.
    """
    return jax.jit(lambda *args: fn(*args), inline=True)


def scan(
    body: Callable[[Any, Any], tuple[Any, Any, Bool[Array, ""]]],
    carry: PyTree,
    xs: PyTree,
    length: Int[Array, ""],
    *,
    room: int | None = None,
    slot: Callable[[Int[Array, ""]], Int[Array, ""]] = lambda i: i,
) -> tuple[PyTree, PyTree, Int[Array, ""]]:
    """`jax.lax.scan` over the first `length` of `xs`, known only at run time; `body` may end it early.

    The outputs of iteration `i` are put at `slot(i)` of `room`, by default at `i`; later ones overwrite earlier ones.

    If `xs` have only one element, there is no loop, because XLA's CPU convolutions are slow inside of loops and
    conditionals. The body then runs even if `length` is 0, and the caller reverts it.

    **Returns:** the carry; the outputs, zeros where nothing ran; and the number of iterations.
    """
    most = jax.tree.leaves(xs)[0].shape[0]
    if most == 1:
        carry, y, _ = body(carry, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda y: y[None], y), jnp.int32(1)
    body = trace_once(body)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
    out = jax.eval_shape(body, carry, one)[1]
    ys = jax.tree.map(lambda x: jnp.zeros((room or most, *x.shape), x.dtype), out)

    def step(state: tuple[Array, Array, PyTree, PyTree]) -> tuple[Array, Array, PyTree, PyTree]:
        i, _, carry, ys = state
        x = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), xs)
        carry, y, stop = body(carry, x)
        ys = jax.tree.map(lambda all, y: jax.lax.dynamic_update_index_in_dim(all, y, slot(i), 0), ys, y)
        return i + 1, stop, carry, ys

    start = (jnp.int32(0), jnp.bool_(0), carry, ys)
    count, _, carry, ys = jax.lax.while_loop(lambda state: (state[0] < length) & ~state[1], step, start)
    return carry, ys, count
