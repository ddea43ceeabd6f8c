from collections.abc import Callable
from typing import Any, Literal, TypedDict

import equinox as eqx

from .._pytree import PyTree
from ..plan import AbstractPlan
from ..train._revive import Revive
from ..train._trainable import Trainable
from ..train.compiled._selection import Mode
from ..train.data._rows import Order


class FleetFitOptions(TypedDict, total=False):
    """The options of `fit` that `fleet.fit` takes."""

    epochs: int | None
    steps: int | None
    batch_size: int | None
    validation: PyTree
    score: Callable[..., Any] | None
    mode: Mode | None
    patience: int | None
    min_delta: float
    target: Any
    max_steps: Any
    state: eqx.nn.State | None
    hyper: PyTree
    rows: Any
    order: Order
    has_aux: bool
    history: Literal["all", "last"] | int
    trainable: Trainable
    on_diverge: Literal["freeze"] | Revive
    plan: AbstractPlan | None
    scan: bool | None
    checkpoint_every: int | None
    resume: Literal["auto", "must", "never"]
