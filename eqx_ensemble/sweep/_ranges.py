import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._check import check_ends, check_sweep_values
from ._range import AbstractRange


@dataclasses.dataclass(frozen=True)
class Uniform(AbstractRange):
    """The uniform distribution on `[low, high)`.

    **Arguments:**

    - `low`, `high`: the ends, `low < high`; `high` is excluded.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        check_ends(self.low, self.high, name="sweep.Uniform")

    def draw(self, generator: np.random.Generator) -> float:
        """Draws one value."""
        return generator.uniform(self.low, self.high)

    def rescale(self, value: float, factor: float) -> float:
        """Returns `factor` times `value`, clipped to the range."""
        return min(max(value * factor, self.low), self.high)


@dataclasses.dataclass(frozen=True)
class LogUniform(AbstractRange):
    """The log-uniform distribution on `[low, high)`, for example for learning rates.

    **Arguments:**

    - `low`, `high`: the ends, `0 < low < high`.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        check_ends(self.low, self.high, name="sweep.LogUniform", positive=True)

    def draw(self, generator: np.random.Generator) -> float:
        """Draws one value."""
        return math.exp(generator.uniform(math.log(self.low), math.log(self.high)))

    def rescale(self, value: float, factor: float) -> float:
        """Returns `factor` times `value`, clipped to the range."""
        return min(max(value * factor, self.low), self.high)


@dataclasses.dataclass(frozen=True)
class Choice(AbstractRange):
    """The uniform distribution over a list of numbers.

    **Arguments:**

    - `values`: the numbers.
    """

    values: Sequence[Any]

    def __post_init__(self) -> None:
        check_sweep_values({"values": self.values}, name="sweep.Choice")

    def draw(self, generator: np.random.Generator) -> Any:
        """Draws one value."""
        return self.values[int(generator.integers(len(self.values)))]

    def rescale(self, value: float, factor: float) -> Any:
        """Returns the next larger value for a factor above 1, and the next smaller one for a factor below 1, if any."""
        values = sorted(self.values)
        nearest = min(range(len(values)), key=lambda i: abs(values[i] - value))
        return values[min(max(nearest + (factor > 1) - (factor < 1), 0), len(values) - 1)]
