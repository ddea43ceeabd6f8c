import contextlib
import enum
from collections.abc import Iterator
from typing import Any

import jax


class Status(enum.IntEnum):
    """The status of a member. Arrays of statuses are int8.

    - `OK`: the member is training, or trained to the end.
    - `STOPPED`: `patience`, `stop` or a callback stopped it.
    - `DIVERGED`: its loss or weights were not finite at the end of an epoch. It keeps those of the epoch's start.
    """

    OK = 0
    STOPPED = 1
    DIVERGED = 2

    def __str__(self) -> str:
        return self.name.lower()


@contextlib.contextmanager
def allow_nan() -> Iterator[None]:
    """Disables `jax_debug_nans` and `jax_debug_infs`: a NaN affects one member only, and others report NaN."""
    if not (jax.config.jax_debug_nans or jax.config.jax_debug_infs):
        yield
        return
    with jax.debug_nans(False), jax.debug_infs(False):  # noqa: FBT003 (their one argument)
        yield


class DivergedError(ArithmeticError):
    """Raised by [`eqx_ensemble.fit`][] with `on_diverge="raise"` when members diverge; `run` is the run so far."""

    def __init__(self, message: str, run: Any = None) -> None:
        super().__init__(message)
        self.run = run
