import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import Cut, Members, Weights, array_function
from .._weighting import quantile_in_order, shares_in_order, sum_members


@array_function(in_order="values", each_row=True)
def median(values: Members, *, weights: Weights = None) -> Float[Array, "..."]:
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
    half = jnp.asarray(0.5, values.dtype)
    return jnp.where(jnp.isnan(values[-1]), jnp.nan, quantile_in_order(values, weights, half, half))


@array_function(in_order="values", each_row=True)
def trimmed_mean(values: Members, *, cut: Cut = 0.1, weights: Weights = None) -> Float[Array, "..."]:
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
    inside = jnp.clip(shares_in_order(values, weights), cut, 1 - cut)
    kept = jnp.diff(inside, axis=0, prepend=jnp.broadcast_to(cut, inside[:1].shape))
    # A fraction due to rounding alone must not include an outlying member.
    rounding = jnp.minimum(8 * jnp.finfo(values.dtype).eps, jnp.max(kept, axis=0) / 2)
    kept = jnp.where(kept < rounding[None], 0, kept)
    kept = kept / jnp.sum(kept, axis=0)[None]
    # Deviations from a member that is kept are small: a large common offset costs no precision.
    middle = lambda: jax.lax.dynamic_index_in_dim(values, values.shape[0] // 2, keepdims=False)
    one = middle() if weights is None else _at_largest(values, kept)
    one = jnp.where(jnp.abs(one) < jnp.finfo(values.dtype).max / 4, one, 0)
    found = one + sum_members(kept * jnp.where(kept == 0, 0, values - one[None]))
    return jnp.where(jnp.isnan(values[-1]), jnp.nan, found)


def _at_largest(values: Float[Array, "members ..."], weights: Float[Array, "members ..."]) -> Float[Array, "..."]:
    index = jnp.argmax(weights, axis=0)
    return jnp.take_along_axis(values, index[None], axis=0)[0]
