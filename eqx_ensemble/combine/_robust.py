import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import (
    check_positive_scalar,
    check_scalar,
    check_values,
    check_weights,
    concrete,
    value_error,
)
from .._combination import by_order
from .._weighting import quantile_in_order, shares_in_order, sum_members


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
