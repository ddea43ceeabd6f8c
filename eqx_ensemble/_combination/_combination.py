import abc
import dataclasses
import functools as ft
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._caller import caller
from .._check import (
    Size,
    check_logits,
    check_moments,
    check_nonnegative_weights,
    check_values,
    check_weight_count,
    concrete,
)
from .._pytree import PyTree
from ._blocks import by_blocks, pays


def check_chunk_weights(weights: Any, num_members: Size, *, rows: tuple[Size, ...] = ()) -> Any:
    """Raises unless a chunk's weights are finite and non-negative; all may be zero. Returns NumPy's array if concrete.

    With `rows`, the shape of the rows, weights per row are also accepted.
    """
    check_weight_count(weights, num_members, rows=rows)
    check_nonnegative_weights(weights)
    host = concrete(weights)
    if host is not None:
        return host.astype(np.float64)
    array = jnp.asarray(weights)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)


def check_seen(partial: Any) -> None:
    """Raises unless at least one member of positive weight was seen."""
    if partial is None:
        raise ValueError(f"`{caller()}` needs at least one member of positive weight before `finish`.")


def check_one_array(predictions: Any) -> Any:
    """Raises unless predictions are one array; NumPy would stack a tuple along a new axis."""
    if isinstance(predictions, tuple | list | dict):
        raise TypeError(
            f"`{caller()}` needs predictions that are one array, got {_several_text(predictions)}.\n"
            "Pairs `(mean, variance)` are for `combine.gaussian` and `uncertainty.decompose_variance`; to keep one of "
            "several outputs: `predict(..., fn=lambda model, x: model(x)[0])`."
        )
    return predictions


def check_pair(predictions: Any) -> tuple[Any, Any]:
    """Raises unless predictions are a pair of a mean and a variance. Returns both."""
    if not isinstance(predictions, tuple | list) or len(predictions) != 2:
        got = f"{type(predictions).__name__} of shape {np.shape(predictions)}"
        if isinstance(predictions, tuple | list | dict):
            got = _several_text(predictions)
        raise TypeError(
            f"`{caller()}` needs predictions that are a pair `(mean, variance)`, got {got}.\n"
            "Other outputs become a pair by `predict(..., fn=lambda model, x: (mean, variance))`; for point "
            "predictions use `combine.moments`."
        )
    return predictions[0], predictions[1]


def check_one_values(predictions: Any) -> Any:
    """Raises unless predictions are one floating-point array `(members, ...)`. Returns it."""
    return check_values("predictions", check_one_array(predictions))


def check_one_logits(predictions: Any) -> Any:
    """Raises unless predictions are logits `(members, *batch, classes)`. Returns them."""
    return check_logits(check_one_array(predictions))


def check_pair_of_moments(predictions: Any) -> tuple[Any, ...]:
    """Raises unless predictions are means and variances of one shape. Returns both."""
    return check_moments(*check_pair(predictions))


def _several_text(predictions: Any) -> str:
    return f"a {type(predictions).__name__} of {len(predictions)}"


class ChunkWeights(NamedTuple):
    """The weights of a chunk and their sum, divided by `2**exponent`; `None` for equal weights."""

    weights: Float[Array, " members"] | None
    total: Float[Array, ""]
    exponent: Int[Array, ""]


def chunk_weights(predictions: PyTree, weights: Any) -> ChunkWeights | None:
    """The checked weights of a chunk; `None` if all are known to be zero.

    Concrete weights are divided by a power of two, which is exact, because float32 may not hold them: likelihoods, for
    example, are often below 1e-45.
    """
    shapes = {np.shape(leaf) for leaf in jax.tree.leaves(predictions)}
    counts = {shape[:1] for shape in shapes}
    if len(counts) != 1 or counts & {(), (0,)}:
        raise ValueError(
            f"`{caller()}` needs predictions with a leading `members` axis of at least one member.\n"
            f"  got shapes {', '.join(map(str, sorted(shapes)))}\nOne member? Add a leading axis: `prediction[None]`."
        )
    count = counts.pop()[0]
    if weights is None:
        return ChunkWeights(None, jnp.asarray(count, float), jnp.int32(0))
    weights = check_chunk_weights(weights, count)
    if not isinstance(weights, np.ndarray):
        return ChunkWeights(weights, jnp.sum(weights), jnp.int32(0))
    if not weights.any():
        return None
    scaled, exponent = scale_weights(weights)
    return ChunkWeights(jnp.asarray(scaled), jnp.asarray(scaled.sum()), jnp.int32(exponent))


def scale_weights(weights: np.ndarray) -> tuple[np.ndarray, int]:
    """Weights divided by the power of two that brings the largest into [1, 2), and its exponent."""
    exponent = int(np.frexp(weights.max())[1]) - 1
    return np.ldexp(weights, -exponent), exponent


def common_scale(first: Int[Array, ""], second: Int[Array, ""], dtype: Any) -> tuple[Int[Array, ""], Float[Array, "2"]]:
    """The larger of the exponents of two partials, and the factors that bring the weights of each to that scale."""
    exponents = jnp.stack([first, second])
    exponent = jnp.max(exponents)
    return exponent, jnp.ldexp(jnp.ones((), dtype), exponents - exponent)


def convex(weights: Array, dtype: Any) -> Array:
    """Normalises weights; equal weights if all are zero, which is only known at run time.

    The chunk or group of such members has weight zero itself.
    """
    weights = jnp.where(jnp.any(weights > 0), weights, jnp.ones_like(weights)).astype(dtype)
    # Values of weight zero are overwritten, so the gradient of such a weight would be wrong: it is set to zero.
    weights = jnp.where(weights == 0, 0, weights)
    return weights / jnp.sum(weights)


class AbstractCombination(abc.ABC):
    """Combines predictions a few members at a time, without the predictions of all members in memory.

    A *partial*, a PyTree or `None`, summarises some members; partials of different members, also from several machines,
    can be merged. Subclasses define three methods, from which `__call__` follows:

    ```python
    class Maximum(ee.combine.AbstractCombination):
        def update(self, partial, predictions, *, weights=None):
            return self.merge(partial, jnp.max(predictions, axis=0))

        def merge(self, first, second):
            if first is None or second is None:
                return second if first is None else first
            return jnp.maximum(first, second)

        def finish(self, partial):
            return partial


    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key), 4, key=key)
    ee.predict(ensemble, jnp.ones((100, 3)), combine=Maximum()).shape
    # (100, 2)
    ```
    """

    @abc.abstractmethod
    def update(self, partial: Any, predictions: PyTree, *, weights: Any = None) -> Any:
        """Adds members to a partial.

        **Arguments:**

        - `partial`: that of the members seen so far; `None` if there are none.
        - `predictions`: those of additional members, `(members, ...)`.
        - `weights`: of additional members, `(members,)`, 1 if not given, on one scale in all calls.
        """

    @abc.abstractmethod
    def merge(self, first: Any, second: Any) -> Any:
        """Merges two partials, each of which may be `None`; the order affects rounding only."""

    @abc.abstractmethod
    def finish(self, partial: Any) -> PyTree:
        """The result for all members seen: arrays `(rows, ...)`."""

    def __call__(self, predictions: PyTree, *, weights: Any = None) -> PyTree:
        """The result for the predictions of all members, `(members, ...)`."""
        return self.finish(self.update(None, predictions, weights=weights))


class Partial(NamedTuple):
    """The summary of the members seen so far, and the sum of their weights: `weight * 2**exponent`."""

    weight: Float[Array, ""]
    exponent: Int[Array, ""]
    summary: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Summary(AbstractCombination):
    """The streaming form of a function: summaries of groups of members are combined as if each group were a member.

    **Attributes:**

    - `public_name`: the name of the function, for messages; see `_caller`.
    - `check`: `check(predictions)` returns predictions in the compute dtype.
    - `of_members`: the summary of members from checked predictions and convex weights, `None` for equal weights.
    - `of_groups`: the summary of groups from their stacked summaries and convex weights.
    - `result`: the function's result from the summary of all members.
    - `pairs`: whether predictions are a pair of a mean and a variance.
    - `event_ndim`: the number of trailing axes of one row: one for `(members, *batch, classes)`, zero if entries are
        independent.
    - `in_blocks`: whether to process rows in blocks on a CPU, which is faster for all functions but plain sums.
    """

    public_name: str
    check: Callable[[PyTree], PyTree]
    of_members: Callable[[PyTree, Any], PyTree]
    of_groups: Callable[[PyTree, Any], PyTree]
    result: Callable[[PyTree], PyTree] = lambda summary: summary
    pairs: bool = False
    event_ndim: int = 0
    in_blocks: bool = True

    def update(self, partial: Any, predictions: PyTree, *, weights: Any = None) -> Any:
        """Adds members to a partial."""
        chunk = chunk_weights(predictions, weights)
        if chunk is None:
            return partial
        predictions = self.check(predictions)
        return _update(self, partial, predictions, chunk, in_blocks=self.in_blocks and pays(predictions))

    def merge(self, first: Any, second: Any) -> Any:
        """Merges two partials."""
        if first is None or second is None:
            return second if first is None else first
        return _merge(self, first, second)

    def finish(self, partial: Any) -> PyTree:
        """The result for all members seen."""
        check_seen(partial)
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


# The registry of functions with a streaming form.

_STREAMS: dict[Callable[..., Any], AbstractCombination] = {}
# For messages: subpackages are imported lazily, so the registry may be incomplete.
NAMES = (
    "combine.gaussian",
    "combine.mean",
    "combine.mean_logits",
    "combine.mixture",
    "combine.moments",
    "combine.vote",
    "uncertainty.decompose_entropy",
    "uncertainty.decompose_variance",
    "uncertainty.disagreement",
    "uncertainty.variation_ratio",
)


def stream(fn: Callable[..., Any], combination: AbstractCombination) -> None:
    """Registers the streaming form of a function."""
    _STREAMS[fn] = combination


def stream_of(combine: Any) -> AbstractCombination | None:
    """The streaming form of the argument `combine`, or `None`."""
    if isinstance(combine, AbstractCombination):
        return combine
    return _STREAMS.get(combine) if isinstance(combine, types.FunctionType) else None


def streaming(fn: Callable[..., Any]) -> AbstractCombination:
    """The streaming form of a function, for members that arrive in sequence or are on several machines.

    The result equals that of the function, within rounding, for any division of the members.

    **Arguments:**

    - `fn`: `mean`, `moments`, `mixture`, `mean_logits`, `vote` or `gaussian` of `eqx_ensemble.combine`;
        `decompose_entropy`, `decompose_variance`, `disagreement` or `variation_ratio` of `eqx_ensemble.uncertainty`.
        For functions of a mean and a variance, predictions are a pair.

    **Returns:** an [`eqx_ensemble.combine.AbstractCombination`][].

    ```python
    moments, partial = ee.combine.streaming(ee.combine.moments), None
    for chunk in jax.random.normal(key, (3, 2, 100)):  # two members each, 100 rows
        partial = moments.update(partial, chunk)
    mean, variance = moments.finish(partial)
    ```
    """
    found = stream_of(fn)
    if found is None:
        raise TypeError(
            f"`combine.streaming` needs a function with a streaming form, got {fn!r}.\n"
            f"They are {', '.join(NAMES)}; for your own subclass `combine.AbstractCombination`."
        )
    return found


def of_predictions(combine: Callable[..., Any]) -> Callable[..., Any]:
    """`combine` as a function of predictions: a pair for functions of a mean and a variance."""
    summary = stream_of(combine)
    if summary is combine or not isinstance(summary, Summary) or not summary.pairs:
        return combine

    def of_pair(predictions: PyTree, **weights: Any) -> PyTree:
        return combine(*check_pair(predictions), **weights)

    return of_pair
