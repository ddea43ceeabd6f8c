from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..._check import check_floating_arrays, check_function, check_positive_scalar, kind_text, needs_message
from ..._pytree import PyTree

KERNEL = "lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2))"


def above_zero_message(name: str, argument: str, value: Any) -> str:
    """The message for a number that is not above zero."""
    return f"`{name}` needs `{argument}` to be above 0, got {value!r}."


def check_kernel(name: str, kernel: Any) -> None:
    """Raises unless `kernel` is callable."""
    check_function(kernel, "kernel", name=name, example=KERNEL)


def check_kernel_value(name: str, value: Any) -> Array:
    """Raises unless the value of a kernel is a floating-point scalar. Returns it."""
    shape, dtype = jnp.shape(value), getattr(value, "dtype", None)
    if shape != () or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        got = f"got shape {shape}" if shape else f"got {value!r}" if dtype is None else f"got dtype {dtype}"
        fix = f"It is called with two vectors `(size,)` and returns one number: `{KERNEL}`."
        raise TypeError(needs_message(name, "a `kernel` that returns a floating-point scalar", got, fix))
    return value


def check_particles(name: str, points: Any, scores: Any, active: Any) -> tuple[Array, Array, Array]:
    """Raises unless points and scores are `(members, size)`. Returns them, and booleans of the active members."""
    points, scores = check_floating_arrays(name, points=points, scores=scores)
    if points.ndim != 2 or points.shape[0] < 1:
        fix = "One particle: `x[None]`. Trees: `jax.vmap(lambda x: jax.flatten_util.ravel_pytree(x)[0])`."
        raise ValueError(needs_message(name, "`points` of shape (members, size)", f"got shape {points.shape}", fix))
    if active is None:
        return points, scores, jnp.ones(points.shape[:1], bool)
    taking_part = jnp.asarray(active)
    if taking_part.dtype != bool or taking_part.shape != points.shape[:1]:
        got = f"got dtype {taking_part.dtype}, shape {taking_part.shape}"
        needs = f"one boolean per member as `active` ({points.shape[0]},)"
        raise TypeError(needs_message(name, needs, got, "From metrics: `metrics.status == ee.train.Status.OK`."))
    return points, scores, taking_part


def check_num_rows(name: str, num_rows: Any) -> None:
    """Raises unless `num_rows` is one number above zero."""
    fix = "It is the number of all training rows; for a loss that is a sum over rows, 1."
    check_positive_scalar(name, "num_rows", num_rows, jnp.result_type(float), fix=fix)


def check_real_weights(name: str, params: PyTree) -> None:
    """Raises for complex weights: kernels are functions of real vectors."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            got = f"got {leaf.dtype} at `{jax.tree_util.keystr(path)}`"
            raise TypeError(needs_message(name, "real weights", got, "Leave it out with `trainable=` of `train.init`."))


def check_outputs(name: str, outputs: PyTree) -> None:
    """Raises unless `outputs` returns floating-point arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(outputs)
    for path, leaf in leaves:
        if not (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)):
            kind = leaf.dtype if isinstance(leaf, jax.Array) else kind_text(leaf)
            got = f"got {kind} at `outputs{jax.tree_util.keystr(path)}`"
            fix = "Return logits or means, and no labels."
            raise TypeError(needs_message(name, "floating-point arrays from `outputs`", got, fix))
    if not leaves:
        raise TypeError(needs_message(name, "an array from `outputs`", f"got {outputs!r}", "Is a `return` missing?"))


def check_stateless(name: str, model_state: Any) -> None:
    """Raises for stateful members."""
    if model_state is not None:
        raise NotImplementedError(
            f"`{name}` takes members without state.\n"
            "Use `methods.particles.make_step`, or layers without running statistics, such as `eqx.nn.LayerNorm`."
        )


def no_values_message(name: str) -> str:
    """The message for an optimiser that evaluates the loss, such as a line search."""
    return (
        f"`{name}` moves members along a direction that is not the gradient of their loss; this optimiser evaluates "
        "the loss again.\nUse one without a line search, such as `optax.adam`."
    )
