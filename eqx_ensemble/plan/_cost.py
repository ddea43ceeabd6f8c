import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from .. import _axes
from .._jaxpr import inner_jaxprs
from .._pytree import PyTree
from ._plans import AbstractPlan


class Cost(NamedTuple):
    """The cost of a function of one member, as far as the choice of a plan depends on it.

    **Attributes:**

    - `flops`: operations in matrix products and convolutions; those in a loop count as often as it runs, if known.
    - `bytes`: the sum of all intermediate arrays, an upper bound for one member, apart from libraries' scratch memory.
    - `convolutions`, `batched_products`, `loops`: how many of each; batched matrix products are typical of attention.
    - `callbacks`: the number of calls of Python, such as `equinox.error_if`. They can raise while a program runs.
    """

    flops: int
    bytes: int
    convolutions: int
    batched_products: int
    loops: int
    callbacks: int


def cost_of(fn: Callable[..., Any], *args: PyTree) -> Cost:
    """The cost of `fn(plan, *args)` for one member: `fn` runs a function of one member under the plan.

    Only shapes are used; nothing is run.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if _axes.is_array(x) else x, args)
    closed, _, _ = eqx.filter_make_jaxpr(ft.partial(fn, FirstMember()))(*shapes)
    return _cost_of_jaxpr(closed.jaxpr)


class FirstMember(AbstractPlan):
    """Runs the first member only: its program is the cost of one member."""

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Applies `fn` to the first member."""
        return jax.tree.map(lambda x: x[None], fn(jax.tree.map(lambda x: x[0], arrays)))


def _cost_of_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Cost:
    flops = held = convolutions = products = loops = callbacks = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        shapes: list[tuple[int, ...]] = [getattr(var.aval, "shape", ()) for var in (*eqn.invars, *eqn.outvars)]
        times = int(eqn.params.get("length", 1)) if name == "scan" else 1
        loops += name in ("scan", "while")
        callbacks += name.endswith("callback")
        held += sum(_bytes(var.aval) for var in eqn.outvars)
        for inner in map(_cost_of_jaxpr, inner_jaxprs(eqn)):
            flops += times * inner.flops
            held += inner.bytes
            convolutions += inner.convolutions
            products += inner.batched_products
            loops += inner.loops
            callbacks += inner.callbacks
        if name == "dot_general":
            (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
            flops += 2 * math.prod(shapes[-1]) * math.prod(shapes[0][i] for i in contracted)
            products += bool(batched)
        elif name == "conv_general_dilated":
            out = shapes[1][eqn.params["dimension_numbers"].rhs_spec[0]]
            flops += 2 * math.prod(shapes[-1]) * math.prod(shapes[1]) // max(out, 1)
            convolutions += 1
    return Cost(flops, held, convolutions, products, loops, callbacks)


def _bytes(aval: Any) -> int:
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(getattr(aval, "shape", ())) * itemsize
