"""For type checkers the arrays of array functions are `Any`: callers pass what becomes one, bodies get one."""

from collections.abc import Sequence
from typing import Any, Literal

from jaxtyping import ArrayLike

Reduction = Literal["mean", "none"]
Levels = ArrayLike | Sequence[float]
InnerLevels = Levels

def __getattr__(name: str) -> Any: ...
