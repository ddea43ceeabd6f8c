from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from .._predict._options import PredictOptions

E = TypeVar("E", covariant=True)


class RunWithCombine(PredictOptions, total=False):
    """The options of `Run.predict` that do not change the type of its result where there is `combine`."""

    fn: Callable[..., Any] | None
    strict: bool


class RunWithoutCombine(PredictOptions, total=False):
    """Those where there is no `combine`, which may be given as `None`."""

    combine: None
    strict: bool


@runtime_checkable
class RunOf(Protocol[E]):
    """A `Run` of an ensemble `E`."""

    @property
    def ensemble(self) -> E:
        """The trained ensemble."""
        ...
