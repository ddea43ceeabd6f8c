import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._check import MemberMismatchError, check_integers_fit, check_number, is_traced, kind_text
from .._foreign import as_numpy
from ._range import AbstractRange


def check_sweep_values(values: Any, *, name: str) -> dict[str, np.ndarray]:
    """Raises unless `values` maps names to lists of numbers. Returns them as arrays."""
    if not isinstance(values, Mapping):
        raise TypeError(f"`{name}` needs a dict from name to values, got {kind_text(values)}.")
    if not values:
        raise ValueError(f"`{name}` needs at least one name with values, got none.")
    arrays = {}
    for word, given in values.items():
        array = as_numpy(given, word, name=name)
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"`{name}` needs numbers in `{word}`, because members of one ensemble differ only in arrays; got "
                f"{given!r}.\nBuild one ensemble per choice."
            )
        if array.ndim == 0 or len(array) == 0:
            raise ValueError(f"`{name}` needs a list of values in `{word}`, got {given!r}.")
        check_integers_fit(array, argument=word, name=name)
        arrays[word] = array
    return arrays


def check_lengths(arrays: Mapping[str, np.ndarray], *, name: str) -> None:
    """Raises unless all names have the same number of values."""
    if len({len(x) for x in arrays.values()}) > 1:
        listed = ", ".join(f"{len(x)} in `{word}`" for word, x in arrays.items())
        raise MemberMismatchError(
            f"`{name}` needs one value per member in every name; got {listed}.\n"
            "`sweep.grid` makes one member of every combination."
        )


def check_ends(low: Any, high: Any, *, name: str, positive: bool = False) -> None:
    """Raises unless `low` and `high` are finite numbers in order, positive if asked."""
    for value in (low, high):
        check_number(value, "low" if value is low else "high", name=name)
    if not low < high:
        raise ValueError(f"`{name}` needs `low` below `high`, got {low} and {high}.")
    if positive and low <= 0:
        raise ValueError(f"`{name}` needs positive ends, because zero has no logarithm; got {low} and {high}.")


def check_ranges(value: Any, *, name: str) -> None:
    """Raises unless `value` maps names to ranges."""
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"`{name}` needs a dict from name to range, got {value!r}.")
    for word, one in value.items():
        if not isinstance(one, AbstractRange):
            raise TypeError(f"`{name}` needs a range in `{word}`, such as `sweep.LogUniform(1e-4, 1e-1)`, got {one!r}.")


def check_schedule(value: Any, length: Any, new_length: Any, *, name: str) -> None:
    """Raises unless `value` is a function and both lengths are positive numbers."""
    if not callable(value):
        raise TypeError(f"`{name}` needs a schedule, a function of a step; got {value!r}.")
    if not check_number(length, "length", name=name) > 0:
        raise ValueError(f"`{name}` needs the schedule's own length as a positive number, got {length!r}.")
    if not is_traced(new_length):
        found = np.asarray(new_length)
        if found.dtype.kind not in "iuf" or found.ndim or not 0 < found < math.inf:
            raise ValueError(f"`{name}` needs `new_length` to be a positive number, got {new_length!r}.")
