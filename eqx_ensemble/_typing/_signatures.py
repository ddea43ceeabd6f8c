from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
    runtime_checkable,
)

import equinox as eqx

T = TypeVar("T")
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


A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

if TYPE_CHECKING:
    from .._ensemble import Ensemble
    from .._marks import Each

    # What a mapped function takes for a `T`. A container, or another node, may have marks at any depth.
    Given: TypeAlias = T | Ensemble[T] | Each | tuple[Any, ...] | list[Any] | dict[Any, Any]
else:
    Given = Annotated[T, "or an ensemble or a mark of it"]


@runtime_checkable
class Wrapper(Protocol[Out]):
    """A function that wraps another one."""

    @property
    def __wrapped__(self) -> Out:
        """The wrapped function."""
        ...


@runtime_checkable
class MappedFunction(Protocol[P, Out]):
    """A function of one member, mapped over members.

    Any argument may be an ensemble or a mark such as `Each`, at any depth, which a `ParamSpec` cannot express. The
    first three arguments are therefore checked one by one, up to as many as the function takes by position. Keywords
    are not, which may be marks too, and may be those of arguments that are missing. mypy gives `equinox.filter_jit` of
    it the first signature that fits.
    """

    @property
    def __wrapped__(self) -> Callable[P, Any]:
        """The function of one member."""
        ...

    @overload
    def __call__(
        self: Wrapper[Callable[Concatenate[A, B, C, ...], Any]],
        a: Given[A],
        b: Given[B] = ...,
        c: Given[C] = ...,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Out: ...
    @overload
    def __call__(
        self: Wrapper[Callable[Concatenate[A, B, ...], Any]], a: Given[A], b: Given[B] = ..., /, **kwargs: Any
    ) -> Out: ...
    @overload
    def __call__(self: Wrapper[Callable[Concatenate[A, ...], Any]], a: Given[A], /, **kwargs: Any) -> Out: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Out: ...
