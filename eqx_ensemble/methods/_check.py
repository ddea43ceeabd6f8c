import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .._caller import caller
from .._check import check_number, check_positive_int, check_sequence
from .._foreign import as_numpy, from_foreign


def check_indices(values: Any, num_members: int, *, unique: bool = False) -> np.ndarray:
    """Raises unless `values` are indices of members, each at most once if `unique`. Returns them as an array."""
    found = as_numpy(values, "members")
    if found.ndim != 1 or found.dtype.kind not in "iu" or len(found) == 0:
        raise TypeError(f"`{caller()}` needs indices of members, a list of integers; got {values!r}.")
    if found.min() < 0 or found.max() >= num_members:
        raise ValueError(
            f"`{caller()}` needs indices from 0 to {num_members - 1}, got {found.min()} to {found.max()}.\n"
            "An index is a member's position in the ensemble, not its id."
        )
    if unique and len(np.unique(found)) < len(found):
        raise ValueError(
            f"`{caller()}` needs every member at most once, because ids are unique; got {found.tolist()}.\n"
            "`methods.population.clone` makes members copies of others."
        )
    return found


def check_fraction(fraction: Any) -> None:
    """Raises unless `fraction` is above 0 and at most a half."""
    if not isinstance(fraction, numbers.Real) or not 0 < float(fraction) <= 0.5:
        raise ValueError(f"`{caller()}` needs `fraction` to be above 0 and at most 0.5, got {fraction!r}.")


def check_factors(factors: Any) -> list[float]:
    """Raises unless `factors` is a list of positive numbers. Returns them as Python numbers."""
    listed = [check_number(factor, "factors") for factor in check_sequence(factors, "factors", of="numbers")]
    if not listed or min(listed) <= 0:
        raise ValueError(f"`{caller()}` needs `factors` to be positive numbers, such as `(0.8, 1.2)`; got {factors!r}.")
    return listed


def check_validation_given(validation: Any) -> None:
    """Raises for a search without validation data."""
    if validation is None:
        raise TypeError(f"`{caller()}` needs `validation=` data: members are compared by their validation scores.")


def check_factor(factor: Any) -> float | int:
    """Raises unless `factor` is a number above 1. Returns it as a Python number, an `int` if it is integral."""
    if not isinstance(factor, int | float | np.number) or not 1 < float(factor) < math.inf:
        raise ValueError(f"`{caller()}` needs `factor` to be above 1, got {factor!r}.")
    return int(factor) if float(factor).is_integer() else float(factor)


def check_length(**lengths: Any) -> tuple[str, int]:
    """Raises unless exactly one length is given. Returns its name and value."""
    given = {unit: length for unit, length in lengths.items() if length is not None}
    if len(given) != 1:
        words = " or ".join(f"`{unit}`" for unit in lengths)
        raise TypeError(f"`{caller()}` needs either {words}, got {'both' if given else 'neither'}.")
    ((unit, length),) = given.items()
    check_positive_int(length, unit)
    return unit, length


def check_member_scores(scores: Any) -> np.ndarray:
    """Raises unless `scores` holds one number per member. Returns them as an array."""
    try:
        found = np.asarray(from_foreign(scores, "scores"), float)
    except (TypeError, ValueError):
        raise TypeError(f"`{caller()}` needs one score per member as numbers `(members,)`, got {scores!r}.") from None
    if found.ndim != 1 or len(found) == 0:
        raise ValueError(f"`{caller()}` needs one score per member `(members,)`, got shape {found.shape}.")
    return found


def check_healthy(healthy: Any, num_members: int) -> np.ndarray:
    """Raises unless `healthy` is `None` or holds one boolean per member. Returns them as an array."""
    found = np.ones(num_members, bool) if healthy is None else as_numpy(healthy, "healthy")
    if found.shape != (num_members,) or found.dtype != bool:
        raise TypeError(
            f"`{caller()}` needs one boolean per member in `healthy` ({num_members},), got {found.dtype} of shape "
            f"{found.shape}.\nFrom a run: `run.status == train.Status.OK`."
        )
    return found


def check_options(options: Mapping[str, Any], refused: Iterable[str], reason: str) -> None:
    """Raises if an option of `fit` that the method does not support is given."""
    given = [f"`{word}`" for word in refused if options.get(word) is not None]
    if given:
        raise TypeError(f"`{caller()}` does not take {', '.join(given)}: {reason}.")


def check_whole_epochs(steps: Any, *, is_batches: bool) -> None:
    """Raises for `steps` with an iterable of batches, of which every round would use the same first batches."""
    if is_batches and steps is not None:
        raise TypeError(
            f"`{caller()}` needs `epochs`, not `steps`, with an iterable of batches: every round iterates it from the "
            "beginning, so rounds of a few steps would use the same few batches again and again."
        )
