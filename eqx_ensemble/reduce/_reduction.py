import abc
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .. import _check
from ._blocks import by_blocks, pays


class AbstractReduction(eqx.Module):
    """Takes predictions some members at a time, and never holds those of all.

    What was seen so far is a *partial*: an ordinary PyTree, `None` before anything was seen. Partials of parts of the
    ensemble, made one after another or on different machines, are merged. A reduction is also a plain function of the
    predictions of all members, and can be given to [`eqx_ensemble.predict`][] as `combine`.

    ```python
    predictions = jax.random.normal(key, (6, 100, 3))  # members, rows, classes
    reduction = ee.reduce.DecomposeEntropy()
    partial = None
    for chunk in (predictions[:4], predictions[4:]):
        partial = reduction.update(partial, chunk)
    reduction.finish(partial)  # as ee.uncertainty.decompose_entropy(predictions)
    reduction(predictions)  # the same
    ```
    """

    @abc.abstractmethod
    def update(self, partial: Any, predictions: PyTree, *, weights: Any = None) -> Any:
        """The partial with some more members.

        **Arguments:**

        - `partial`: of the members seen so far; `None` for none.
        - `predictions`: of some more members, `(members, ...)`.
        - `weights`: one for each of these members `(members,)`, on the scale of all others: only their ratios matter.
            1 each if not given. A member of weight zero is left out.
        """

    @abc.abstractmethod
    def merge(self, first: Any, second: Any) -> Any:
        """The partial of the members of two partials, up to rounding the same in either order."""

    @abc.abstractmethod
    def finish(self, partial: Any) -> PyTree:
        """The result for all members seen."""

    def __call__(self, predictions: PyTree, *, weights: Any = None) -> PyTree:
        """The result for `predictions` `(members, ...)` of all members at once."""
        return self.finish(self.update(None, predictions, weights=weights))


class Partial(NamedTuple):
    """The summary of the members seen so far, and the sum of their weights."""

    weight: Float[Array, ""]
    summary: PyTree


class AbstractSummary(AbstractReduction):
    """A reduction whose summaries of groups of members are themselves combined as if each group were a member.

    **Attributes:**

    - `in_blocks`: whether rows are taken some at a time on a CPU, which is faster for all but plain sums.
    - `event_ndim`: how many trailing axes belong to one row: one for `(members, *batch, classes)`, none where entries
        are treated apart.
    """

    in_blocks: ClassVar[bool] = True
    event_ndim: eqx.AbstractClassVar[int]

    @abc.abstractmethod
    def checked(self, predictions: PyTree) -> PyTree:
        """Predictions in the dtype that is computed in, if they are what this reduction takes."""

    @abc.abstractmethod
    def of_members(self, predictions: PyTree, weights: Any) -> PyTree:
        """The summary of members."""

    @abc.abstractmethod
    def of_groups(self, summaries: PyTree, weights: Any) -> PyTree:
        """The summary of groups of members from theirs, which stand on the leading axis."""

    @abc.abstractmethod
    def result(self, summary: PyTree) -> PyTree:
        """What is wanted."""

    def update(self, partial: Any, predictions: PyTree, *, weights: Any = None) -> Any:
        """The partial with some more members."""
        weights, total = chunk_weights(self, predictions, weights)
        if total is None:
            return partial
        predictions = self.checked(predictions)
        return _updated(self, partial, predictions, weights, total, in_blocks=self.in_blocks and pays(predictions))

    def merge(self, first: Any, second: Any) -> Any:
        """The partial of the members of two partials."""
        if first is None or second is None:
            return second if first is None else first
        return _merged(self, first, second)

    def finish(self, partial: Any) -> PyTree:
        """The result for all members seen."""
        _check.members_seen(partial, name=name_of(self))
        return self.result(partial.summary)


@eqx.filter_jit
def _updated(
    reduction: AbstractSummary, partial: Any, predictions: PyTree, weights: Any, total: Array, *, in_blocks: bool
) -> Any:
    of_members = lambda predictions: reduction.of_members(predictions, None if weights is None else _some(weights))
    cut = lambda predictions: by_blocks(of_members, predictions, event_ndim=reduction.event_ndim)
    new = Partial(total, (cut if in_blocks else of_members)(predictions))
    return new if partial is None else _merged(reduction, partial, new)


@eqx.filter_jit
def _merged(reduction: AbstractSummary, first: Partial, second: Partial) -> Partial:
    weights = jnp.stack([first.weight, second.weight])
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), first.summary, second.summary)
    return Partial(jnp.sum(weights), reduction.of_groups(stacked, _some(weights)))


def chunk_weights(reduction: AbstractReduction, predictions: PyTree, weights: Any) -> tuple[Any, Array | None]:
    """Checked weights of a chunk, and their sum; `None` for it where all of them are known to be zero."""
    count = _check.members_of_chunk(predictions, name=name_of(reduction))
    if weights is None:
        return None, jnp.asarray(np.float64(count))
    weights = _check.chunk_weights(weights, count, name=name_of(reduction))
    if isinstance(weights, np.ndarray):
        return jnp.asarray(weights), jnp.asarray(weights.sum()) if weights.any() else None
    return weights, jnp.sum(weights)


def name_of(reduction: AbstractReduction) -> str:
    """A reduction as it is written."""
    return f"reduce.{type(reduction).__name__}"


def _some(weights: Array) -> Array:
    """Weights that are all zero in a compiled program, where nobody can tell: the whole then has weight zero itself."""
    return jnp.where(jnp.any(weights > 0), weights, jnp.ones_like(weights))
