"""Convolutions as products of matrices, for loops on CPUs.

There XLA's convolutions are four to fourteen times slower than outside of a loop, and under `vmap` they are grouped
convolutions. A sum over shifted slices of the input, as one product of matrices, takes about as long as a convolution
outside of a loop; so does a maximum over shifted slices in place of a pooling.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from .._pytree import PyTree

_LARGEST = 64  # entries of a kernel or a window: each is a slice
_CALLS = ("jit", "pjit", "closed_call", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call")


def as_products(fn: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
    """`fn`, with its small convolutions and poolings replaced; equal but for rounding."""

    def replace(tree: PyTree) -> PyTree:
        program, shapes, static = eqx.filter_make_jaxpr(fn)(tree)
        out = _evaluate(program.jaxpr, program.consts, jax.tree.leaves(eqx.filter(tree, eqx.is_array)))
        return eqx.combine(jax.tree.unflatten(jax.tree.structure(shapes), out), static)

    return replace


def has_convolution(program: Any) -> bool:
    """Whether a program has a convolution that can be replaced."""
    program = getattr(program, "jaxpr", program)
    return any(
        (eqn.primitive.name == "conv_general_dilated" and _is_small(eqn)) or any(map(has_convolution, _inner(eqn)))
        for eqn in program.eqns
    )


def _inner(eqn: Any) -> list[Any]:
    is_program = lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
    return [
        x
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program)
        if is_program(x) and eqn.primitive.name in _CALLS
    ]


def _is_small(eqn: Any) -> bool:
    params, kernel = eqn.params, eqn.invars[1].aval
    is_plain = params["feature_group_count"] == params["batch_group_count"] == 1 and set(params["lhs_dilation"]) == {1}
    spatial = [kernel.shape[i] for i in params["dimension_numbers"].rhs_spec[2:]]
    return bool(is_plain and np.prod(spatial) <= _LARGEST and jnp.issubdtype(kernel.dtype, jnp.floating))


def _evaluate(program: Jaxpr, consts: Any, args: list[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip([*program.constvars, *program.invars], [*consts, *args], strict=True))
    read = lambda x: x.val if isinstance(x, Literal) else values[x]
    for eqn in program.eqns:
        given, name, inner = [read(x) for x in eqn.invars], eqn.primitive.name, _inner(eqn)
        if name == "conv_general_dilated" and _is_small(eqn):
            out = [_product(*given, **eqn.params)]
        elif name == "reduce_window_max" and np.prod(eqn.params["window_dimensions"]) <= _LARGEST:
            out = [_maximum(*given, **eqn.params)]
        elif any(map(has_convolution, inner)):
            closed = inner[0] if isinstance(inner[0], ClosedJaxpr) else ClosedJaxpr(inner[0], ())
            out = _evaluate(closed.jaxpr, closed.consts, given)
        else:
            out = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(eqn.params))
            out = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(x) for x in program.outvars]


def _shifts(x: Any, window: Any, strides: Any, dilation: Any) -> Iterator[Any]:
    """Slices of an array, one for each entry of a window over all its axes."""
    spread = [(n - 1) * d + 1 for n, d in zip(window, dilation, strict=True)]
    size = [(n - k) // s + 1 for n, k, s in zip(x.shape, spread, strides, strict=True)]
    for entry in itertools.product(*map(range, window)):
        start = [i * d for i, d in zip(entry, dilation, strict=True)]
        stop = [first + (n - 1) * step + 1 for first, n, step in zip(start, size, strides, strict=True)]
        yield jax.lax.slice(x, start, stop, strides)


def _product(
    x: Any, kernel: Any, *, window_strides: Any, padding: Any, rhs_dilation: Any, dimension_numbers: Any,
    preferred_element_type: Any, precision: Any, **_: Any,
) -> Any:  # fmt: skip
    """A convolution as a product."""
    batch, channels, *space = dimension_numbers.lhs_spec
    x = jnp.transpose(x, (batch, *space, channels))
    widths = [(0, 0, 0), *((low, high, 0) for low, high in padding), (0, 0, 0)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
    out, into, *space = dimension_numbers.rhs_spec
    window = [kernel.shape[i] for i in space]
    # Only space has a window: an entry of one along the other axes takes all of them.
    slices = _shifts(x, [1, *window, 1], [1, *window_strides, 1], [1, *rhs_dilation, 1])
    columns = jnp.concatenate([*slices], axis=-1)  # batch, space, entries of the window and channels
    weights = jnp.transpose(kernel, (*space, into, out)).reshape(-1, kernel.shape[out])
    y = jnp.matmul(columns, weights, precision=precision, preferred_element_type=preferred_element_type)
    order = dimension_numbers.out_spec  # the axes of batch, channels and space in the result
    return jnp.transpose(jnp.moveaxis(y, -1, 1), np.argsort(order).tolist())


def _maximum(
    x: Any, *, window_dimensions: Any, window_strides: Any, padding: Any, base_dilation: Any, window_dilation: Any
) -> Any:
    """A pooling by the maximum; among equals the first one has the gradient, as in `reduce_window`."""
    low = jnp.asarray(-jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min, x.dtype)
    widths = [(first, last, n - 1) for (first, last), n in zip(padding, base_dilation, strict=True)]
    slices = _shifts(jax.lax.pad(x, low, widths), window_dimensions, window_strides, window_dilation)
    best, *others = slices
    for other in others:
        best = jnp.where((other > best) | (other != other), other, best)
    return best
