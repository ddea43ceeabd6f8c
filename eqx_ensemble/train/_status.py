import enum
from typing import Any


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


class DivergedError(ArithmeticError):
    """Raised by [`eqx_ensemble.fit`][] with `on_diverge="raise"` when members diverge; `run` is the run so far."""

    def __init__(self, message: str, run: Any = None) -> None:
        super().__init__(message)
        self.run = run
