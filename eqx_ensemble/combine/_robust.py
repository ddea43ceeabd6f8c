from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Real

from .. import _weighting
from .._caller import caller
from .._check import (
    as_column,
    check_positive_int,
    check_positive_scalar,
    check_scalar,
    check_values,
    check_weights,
    concrete,
    value_error,
)
from .._combination import AbstractCombination, by_order, check_one_array, check_seen, chunk_weights, common_scale
from .._foreign import as_numpy
from .._pytree import PyTree
from .._weighting import quantile_in_order, shares_in_order, sum_members


def check_sketch_levels(levels: Any) -> tuple[float, ...]:
    """Raises unless `levels` are a list of numbers from 0 to 1. Returns them as floats."""
    found = as_numpy(levels, "levels")
    if found.ndim != 1 or found.size == 0 or found.dtype.kind not in "fiu":
        raise TypeError(f"`{caller()}` needs a list of `levels`, got {levels!r}.")
    if not ((found >= 0) & (found <= 1)).all():
        raise ValueError(f"`{caller()}` needs `levels` from 0 to 1, got {levels!r}.")
    return tuple(float(level) for level in found)


def check_power(power: ArrayLike, dtype: jnp.dtype) -> Array:
    """Raises unless `power` is a positive scalar (where concrete). Returns it as an array."""
    return check_positive_scalar("power", power, dtype, fix="1 is the geometric mean, `num_members` the plain product.")


def check_cut(cut: ArrayLike, dtype: jnp.dtype) -> Array:
    """Raises unless `cut` is a scalar from 0 to below 0.5 (where concrete). Returns it as an array."""
    array = check_scalar("cut", cut, dtype)
    host = concrete(cut)
    if host is not None and not (0 <= host and host.astype(dtype) < 0.5):
        raise value_error(
            "a `cut` from 0 to below 0.5", f"got {host}", "10 % at each end are `cut=0.1`; for 0.5 use `median`."
        )
    return array


class _Items(NamedTuple):
    values: Float[Array, "items ..."]
    weights: Float[Array, "items ..."]


class _Sketch(NamedTuple):
    tiers: tuple[_Items, ...]
    unknown: Bool[Array, "..."]
    lean: Float[Array, "..."]  # net weight moved to lower values, mean over pairs, in all merges so far
    exponent: Int[Array, ""]  # weights are divided by 2**exponent


class QuantileSketch(AbstractCombination):
    r"""Quantiles over members of predictions `(members, ...)`, entry by entry, from a sketch of bounded size.

    For a stream of members; in memory, [`eqx_ensemble.uncertainty.quantile`][] is exact and costs less.

    Exact below `2 * size` members. For $M$ members of equal weight the error of a rank
    is at most $M \lfloor \log_2(M / \mathrm{size}) \rfloor / (2 \, \mathrm{size})$ members: 2 % of 4,096. Quantiles are
    NumPy's `"averaged_inverted_cdf"`.

    **Arguments:**

    - `levels`: a list of numbers from 0 to 1, the last axis of the result.
    - `size`: half the capacity of a level of the sketch; full levels are merged in pairs of neighbours.

    ```python
    values = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    ee.combine.QuantileSketch([0.25, 0.9])(values)  # [[1.5, 4.0]]
    ```

    ??? cite
        [Manku et al., SIGMOD 1998](https://doi.org/10.1145/276304.276342)
    """

    def __init__(self, levels: Sequence[float], *, size: int = 128) -> None:
        self.levels: tuple[float, ...] = check_sketch_levels(levels)
        self.size: int = check_positive_int(size, "size")

    def update(self, partial: Any, predictions: PyTree, *, weights: Any = None) -> Any:
        """Adds members to the sketch."""
        values = check_values("predictions", check_one_array(predictions))
        chunk = chunk_weights(predictions, weights)
        if chunk is None:
            return partial
        given, dtype = chunk.weights, values.dtype
        own = jnp.ones(values.shape[0], dtype) if given is None else jnp.asarray(given, dtype)
        lean = jnp.zeros(values.shape[1:], dtype)
        new = _Sketch((_new_items(values, own),), _unknown(values, own), lean, chunk.exponent)
        return self.merge(partial, new)

    def merge(self, first: Any, second: Any) -> Any:
        """Merges two sketches."""
        if first is None:
            first, second = second, None
        if first is None:
            return None
        if second is not None:
            first, second = _in_one_scale(first, second)
        tiers, unknown, lean = list(first.tiers), first.unknown, first.lean
        if second is not None:
            unknown, lean = unknown | second.unknown, lean + second.lean
        for i, items in enumerate(() if second is None else second.tiers):
            if i < len(tiers):
                tiers[i] = jax.tree.map(lambda *xs: jnp.concatenate(xs), tiers[i], items)
            else:
                tiers.append(items)
        for i, items in enumerate(tiers):  # including tiers appended in this loop
            if items.values.shape[0] < 2 * self.size:
                continue
            tiers[i], joined, lean = _join_pairs(items, lean)
            if i + 1 < len(tiers):
                tiers[i + 1] = jax.tree.map(lambda *xs: jnp.concatenate(xs), tiers[i + 1], joined)
            else:
                tiers.append(joined)
        return _Sketch(tuple(tiers), unknown, lean, first.exponent)

    def finish(self, partial: Any) -> Float[Array, "... levels"]:
        """The quantiles over all members seen."""
        check_seen(partial)
        return _quantiles(partial, jnp.asarray(self.levels, partial.tiers[0].values.dtype))


@jax.jit
def _new_items(values: Array, weights: Array) -> _Items:
    spread = jnp.broadcast_to(as_column(weights, values.ndim), values.shape)
    return _Items(jnp.where(spread == 0, jnp.inf, values), spread)


@jax.jit
def _in_one_scale(first: _Sketch, second: _Sketch) -> tuple[_Sketch, _Sketch]:
    exponent, factors = common_scale(first.exponent, second.exponent, first.lean.dtype)

    def rescale(sketch: _Sketch, factor: Array) -> _Sketch:
        weights = [items.weights * factor for items in sketch.tiers]
        tiers = [
            _Items(jnp.where(own == 0, jnp.inf, items.values), own)
            for items, own in zip(sketch.tiers, weights, strict=True)
        ]
        return _Sketch(tuple(tiers), sketch.unknown, sketch.lean * factor, exponent)

    return rescale(first, factors[0]), rescale(second, factors[1])


@jax.jit
def _unknown(values: Array, weights: Array) -> Array:
    return jnp.any(jnp.isnan(_weighting.blank_unweighted(values, weights)), axis=0)


@jax.jit
def _join_pairs(items: _Items, lean: Array) -> tuple[_Items, _Items, Array]:
    """The remaining values of a level (at most one), its merged pairs of neighbours, and the new lean."""
    values, weights = jax.lax.sort(tuple(items), dimension=0, num_keys=1)
    whole = values.shape[0] // 2 * 2
    low, high, of_low, of_high = values[0:whole:2], values[1:whole:2], weights[0:whole:2], weights[1:whole:2]
    down = (lean < 0) | ((lean == 0) & _coin(values))
    keep_low = (of_low > of_high) | ((of_low == of_high) & down[None])
    pairs = _Items(jnp.where(keep_low, low, high), of_low + of_high)
    lean = lean + jnp.mean(jnp.where(keep_low, of_high, -of_low), axis=0)
    return _Items(values[whole:], weights[whole:]), pairs, lean


def _coin(values: Float[Array, "items ..."]) -> Bool[Array, "..."]:
    """A pseudo-random bit per entry, from the bits of its values in any order: a fixed choice would bias ranks."""
    bits = jax.lax.bitcast_convert_type(values, jnp.dtype(f"uint{8 * values.dtype.itemsize}"))
    return jnp.sum(jax.lax.population_count(bits) & 1, axis=0) % 2 == 1


@jax.jit
def _quantiles(sketch: _Sketch, levels: Array) -> Array:
    items = jax.tree.map(lambda *xs: jnp.concatenate(xs), *sketch.tiers)
    values, weights = jax.lax.sort(tuple(items), dimension=0, num_keys=1)
    one = lambda level: _weighting.quantile_in_order(values, weights, level, 1 - level)
    found = jnp.stack([one(level) for level in levels], axis=-1)
    return jnp.where(sketch.unknown[..., None], jnp.nan, found)


def median(
    values: Float[ArrayLike, "members ..."], *, weights: Real[ArrayLike, " members"] | None = None
) -> Float[Array, "..."]:
    """The weighted median over members, entry by entry; robust to outlying members.

    The value at which the cumulative weight reaches one half; the midpoint to the next value if it is exactly one half.
    For other levels see [`eqx_ensemble.uncertainty.quantile`][].

    **Arguments:**

    - `values`: floating-point, `(members, ...)`. Medians of the probabilities of several classes do not sum to one.

    **Returns:** an array `(...)`; NaN where a member is NaN.

    ```python
    values = jnp.array([[1.0], [2.0], [1e9]])
    ee.combine.median(values)  # [2.0]
    ee.combine.median(values, weights=jnp.array([3, 1, 1]))  # [1.0]
    ```
    """
    checked = check_values("values", values)
    convex = check_weights(weights, checked.shape[0], checked.dtype)
    return by_order(_median, checked, convex)


def trimmed_mean(
    values: Float[ArrayLike, "members ..."],
    *,
    cut: Real[ArrayLike, ""] = 0.1,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, "..."]:
    r"""The mean over members without the lowest and highest values, entry by entry.

    $\frac{1}{1 - 2c} \int_c^{1 - c} Q(u) \, du$ with the members' quantiles $Q$ and $c$ the `cut`;
    `scipy.stats.trim_mean` if $c$ times the number of members is an integer.

    **Arguments:**

    - `values`: floating-point, `(members, ...)`.
    - `cut`: the fraction to cut off at each end, from 0 (the mean) to below 0.5 (the median).

    **Returns:** an array `(...)`; NaN where any member is NaN.

    ```python
    values = jnp.array([[-1e9], [1.0], [2.0], [3.0], [1e9]])
    ee.combine.trimmed_mean(values, cut=0.2)  # [2.0]
    ```
    """
    checked = check_values("values", values)
    convex = check_weights(weights, checked.shape[0], checked.dtype)
    return by_order(_trimmed_mean, checked, convex, check_cut(cut, checked.dtype))


def _median(ordered: Float[Array, "members ..."], own: Float[Array, "members ..."] | None, _: None) -> Array:
    half = jnp.asarray(0.5, ordered.dtype)
    return jnp.where(jnp.isnan(ordered[-1]), jnp.nan, quantile_in_order(ordered, own, half, half))


def _trimmed_mean(
    ordered: Float[Array, "members ..."], own: Float[Array, "members ..."] | None, cut: Float[Array, ""]
) -> Float[Array, "..."]:
    inside = jnp.clip(shares_in_order(ordered, own), cut, 1 - cut)
    kept = jnp.diff(inside, axis=0, prepend=jnp.broadcast_to(cut, inside[:1].shape))
    # A fraction due to rounding alone must not include an outlying member.
    rounding = jnp.minimum(8 * jnp.finfo(ordered.dtype).eps, jnp.max(kept, axis=0) / 2)
    kept = jnp.where(kept < rounding[None], 0, kept)
    kept = kept / jnp.sum(kept, axis=0)[None]
    # Deviations from a member that is kept are small: a large common offset costs no precision.
    middle = lambda: jax.lax.dynamic_index_in_dim(ordered, ordered.shape[0] // 2, keepdims=False)
    one = middle() if own is None else _at_largest(ordered, kept)
    one = jnp.where(jnp.abs(one) < jnp.finfo(ordered.dtype).max / 4, one, 0)
    found = one + sum_members(kept * jnp.where(kept == 0, 0, ordered - one[None]))
    return jnp.where(jnp.isnan(ordered[-1]), jnp.nan, found)


def _at_largest(values: Float[Array, "members ..."], weights: Float[Array, "members ..."]) -> Float[Array, "..."]:
    index = jnp.argmax(weights, axis=0)
    return jnp.take_along_axis(values, index[None], axis=0)[0]
