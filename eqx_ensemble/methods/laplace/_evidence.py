from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._likelihoods import log_likelihood
from ._member import LaplaceMember

_HALVINGS = 64  # of a bracket of width `_WIDTH` in log space: below the rounding of double precision
_WIDTH = 80.0
_MOST_ROUNDS = 1_000


def log_evidence(member: LaplaceMember, prior_precision: Any, noise: Any) -> Float[Array, ""]:
    """The log marginal likelihood of the data under one member, in nats."""
    posterior = member.posterior
    values = posterior.curvature.values if noise is None else posterior.curvature.values / noise**2
    vector = posterior.selection.vector(member.model)
    logdets = jnp.sum(jnp.log1p(values / prior_precision))  # log det of the posterior precision minus that of the prior
    fit = log_likelihood(member.problem.likelihood, posterior.loss, posterior.count, noise)
    return fit - (logdets + prior_precision * (vector @ vector)) / 2


def best_prior(member: LaplaceMember, *, with_noise: bool) -> tuple[Float[Array, ""], Float[Array, ""] | None]:
    """The prior precision and the noise that maximise the evidence of one member, with fixed weights.

    The derivatives with respect to the logarithms of precision and noise each have one root. They are bisected in turn,
    so the evidence never decreases.
    """
    posterior = member.posterior
    vector = posterior.selection.vector(member.model)
    values, square = posterior.curvature.values, vector @ vector
    if posterior.noise is None or not with_noise:
        scaled = values if posterior.noise is None else values / posterior.noise**2
        return _best_precision(scaled, square), posterior.noise

    def advance(carry: tuple) -> tuple:
        precision, inverse, _, count = carry
        new_precision = _best_precision(values * inverse, square)
        new_inverse = _best_inverse(values, new_precision, posterior.loss, posterior.count)
        moved = jnp.abs(jnp.log(new_precision / precision)) + jnp.abs(jnp.log(new_inverse / inverse))
        return new_precision, new_inverse, moved, count + 1

    def goes_on(carry: tuple) -> Array:
        *_, moved, count = carry
        return (moved > 4 * jnp.finfo(values.dtype).eps) & (count < _MOST_ROUNDS)

    start = posterior.prior_precision, 1 / posterior.noise**2, jnp.full_like(square, jnp.inf), 0
    precision, inverse, _, _ = jax.lax.while_loop(goes_on, advance, start)
    return precision, 1 / jnp.sqrt(inverse)


def _best_precision(values: Float[Array, " weights"], square: Float[Array, ""]) -> Float[Array, ""]:
    """The root of `precision |w|^2 = gamma`, MacKay's fixed point; 0 or infinite without one."""
    above = lambda precision: precision * square > jnp.sum(values / (values + precision))
    return _bisect(above, values.size / square)


def _best_inverse(
    values: Float[Array, " weights"], precision: Float[Array, ""], loss: Float[Array, ""], count: Float[Array, ""]
) -> Float[Array, ""]:
    """The root of `loss / noise^2 = count - gamma`, in `1 / noise^2`."""
    above = lambda inverse: inverse * loss + jnp.sum(values * inverse / (values * inverse + precision)) > count
    return _bisect(above, count / loss)


def _bisect(above: Any, most: Float[Array, ""]) -> Float[Array, ""]:
    """The smallest number up to `most` at which `above` holds, by bisection of its logarithm."""
    high = jnp.log(most)

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        is_above = above(jnp.exp(middle))
        return jnp.where(is_above, low, middle), jnp.where(is_above, middle, high)

    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, (high - _WIDTH, high))
    return jnp.exp((low + high) / 2)
