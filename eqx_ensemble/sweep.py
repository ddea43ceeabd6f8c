"""Hyperparameters, one value per member and name: grids and random draws."""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from ._keys import generators

__all__ = ["AbstractRange", "Choice", "LogUniform", "Uniform", "draw", "grid"]


class AbstractRange(abc.ABC):
    """The distribution of one hyperparameter: subclass it for
    [others](../guide/extending.md#a-range-of-hyperparameters).

    For [`eqx_ensemble.sweep.draw`][], [`eqx_ensemble.methods.hyperband`][] and
    [`eqx_ensemble.methods.population.perturb_hyper`][].
    """

    @abc.abstractmethod
    def draw(self, generator: np.random.Generator) -> Any:
        """Draws one Python number from the random `generator` of one member."""

    @abc.abstractmethod
    def rescale(self, value: float, factor: float) -> Any:
        """Returns the value of the range nearest to `factor`, a positive number, times `value`, as a Python number."""


def draw(ranges: Mapping[str, AbstractRange], num_members: int, *, key: Any) -> dict[str, Shaped[Array, " members"]]:
    """Draws random hyperparameters, one value per member and name.

    A value depends only on the key, the member's index and the name.

    **Arguments:**

    - `ranges`: a dictionary from names to ranges, such as [`eqx_ensemble.sweep.Uniform`][].
    - `num_members`: the number of members.
    - `key`: one threefry key, typed or legacy.

    **Returns:** a dictionary from names to arrays `(members,)`, for `hyper=`.

    ```python
    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1), "momentum": ee.sweep.Uniform(0.8, 1.0)}
    hyper = ee.sweep.draw(ranges, 64, key=key)
    hyper["lr"].shape  # (64,)
    ```

    ??? cite
        Bergstra and Bengio, *Random Search for Hyper-Parameter Optimization*, JMLR 13, 2012.
    """
    streams = lambda name: generators(key, num_members, purpose=f"sweep {name}")
    return {name: jnp.asarray([one.draw(stream) for stream in streams(name)]) for name, one in ranges.items()}


def grid(values: Mapping[str, Any]) -> dict[str, Shaped[Array, "members ..."]]:
    """Makes one member per combination of values, like `itertools.product`.

    **Arguments:**

    - `values`: a dictionary from names to the numbers to combine, `(choices, ...)`. What is no number, such as an
        activation, needs one ensemble per choice.

    **Returns:** a dictionary from names to arrays `(members, ...)`, for `hyper=`.

    ```python
    hyper = ee.sweep.grid({"lr": [1e-3, 1e-2], "wd": [0.0, 1e-4, 1e-3]})
    hyper["lr"].shape  # (6,): the last name varies fastest
    ```
    """
    arrays = [jnp.asarray(choices) for choices in values.values()]
    chosen = np.indices([len(choices) for choices in arrays]).reshape(len(arrays), -1)
    return {name: choices[own] for name, choices, own in zip(values, arrays, chosen, strict=True)}


@dataclasses.dataclass(frozen=True)
class Uniform(AbstractRange):
    """The uniform distribution on `[low, high)`.

    **Arguments:**

    - `low`, `high`: the ends, `low < high`; `high` is excluded.
    """

    low: float
    high: float

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

    def draw(self, generator: np.random.Generator) -> Any:
        """Draws one value."""
        return self.values[int(generator.integers(len(self.values)))]

    def rescale(self, value: float, factor: float) -> Any:
        """Returns the next larger value for a factor above 1, and the next smaller one for a factor below 1, if any."""
        values = sorted(self.values)
        nearest = min(range(len(values)), key=lambda i: abs(values[i] - value))
        return values[min(max(nearest + (factor > 1) - (factor < 1), 0), len(values) - 1)]
