"""Sums over the `members` axis that combining, scoring and uncertainty share; weights come checked and normalised."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Shaped


def blank_unweighted(
    values: Float[Array, "members ..."], weights: Float[Array, " members"] | None, *, fill: float = 0.0
) -> Float[Array, "members ..."]:
    """The values, overwritten for members of weight zero, so that their NaNs reach no value and no gradient."""
    if weights is None:
        return values
    return jnp.where(_spread(weights, values) == 0, fill, values)


def blank_masked(
    values: Shaped[Array, "..."], mask: Bool[Array, "*batch"] | None, *, before: int = 0, fill: ArrayLike = 0
) -> Shaped[Array, "..."]:
    """The values, overwritten in rows that are left out; `before` is the number of axes in front of the rows."""
    if mask is None:
        return values
    shape = (1,) * before + mask.shape + (1,) * (values.ndim - before - mask.ndim)
    return jnp.where(jnp.reshape(mask, shape), values, fill)


def weighted_mean(values: Float[Array, "members ..."], weights: Float[Array, " members"] | None) -> Float[Array, "..."]:
    """Mean over members."""
    if weights is None:
        return jnp.mean(values, axis=0)
    return jnp.sum(values * _spread(weights, values), axis=0)


def log_mixture(logs: Float[Array, "members ..."], weights: Float[Array, " members"] | None) -> Float[Array, "..."]:
    """Logarithm of the mean over members of `exp(logs)`."""
    num_members = logs.shape[0]
    convex = jnp.full(num_members, 1 / num_members, logs.dtype) if weights is None else weights
    spread = _spread(convex, logs)
    # Where no member gives any probability, logsumexp has the right value but a NaN gradient.
    impossible = jnp.all((logs == -jnp.inf) | (spread == 0), axis=0)
    safe = jnp.where(impossible[None], 0, logs)
    return jnp.where(impossible, -jnp.inf, jax.nn.logsumexp(safe, axis=0, b=spread))


def moments(
    mean: Float[Array, "members ..."], weights: Float[Array, " members"] | None
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Mean and variance over members (ddof 0)."""
    rough = weighted_mean(mean, weights)
    # The deviations from a first mean are small numbers: their mean corrects its rounding, their squares do not cancel.
    deviation = mean - rough[None]
    correction = weighted_mean(deviation, weights)
    return rough + correction, weighted_mean((deviation - correction[None]) ** 2, weights)


def _spread(weights: Float[Array, " members"], values: Float[Array, "members ..."]) -> Float[Array, "members ..."]:
    return jnp.reshape(weights, (-1,) + (1,) * (values.ndim - 1))
