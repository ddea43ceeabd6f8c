from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ._pytree import PyTree

F = TypeVar("F", bound=Callable[..., Any])
_OF_PAIRS: set[Callable[..., Any]] = set()


def takes_pair(fn: F) -> F:
    """Marks a function of a mean and a variance, which are the pair that members return."""
    _OF_PAIRS.add(fn)
    return fn


def of_predictions(combine: Callable[..., Any]) -> Callable[..., Any]:
    """`combine` as a function of predictions: a pair for functions of a mean and a variance."""
    try:
        if combine not in _OF_PAIRS:
            return combine
    except TypeError:  # a callable without a hash
        return combine

    def of_pair(predictions: PyTree, **weights: Any) -> PyTree:
        return combine(*check_pair(predictions, f"{combine.__module__.split('.')[1]}.{combine.__name__}"), **weights)

    return of_pair


def check_pair(predictions: Any, name: str) -> tuple[Any, Any]:
    """Raises unless predictions are a pair of a mean and a variance. Returns both."""
    if not isinstance(predictions, tuple | list) or len(predictions) != 2:
        several = isinstance(predictions, tuple | list | dict)
        got = f"a {type(predictions).__name__} of {len(predictions)}" if several else f"shape {np.shape(predictions)}"
        raise TypeError(
            f"`{name}` needs predictions that are a pair `(mean, variance)`, got {got}.\n"
            "Other outputs become a pair by `predict(..., fn=lambda model, x: (mean, variance))`; for point "
            "predictions use `combine.moments`."
        )
    return predictions[0], predictions[1]
