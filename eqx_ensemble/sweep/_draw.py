import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from .. import _check, _streams


class AbstractRange(abc.ABC):
    """What one hyper-parameter is drawn from."""

    @abc.abstractmethod
    def draw(self, generator: np.random.Generator) -> Any:
        """One value."""

    @abc.abstractmethod
    def moved(self, value: float, factor: float) -> Any:
        """A value of the range, `factor` times `value` or as near as there is."""


@dataclasses.dataclass(frozen=True)
class Uniform(AbstractRange):
    """All numbers between `low` and `high`, each as likely as any other.

    **Arguments:**

    - `low`, `high`: the ends, of which `high` is not drawn.
    """

    low: float
    high: float

    def __post_init__(self):
        _check.ends(self.low, self.high, name="Uniform")

    def draw(self, generator: np.random.Generator) -> float:
        """One value."""
        return generator.uniform(self.low, self.high)

    def moved(self, value: float, factor: float) -> float:
        """`factor` times `value`, at most at an end."""
        return min(max(value * factor, self.low), self.high)


@dataclasses.dataclass(frozen=True)
class LogUniform(AbstractRange):
    """Numbers whose logarithm is uniform: for learning rates and all else that counts in orders of magnitude.

    **Arguments:**

    - `low`, `high`: the ends, both positive.
    """

    low: float
    high: float

    def __post_init__(self):
        _check.ends(self.low, self.high, name="LogUniform", positive=True)

    def draw(self, generator: np.random.Generator) -> float:
        """One value."""
        return math.exp(generator.uniform(math.log(self.low), math.log(self.high)))

    def moved(self, value: float, factor: float) -> float:
        """`factor` times `value`, at most at an end."""
        return min(max(value * factor, self.low), self.high)


@dataclasses.dataclass(frozen=True)
class Choice(AbstractRange):
    """One of a few numbers, each as likely as any other.

    **Arguments:**

    - `values`: the numbers.
    """

    values: Sequence[Any]

    def __post_init__(self):
        _check.sweep_values({"values": self.values}, name="Choice")

    def draw(self, generator: np.random.Generator) -> Any:
        """One value."""
        return self.values[int(generator.integers(len(self.values)))]

    def moved(self, value: float, factor: float) -> Any:
        """The next larger value for a factor above 1, the next smaller one below; at most at an end."""
        values = sorted(self.values)
        place = min(range(len(values)), key=lambda i: abs(values[i] - value))
        return values[min(max(place + (factor > 1) - (factor < 1), 0), len(values) - 1)]


def draw(ranges: Mapping[str, AbstractRange], num_members: int, *, key: Any) -> dict[str, Shaped[Array, " members"]]:
    """Hyper-parameters drawn at random, each member's from its own stream.

    A member's value of a name depends on the key, the member's place and the name alone: more members, or more names,
    do not change what was drawn before. On random search against grids see the paper.

    ??? cite

        Bergstra and Bengio, *Random Search for Hyper-Parameter Optimization*, JMLR 13, 2012.

    ```python
    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1), "momentum": ee.sweep.Uniform(0.8, 1.0)}
    hyper = ee.sweep.draw(ranges, 64, key=key)
    hyper["lr"].shape  # (64,)
    ```

    **Arguments:**

    - `ranges`: for every name what to draw from: [`eqx_ensemble.sweep.Uniform`][], [`eqx_ensemble.sweep.LogUniform`][],
        [`eqx_ensemble.sweep.Choice`][].
    - `num_members`: how many.
    - `key`: one key of the threefry kind.

    **Returns:** for every name the members' values `(members,)`: what `fit` takes as `hyper`.

    **Raises:** TypeError for anything else among the ranges, and for a wrong key; ValueError for a wrong count.
    """
    _check.ranges(ranges, AbstractRange, name="sweep.draw")
    _check.check_positive_int(num_members, "num_members", name="eqx_ensemble.sweep.draw")
    _check.check_key(key, name="sweep.draw")
    return {
        name: jnp.asarray([one.draw(g) for g in _streams.generators(key, num_members, purpose=f"sweep {name}")])
        for name, one in ranges.items()
    }
