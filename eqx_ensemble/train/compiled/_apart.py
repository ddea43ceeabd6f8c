import contextlib
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def apart(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, traced once, and on CPUs compiled apart from the program that calls it.

    There XLA would inline it, and compute its results anew in every operation that reads them, which takes long to
    compile and to run.
    """

    @jax.jit
    @ft.wraps(fn)
    def inner(*args: Any) -> Any:
        with set_xla_metadata(inlineable="true"):  # what `fn` calls
            return fn(*args)

    @ft.wraps(fn)
    def call(*args: Any) -> Any:
        with set_xla_metadata(inlineable="false") if jax.default_backend() == "cpu" else contextlib.nullcontext():
            return inner(*args)

    return call
