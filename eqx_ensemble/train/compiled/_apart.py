import functools as ft
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def apart(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, traced once and compiled apart from the program that calls it, into which XLA would inline it.

    On CPUs XLA computes what several operations read anew in each of them, which takes long to compile.
    """

    @jax.jit
    @ft.wraps(fn)
    def call(*args: Any) -> Any:
        with set_xla_metadata(inlineable="true"):  # what `fn` calls
            return fn(*args)

    @ft.wraps(fn)
    def called(*args: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return call(*args)

    return called
