from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import equinox as eqx
from jax.sharding import Mesh

from ..plan import AnyPlan


class PredictOptions(TypedDict, total=False):
    """The options of `predict` that never change the type of its result."""

    weights: Any
    batch_size: int
    memory: int | None
    inference: bool | None
    plan: AnyPlan
    mesh: Mesh | None
    progress: bool | None
    key: Any


class WithCombine(PredictOptions, total=False):
    """The options that do not change the type of the result with `combine`."""

    state: eqx.nn.State | None
    fn: Callable[..., Any] | None


class WithoutCombine(PredictOptions, total=False):
    """The options without `combine`, which may be given as `None`."""

    combine: None


class GroupOptions(TypedDict, total=False):
    """The options of `predict` for a group, some of which may differ between parts."""

    weights: Any
    batch_size: int
    memory: int | None
    inference: bool | None
    plan: AnyPlan | Mapping[str, AnyPlan]
    mesh: Mesh | None
    progress: bool | None
    key: Any
    state: Mapping[str, eqx.nn.State] | None
    fn: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None
