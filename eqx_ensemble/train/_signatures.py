import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, Required, TypedDict, TypeVar, runtime_checkable

import equinox as eqx
from jax.sharding import Mesh

from .._predict import PredictOptions
from .._pytree import PyTree
from ..checkpoint import Checkpoints
from ..plan import AnyPlan
from ._callback import Callback
from ._options import Stopping
from ._revive import Revive
from ._trainable import Trainable
from .data._rows import Order

E = TypeVar("E", covariant=True)


class RunWithCombine(PredictOptions, total=False):
    """The options of `Run.predict` with `combine` that do not change the type of its result."""

    fn: Callable[..., Any] | None
    strict: bool


class RunWithoutCombine(PredictOptions, total=False):
    """The options of `Run.predict` without `combine`, or with `combine=None`."""

    combine: None
    strict: bool


@runtime_checkable
class RunOf(Protocol[E]):
    """A `Run` of an ensemble `E`."""

    @property
    def ensemble(self) -> E:
        """The trained ensemble."""
        ...


class CommonFitOptions(TypedDict, total=False):
    """The options of `fit` that depend neither on other members nor on the devices."""

    epochs: int | None
    steps: int | None
    batch_size: int | None
    validation: PyTree
    patience: int | None
    stop: Stopping | None
    state: eqx.nn.State | None
    hyper: PyTree
    rows: Any
    order: Order
    has_aux: bool
    history: Literal["all", "last"] | int
    trainable: Trainable


class FitOptions(CommonFitOptions, total=False):
    """The options of `fit`."""

    on_diverge: Literal["freeze", "revive", "raise"] | Revive
    plan: AnyPlan
    mesh: Mesh | None
    checkpoint: str | os.PathLike[str] | Checkpoints | None
    progress: bool | None
    callbacks: Callback | Sequence[Callback] | None
    key: Required[Any]
