import os
from collections.abc import Callable
from typing import Any, Literal, Required

from jax.sharding import Mesh

from ..plan import AbstractPlan
from ..train._revive import Revive
from ..train._signatures import CommonFitOptions
from ._shard import ShardReport


class FleetFitOptions(CommonFitOptions, total=False):
    """The options of `fit` that `fleet.fit` takes."""

    on_diverge: Literal["freeze"] | Revive
    plan: AbstractPlan | None
    mesh: Callable[[], Mesh] | None


class FleetCallOptions(FleetFitOptions, total=False):
    """All options of `fleet.fit` except `save`, which determines the type of its result."""

    shard: int | None
    workers: int | None
    retries: int
    checkpoint: str | os.PathLike[str] | None
    ids: Any
    on_shard: Callable[[ShardReport], Any] | None
    progress: bool | None
    key: Required[Any]
