import inspect
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

# With `EQX_ON_ERROR=breakpoint` Equinox replaces `jax.jit` by a function whose results cannot be traced or lowered.
plain_jit: Any = inspect.unwrap(jax.jit)


def inner_jaxprs(eqn: Any) -> Iterator[Jaxpr | ClosedJaxpr]:
    """The programs inside an operation: the body of a loop, the branches of a condition, a called function."""
    is_jaxpr = lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
    yield from (part for part in jax.tree.leaves(eqn.params, is_leaf=is_jaxpr) if is_jaxpr(part))


def callbacks(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Any]:
    """The Python functions that a program calls for their results: not those of `jax.debug`."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("pure_callback", "io_callback"):
            callback = eqn.params["callback"]
            yield getattr(callback, "callback_func", callback)
        for part in inner_jaxprs(eqn):
            yield from callbacks(part)


def has_callbacks(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Whether a program calls Python while it runs, as `equinox.error_if` does."""
    return any(
        eqn.primitive.name.endswith("callback") or any(map(has_callbacks, inner_jaxprs(eqn))) for eqn in jaxpr.eqns
    )
