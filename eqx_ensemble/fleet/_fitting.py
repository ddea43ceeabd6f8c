"""The arguments of `fit`, divided into those common to all shards and those of each shard."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .._check import check_key
from ..plan._auto import as_plan
from ..train.compiled._optimiser import Optimiser
from ..train.data._functions import is_data_function
from ._check import check_divisible
from ._check_fit import check_data, check_known, check_losses, check_options, check_start_options
from ._divide import large_arrays, member_options, on_host, take_data, take_options


class Fitting(NamedTuple):
    """A call of `fit`, divided into shards.

    **Attributes:**

    - `common`: the arguments common to all shards.
    - `own`: the options with one value per member.
    - `sources`: data and validation data, or functions that make them on the worker.
    """

    common: dict[str, Any]
    own: dict[str, Any]
    sources: dict[str, Any]

    @property
    def arrays(self) -> list[Any]:
        """The arrays that are sent to each worker once."""
        return [array for x in self.sources.values() if not is_data_function(x) for array in large_arrays(x)]

    def part(self, start: Any, positions: np.ndarray, ids: np.ndarray, folder: Any) -> dict[str, Any]:
        """The arguments of the shard at `positions`, which starts from `start`."""
        sources = {word: x if is_data_function(x) else take_data(x, positions) for word, x in self.sources.items()}
        options = take_options(self.own, positions)
        return {"start": start, "ids": ids, "sources": sources, "checkpoint": folder, "options": options}


def prepare(
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: Any,
    options: dict[str, Any],
    num_members: int,
    *,
    begun: Any,
    name: str,
    key: Any,
) -> Fitting:
    """Checks the arguments of `fit`, and divides them into common and per-member ones.

    `begun` is an ensemble, a training state or a run; or `None` for ensembles that are built on the worker.
    """
    plan = as_plan(options.get("plan"))
    check_divisible(options, plan, options.get("on_diverge", "freeze"), data, name=name)
    check_known(options, name=name)
    check_options(options, name=name)
    check_key(key, name=name)
    own = member_options(options, num_members, name=name)
    given = (("data", data), ("validation", options.get("validation")))
    sources = {word: x if is_data_function(x) else on_host(x, word, name=name) for word, x in given}
    check_start_options(begun, optimiser, options | own, name=name)
    check_losses(begun, loss, optimiser, options, name=name)
    check_data(sources, num_members, options | own, name=name)
    common = {"loss": loss, "optimiser": optimiser, "plan": plan, "key": key}
    common |= {word: value for word, value in options.items() if word not in common | own | sources}
    return Fitting(common, own, sources)
