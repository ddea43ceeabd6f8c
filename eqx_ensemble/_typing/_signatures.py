from collections.abc import Callable, Mapping
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    overload,
    runtime_checkable,
)

import equinox as eqx

T = TypeVar("T")

if TYPE_CHECKING:
    ByPart = Annotated[T, "for each part"]
else:
    # In a signature: for a group, a dict of values by part is also accepted. Functions handle groups first, so type
    # checkers need to know single values only.
    ByPart = Union[T, Mapping[str, Any]]  # noqa: UP007


Member = TypeVar("Member", covariant=True)
Out = TypeVar("Out", covariant=True)
P = ParamSpec("P")


@runtime_checkable
class EnsembleOf(Protocol[Member]):
    """A covariant `Ensemble`: an ensemble of `MLP`s is also one of callables."""

    @property
    def stacked(self) -> Member:
        """The members as one model."""
        ...


CallableEnsemble = EnsembleOf[Callable[..., Out]]
"""An `Ensemble` whose members return `Out` when called."""

# Layers such as `equinox.nn.Sequential` have another return type if they are called without a state.
StatefulEnsemble = EnsembleOf[Callable[Concatenate[Any, eqx.nn.State, ...], Out]]
"""An `Ensemble` whose members return `Out` when called with an input and a state."""


@runtime_checkable
class MappedFunction(Protocol[P, Out]):
    """A function of one member, mapped over members.

    Any argument may be an ensemble or a mark such as `Each`, at any depth, which a `ParamSpec` cannot express: the
    second overload takes such calls.
    """

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Out: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Out: ...
