import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._errors import MemberMismatchError
from ._leaves import in_range, is_traced, kind_text
from ._marks import check_positive_int
from ._options import check_number


def sweep_values(values: Any, *, name: str) -> dict[str, np.ndarray]:
    """Names with several numbers each, as arrays."""
    if not isinstance(values, Mapping):
        raise TypeError(f"`{name}` needs a dict from name to values, got {kind_text(values)}.")
    if not values:
        raise ValueError(f"`{name}` needs at least one name with values, got none.")
    arrays = {}
    for word, given in values.items():
        array = np.asarray(given)
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"`{name}` needs numbers in `{word}`, because members of one ensemble differ only in arrays; got "
                f"{given!r}.\nMake one ensemble per choice."
            )
        if array.ndim == 0 or len(array) == 0:
            raise ValueError(f"`{name}` needs a list of values in `{word}`, got {given!r}.")
        in_range(array, name=name, path=word)
        arrays[word] = array
    return arrays


def one_length(arrays: Mapping[str, np.ndarray], *, name: str) -> None:
    """All names have as many values."""
    if len({len(x) for x in arrays.values()}) > 1:
        listed = ", ".join(f"{len(x)} in `{word}`" for word, x in arrays.items())
        raise MemberMismatchError(
            f"`{name}` needs one value per member in every name; got {listed}.\n"
            "`eqx_ensemble.grid` makes one member of every combination."
        )


def ends(low: Any, high: Any, *, name: str, positive: bool = False) -> None:
    """The ends of a range, in order."""
    for value in (low, high):
        check_number(value, "low" if value is low else "high", name=name)
    if not low < high:
        raise ValueError(f"`{name}` needs its lower end first, got {low} and {high}.")
    if positive and low <= 0:
        raise ValueError(f"`{name}` needs positive ends, because zero has no logarithm; got {low} and {high}.")


def scores_to_rank(scores: Any, num_members: int, *, name: str) -> np.ndarray:
    """A score for every member."""
    if scores is None:
        raise TypeError(f"`{name}` needs scores to rank members by: train with `validation=` data, or pass `by=`.")
    scores = np.asarray(scores, float)
    if scores.shape != (num_members,):
        raise ValueError(f"`{name}` needs one score per member in `by`: expected ({num_members},), got {scores.shape}.")
    return scores


def enough_to_rank(count: Any, available: int, *, name: str) -> None:
    """As many members as are asked for."""
    check_positive_int(count, "count", name=name)
    if count > available:
        raise ValueError(f"`{name}` was asked for {count} members, but only {available} are healthy and have a score.")


def ranges(value: Any, kind: type, *, name: str) -> None:
    """Names with what each is drawn from."""
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"`{name}` needs a dict from name to range, got {value!r}.")
    for word, one in value.items():
        if not isinstance(one, kind):
            raise TypeError(f"`{name}` needs a range in `{word}`, such as `LogUniform(1e-4, 1e-1)`, got {one!r}.")


def schedule(value: Any, length: Any, new_length: Any, *, name: str) -> None:
    """A schedule, how long it is, and how long it is to be."""
    if not callable(value):
        raise TypeError(f"`{name}` needs a schedule, a function of a step; got {value!r}.")
    if not check_number(length, "length", name=name) > 0:
        raise ValueError(f"`{name}` needs the schedule's own length as a positive number, got {length!r}.")
    if not is_traced(new_length):
        found = np.asarray(new_length)
        if found.dtype.kind not in "iuf" or found.ndim or not 0 < found < math.inf:
            raise ValueError(f"`{name}` needs `new_length` to be a positive number, got {new_length!r}.")
