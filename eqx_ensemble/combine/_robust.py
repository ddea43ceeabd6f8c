import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import check_values, check_weights
from .._combination import by_order
from .._weighting import quantile_in_order, shares_in_order, sum_members
from ._check import check_cut


def median(
    values: Float[ArrayLike, "members ..."],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, "..."]:
    r"""The weighted median over members, entry by entry; robust to outlying members.

    The value at which the cumulative weight reaches one half; the midpoint to the next value if it is exactly one half.
    For equal weights this is the usual median.

    **Arguments:**

    - `values`: floating-point, `(members, ...)`. Medians of the probabilities of several classes do not sum to one.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Members of weight zero are ignored.

    **Returns:**

    The median, of the shape of one member's values; NaN where a member is NaN. For other levels see
    [`eqx_ensemble.uncertainty.quantile`][].

    **Raises:**

    As [`eqx_ensemble.combine.mean`][].

    ```python
    values = jnp.array([[1.0], [2.0], [1e9]])
    ee.combine.median(values)  # [2.0]
    ee.combine.median(values, weights=jnp.array([3, 1, 1]))  # [1.0]
    ```
    """
    name = "combine.median"
    checked = check_values(name, "values", values)
    convex = check_weights(name, weights, checked.shape[0], checked.dtype)
    return by_order(_median, checked, convex)


def trimmed_mean(
    values: Float[ArrayLike, "members ..."],
    *,
    cut: Real[ArrayLike, ""] = 0.1,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, "..."]:
    r"""The mean over members without the lowest and highest values, entry by entry.

    $\frac{1}{1 - 2c} \int_c^{1 - c} Q(u) \, du$ with $Q$ the quantiles of the members and $c$ the `cut`: a fraction $c$
    of the weight, in the order of the values, is cut off at each end. Members at the edges have partial weight: the
    result is continuous in `cut`, and is unchanged if a member is split into two of half the weight. If $c$ times the
    number of members is an integer, whole members are cut off, as in `scipy.stats.trim_mean`.

    **Arguments:**

    - `values`: floating-point, `(members, ...)`.
    - `cut`: the fraction to cut off at each end, from 0 (the mean) to below 0.5 (the median).
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Members of weight zero are ignored.

    **Returns:**

    The mean, of the shape of one member's values; NaN where a member is NaN, even one that would be cut off.

    **Raises:**

    As [`eqx_ensemble.combine.mean`][], and `ValueError` for a `cut` out of range (where concrete).

    ```python
    values = jnp.array([[-1e9], [1.0], [2.0], [3.0], [1e9]])
    ee.combine.trimmed_mean(values, cut=0.2)  # [2.0]
    ```
    """
    name = "combine.trimmed_mean"
    checked = check_values(name, "values", values)
    convex = check_weights(name, weights, checked.shape[0], checked.dtype)
    return by_order(_trimmed_mean, checked, convex, check_cut(name, cut, checked.dtype))


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
