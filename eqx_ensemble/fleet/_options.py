from collections.abc import Callable
from typing import Literal

from jax.sharding import Mesh

from ..plan import AbstractPlan
from ..train._revive import Revive
from ..train._signatures import CommonFitOptions


class FleetFitOptions(CommonFitOptions, total=False):
    """The options of `fit` that `fleet.fit` takes."""

    on_diverge: Literal["freeze"] | Revive
    plan: AbstractPlan | None
    mesh: Callable[[], Mesh] | None
