"""The registry of functions with a streaming form."""

import types
from collections.abc import Callable
from typing import Any

from .._pytree import PyTree
from .._suggest import inner_function
from ._check import check_pair
from ._combination import AbstractCombination
from ._summary import Summary

_STREAMS: dict[Callable[..., Any], AbstractCombination] = {}
# For messages: subpackages are imported lazily, so the registry may be incomplete.
NAMES = (
    "combine.gaussian",
    "combine.mean",
    "combine.mean_logits",
    "combine.mixture",
    "combine.moments",
    "combine.vote",
    "uncertainty.decompose_entropy",
    "uncertainty.decompose_variance",
    "uncertainty.disagreement",
    "uncertainty.variation_ratio",
)


def stream(fn: Callable[..., Any], combination: AbstractCombination) -> None:
    """Registers the streaming form of a function."""
    _STREAMS[fn] = combination


def stream_of(combine: Any) -> AbstractCombination | None:
    """The streaming form of the argument `combine`, or `None`."""
    if isinstance(combine, AbstractCombination):
        return combine
    return _STREAMS.get(inner_function(combine)) if isinstance(combine, types.FunctionType) else None


def streaming(fn: Callable[..., Any]) -> AbstractCombination:
    """The streaming form of a function, for members that arrive in sequence or are on several machines.

    [`eqx_ensemble.predict`][] uses it with `memory`: `predict(..., combine=ee.combine.mixture, memory=2**28)` processes
    some members at a time. The result equals that of the function, within rounding, for any division of the members.

    **Arguments:**

    - `fn`: `mean`, `moments`, `mixture`, `mean_logits`, `vote` or `gaussian` of `eqx_ensemble.combine`;
        `decompose_entropy`, `decompose_variance`, `disagreement` or `variation_ratio` of `eqx_ensemble.uncertainty`.
        For functions of a mean and a variance, predictions are a pair.

    **Returns:** an [`eqx_ensemble.combine.AbstractCombination`][].

    **Raises:** `TypeError` for a function without a streaming form.

    ```python
    predictions = jax.random.normal(key, (6, 100, 3))  # members, rows, classes
    entropies, partial = ee.combine.streaming(ee.uncertainty.decompose_entropy), None
    for chunk in (predictions[:4], predictions[4:]):
        partial = entropies.update(partial, chunk)
    entropies.finish(partial)  # as ee.uncertainty.decompose_entropy(predictions)
    ```
    """
    found = stream_of(fn)
    if found is None:
        raise TypeError(
            f"`combine.streaming` needs a function with a streaming form, got {fn!r}.\n"
            f"They are {', '.join(NAMES)}; for your own subclass `combine.AbstractCombination`."
        )
    return found


def of_predictions(combine: Callable[..., Any]) -> Callable[..., Any]:
    """`combine` as a function of predictions: a pair for functions of a mean and a variance."""
    summary = stream_of(combine)
    if summary is combine or not isinstance(summary, Summary) or not summary.pairs:
        return combine

    def of_pair(predictions: PyTree, **weights: Any) -> PyTree:
        return combine(*check_pair(predictions, name=summary.name), **weights)

    return of_pair
