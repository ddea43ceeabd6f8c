"""What a case of conformance is: how one member is made, and how it is called."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Case(NamedTuple):
    """A Module that may be a member: `make(key)` makes one, `fn(model, x)` calls it; without `fn`, `model(x)`."""

    make: Callable[..., Any]
    x: Any
    fn: Callable[..., Any] | None = None
    rtol: float = 1e-5


class Unfit(NamedTuple):
    """What cannot be a member: a constructor that `build` refuses, a part of the message, and the reason."""

    make: Callable[..., Any]
    message: str
    reason: str


def values(*shape: int) -> jax.Array:
    """Numbers between -0.9 and 0.9 that do not repeat."""
    count = max(1, int(jnp.prod(jnp.array(shape))))
    return 0.9 * jnp.sin(1.0 + jnp.arange(count, dtype=jnp.float32)).reshape(shape)


def uniform(key: Any, *shape: int) -> jax.Array:
    """Numbers between 0.5 and 1.5."""
    return jax.random.uniform(key, shape, minval=0.5, maxval=1.5)


class Lazy:
    """A package that is imported when it is used: cases are listed where it is not installed."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
