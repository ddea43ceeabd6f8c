import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._pytree import PyTree
from ._blocks import by_blocks, pays
from ._check import check_seen
from ._combination import AbstractCombination
from ._weights import ChunkWeights, chunk_weights, common_scale, convex


class Partial(NamedTuple):
    """The summary of the members seen so far, and the sum of their weights: `weight * 2**exponent`."""

    weight: Float[Array, ""]
    exponent: Int[Array, ""]
    summary: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Summary(AbstractCombination):
    """The streaming form of a function: summaries of groups of members are combined as if each group were a member.

    **Attributes:**

    - `name`: the name of the function, for messages.
    - `check`: `check(name, predictions)` returns predictions in the compute dtype.
    - `of_members`: the summary of members from checked predictions and convex weights, `None` for equal weights.
    - `of_groups`: the summary of groups from their stacked summaries and convex weights.
    - `result`: the function's result from the summary of all members.
    - `pairs`: whether predictions are a pair of a mean and a variance.
    - `event_ndim`: the number of trailing axes of one row: one for `(members, *batch, classes)`, zero if entries are
        independent.
    - `in_blocks`: whether to process rows in blocks on a CPU, which is faster for all functions but plain sums.
    """

    name: str
    check: Callable[[str, PyTree], PyTree]
    of_members: Callable[[PyTree, Any], PyTree]
    of_groups: Callable[[PyTree, Any], PyTree]
    result: Callable[[PyTree], PyTree] = lambda summary: summary
    pairs: bool = False
    event_ndim: int = 0
    in_blocks: bool = True

    def update(self, partial: Any, predictions: PyTree, *, weights: Any = None) -> Any:
        """Adds members to a partial."""
        chunk = chunk_weights(predictions, weights, name=self.name)
        if chunk is None:
            return partial
        predictions = self.check(self.name, predictions)
        return _update(self, partial, predictions, chunk, in_blocks=self.in_blocks and pays(predictions))

    def merge(self, first: Any, second: Any) -> Any:
        """Merges two partials."""
        if first is None or second is None:
            return second if first is None else first
        return _merge(self, first, second)

    def finish(self, partial: Any) -> PyTree:
        """The result for all members seen."""
        check_seen(partial, name=self.name)
        return self.result(partial.summary)


@ft.partial(jax.jit, static_argnames=("form", "in_blocks"))
def _update(form: Summary, partial: Any, predictions: PyTree, chunk: ChunkWeights, *, in_blocks: bool) -> Any:
    dtype = jax.tree.leaves(predictions)[0].dtype
    own = None if chunk.weights is None else convex(chunk.weights, dtype)
    of_members = lambda predictions: form.of_members(predictions, own)
    cut = lambda predictions: by_blocks(of_members, predictions, event_ndim=form.event_ndim)
    new = Partial(chunk.total, chunk.exponent, (cut if in_blocks else of_members)(predictions))
    return new if partial is None else _merge(form, partial, new)


@ft.partial(jax.jit, static_argnames="form")
def _merge(form: Summary, first: Partial, second: Partial) -> Partial:
    weights = jnp.stack([first.weight, second.weight])
    exponent, factors = common_scale(first.exponent, second.exponent, weights.dtype)
    weights = weights * factors
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), first.summary, second.summary)
    own = convex(weights, jax.tree.leaves(stacked)[0].dtype)
    return Partial(jnp.sum(weights), exponent, form.of_groups(stacked, own))
