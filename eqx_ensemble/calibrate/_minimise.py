from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from .._promotion import standard_promotion
from .._pytree import PyTree


class Minimum(NamedTuple):
    """The minimiser of a function, and whether its gradient vanishes there."""

    at: PyTree
    flat: Bool[Array, ""]


def minimise(
    fn: Callable[[PyTree], Float[Array, ""]], start: PyTree, scale: Float[Array, ""], max_steps: int
) -> Minimum:
    """The minimum of a smooth convex function by L-BFGS; `scale` is the scale of its gradients."""
    optimiser = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(fn)
    precision = jnp.finfo(scale.dtype).eps * scale

    def step(carry: tuple) -> tuple:
        params, state, *_, count = carry
        value, grad = value_and_grad(params, state=state)
        updates, new_state = optimiser.update(grad, state, params, value=value, grad=grad, value_fn=fn)
        new_params = optax.apply_updates(params, updates)
        return new_params, _cast_like(new_state, state), _largest(grad), _largest(updates), count + 1

    def goes_on(carry: tuple) -> Array:
        *_, slope, moved, count = carry
        return (slope > precision) & (moved > 0) & (count < max_steps)

    # optax promotes dtypes and ranks, which the user's configuration may forbid.
    with standard_promotion():
        state = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), optimiser.init(start))
        far = jnp.asarray(jnp.inf, scale.dtype)
        params, *_ = jax.lax.while_loop(goes_on, step, (start, state, far, far, 0))
        # Rounding of the value ends a line search at gradients of about the square root of the rounding.
        flat = _largest(jax.grad(fn)(params)) <= 10 * jnp.sqrt(precision * scale)
    return Minimum(params, flat)


def _largest(tree: PyTree) -> Float[Array, ""]:
    return jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(tree)]))


def _cast_like(new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), new, old)
