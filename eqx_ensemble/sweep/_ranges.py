import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from .. import _keys
from .._caller import caller
from .._check import (
    check_integers_fit,
    check_key,
    check_number,
    check_positive_int,
    is_traced,
    kind_text,
)
from .._foreign import as_numpy

TABLE_COLUMNS = ("member", "loss", "validation", "best_step", "status", "stopped_at")
"""The columns of a run's table in addition to those of its hyper-parameters, which have other names."""


class AbstractRange(abc.ABC):
    """The distribution of one hyper-parameter: subclass it for
    [others](../guide/extending.md#a-range-of-hyper-parameters).

    For [`eqx_ensemble.sweep.draw`][], [`eqx_ensemble.methods.hyperband`][] and
    [`eqx_ensemble.methods.population.perturb_hyper`][].
    """

    @abc.abstractmethod
    def draw(self, generator: np.random.Generator) -> Any:
        """Draws one Python number from the random `generator` of one member."""

    @abc.abstractmethod
    def rescale(self, value: float, factor: float) -> Any:
        """Returns the value of the range nearest to `factor`, a positive number, times `value`, as a Python number."""


def check_sweep_values(values: Any) -> dict[str, np.ndarray]:
    """Raises unless `values` maps names to lists of numbers. Returns them as arrays."""
    if not isinstance(values, Mapping):
        raise TypeError(f"`{caller()}` needs a dict from name to values, got {kind_text(values)}.")
    if not values:
        raise ValueError(f"`{caller()}` needs at least one name with values, got none.")
    arrays = {}
    for word, given in values.items():
        array = as_numpy(given, word)
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"`{caller()}` needs numbers in `{word}`, because members of one ensemble differ only in arrays; got "
                f"{given!r}.\nBuild one ensemble per choice."
            )
        if array.ndim == 0 or len(array) == 0:
            raise ValueError(f"`{caller()}` needs a list of values in `{word}`, got {given!r}.")
        check_integers_fit(array, argument=word)
        arrays[word] = array
    return arrays


def check_ends(low: Any, high: Any, *, positive: bool = False) -> None:
    """Raises unless `low` and `high` are finite numbers in order, positive if asked."""
    for value in (low, high):
        check_number(value, "low" if value is low else "high")
    if not low < high:
        raise ValueError(f"`{caller()}` needs `low` below `high`, got {low} and {high}.")
    if positive and low <= 0:
        raise ValueError(f"`{caller()}` needs positive ends, because zero has no logarithm; got {low} and {high}.")


def check_ranges(value: Any) -> None:
    """Raises unless `value` maps names to ranges."""
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"`{caller()}` needs a dict from name to range, got {value!r}.")
    for word, one in value.items():
        if not isinstance(one, AbstractRange):
            raise TypeError(
                f"`{caller()}` needs a range in `{word}`, such as `sweep.LogUniform(1e-4, 1e-1)`, got {one!r}."
            )


def draw(ranges: Mapping[str, AbstractRange], num_members: int, *, key: Any) -> dict[str, Shaped[Array, " members"]]:
    """Draws random hyper-parameters, one value per member and name.

    A value depends only on the key, the member's index and the name.

    **Arguments:**

    - `ranges`: a dictionary from names to ranges, such as [`eqx_ensemble.sweep.Uniform`][].
    - `num_members`: the number of members.
    - `key`: one threefry key, typed or legacy.

    **Returns:** a dictionary from names to arrays `(members,)`, for `hyper=`.

    **Raises:** `TypeError` for `ranges` that are empty or not ranges, a count that is not an integer, and an invalid
    key; `ValueError` for a count below one.

    ```python
    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1), "momentum": ee.sweep.Uniform(0.8, 1.0)}
    hyper = ee.sweep.draw(ranges, 64, key=key)
    hyper["lr"].shape  # (64,)
    ```

    ??? cite
        Bergstra and Bengio, *Random Search for Hyper-Parameter Optimization*, JMLR 13, 2012.
    """
    check_ranges(ranges)
    check_positive_int(num_members, "num_members")
    check_key(key)
    return {
        name: jnp.asarray([one.draw(g) for g in _keys.generators(key, num_members, purpose=f"sweep {name}")])
        for name, one in ranges.items()
    }


def grid(values: Mapping[str, Any]) -> dict[str, Shaped[Array, "members ..."]]:
    """Makes one member per combination of values, like `itertools.product`.

    **Arguments:**

    - `values`: a dictionary from names to the values to combine, `(choices, ...)`.

    **Returns:** a dictionary from names to arrays `(members, ...)`, for `hyper=`.

    **Raises:** `TypeError` for values that are not numbers, `ValueError` for no names or a name without values.

    ```python
    hyper = ee.sweep.grid({"lr": [1e-3, 1e-2], "wd": [0.0, 1e-4, 1e-3]})
    hyper["lr"].shape  # (6,): the last name varies fastest
    ```
    """
    arrays = check_sweep_values(values)
    combinations = np.array(list(itertools.product(*(range(len(x)) for x in arrays.values()))))
    return {name: jnp.asarray(x[combinations[:, i]]) for i, (name, x) in enumerate(arrays.items())}


def rescale_schedule(schedule: Callable[[Any], Any], length: float | int, new_length: Any) -> Callable[[Any], Any]:
    """Rescales a schedule of `length` steps to `new_length` steps.

    For optax, the length of a schedule is a Python number, but hyper-parameters are traced.

    **Arguments:**

    - `schedule`: an optax schedule: `schedule(step) -> value`, for any real number `step`.
    - `length`: the length of the schedule in steps, a Python number.
    - `new_length`: the new length in steps, a number or a member's hyper-parameter `()`.

    **Returns:** the rescaled schedule.

    **Raises:** `TypeError` for a schedule that is not a function and a `length` that is not a number, `ValueError` for
    lengths that are not positive.

    ```python
    cosine = optax.cosine_decay_schedule(0.01, 1000)
    optimiser = lambda hyper: optax.adam(
        ee.sweep.rescale_schedule(cosine, 1000, hyper["steps"])
    )
    ```
    """
    if not callable(schedule):
        raise TypeError(f"`{caller()}` needs a schedule, a function of a step; got {schedule!r}.")
    if not check_number(length, "length") > 0:
        raise ValueError(f"`{caller()}` needs the schedule's own length as a positive number, got {length!r}.")
    if not is_traced(new_length):
        found = np.asarray(new_length)
        if found.dtype.kind not in "iuf" or found.ndim or not 0 < found < math.inf:
            raise ValueError(f"`{caller()}` needs `new_length` to be a positive number, got {new_length!r}.")
    return lambda step: schedule(step * (length / new_length))


@dataclasses.dataclass(frozen=True)
class Uniform(AbstractRange):
    """The uniform distribution on `[low, high)`.

    **Arguments:**

    - `low`, `high`: the ends, `low < high`; `high` is excluded.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        check_ends(self.low, self.high)

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
        check_ends(self.low, self.high, positive=True)

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
        check_sweep_values({"values": self.values})

    def draw(self, generator: np.random.Generator) -> Any:
        """Draws one value."""
        return self.values[int(generator.integers(len(self.values)))]

    def rescale(self, value: float, factor: float) -> Any:
        """Returns the next larger value for a factor above 1, and the next smaller one for a factor below 1, if any."""
        values = sorted(self.values)
        nearest = min(range(len(values)), key=lambda i: abs(values[i] - value))
        return values[min(max(nearest + (factor > 1) - (factor < 1), 0), len(values) - 1)]
