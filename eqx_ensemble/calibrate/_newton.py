from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_MAX_STEPS = 100


class Regression(NamedTuple):
    """The rows of a logistic regression: features, targets from 0 to 1, and weights in the mean."""

    features: Float[Array, "rows features"]
    targets: Float[Array, " rows"]
    share: Float[Array, " rows"]


def minimise_logistic(rows: Regression, free: Bool[Array, " features"]) -> tuple[Float[Array, " features"], Array]:
    """The minimiser of the mean logistic loss, zero where not `free`, and the loss; the last feature is one.

    Newton's method from the base rate. It is differentiated as an implicit function.
    """
    params = _minimise(*jax.lax.stop_gradient((rows, free)))
    # A Newton step of length zero carries the gradient.
    grad, hessian = _derivatives(params, rows, free)
    params = params - jnp.linalg.solve(jax.lax.stop_gradient(hessian), grad - jax.lax.stop_gradient(grad))
    return params, _loss(params, rows)


def standardise(
    features: Float[Array, "rows features"], share: Float[Array, " rows"]
) -> tuple[Float[Array, "rows features"], Float[Array, " features"], Float[Array, " features"]]:
    """Features with mean zero and variance one over rows of nonzero weight, and their means and standard deviations."""
    of_row = jax.lax.stop_gradient(features), share[:, None]
    # Differences from one row are exactly zero for equal rows; differences from a mean would be rounding errors.
    first = of_row[0][jnp.argmax(share > 0)]
    mean = first + jnp.sum(jnp.where(of_row[1] > 0, (of_row[0] - first[None]) * of_row[1], 0), axis=0)
    centred = jnp.where(of_row[1] > 0, of_row[0] - mean[None], 0)
    unit = jnp.max(jnp.abs(centred), axis=0)
    unit = jnp.where(unit > 0, unit, 1)
    scale = unit * jnp.sqrt(jnp.sum((centred / unit[None]) ** 2 * of_row[1], axis=0))
    scale = jnp.where(scale > 0, scale, 1)
    return jnp.where(share[:, None] > 0, (features - mean[None]) / scale[None], 0), mean, scale


def _loss(params: Array, rows: Regression) -> Float[Array, ""]:
    margin = _dot(rows.features, params)
    of_row = rows.targets * jax.nn.softplus(-margin) + (1 - rows.targets) * jax.nn.softplus(margin)
    return jnp.sum(rows.share * of_row)


def _derivatives(params: Array, rows: Regression, free: Array) -> tuple[Array, Array]:
    """The gradient and the Hessian, damped by rounding, in the free parameters."""
    p = jax.nn.sigmoid(_dot(rows.features, params))
    grad = _dot(rows.share * (p - rows.targets), rows.features)
    weighted = rows.features * (rows.share * p * (1 - p))[:, None]
    hessian = jnp.where(free[:, None] & free[None], _dot(weighted.T, rows.features), 0)
    least = jnp.finfo(p.dtype).eps * jnp.trace(hessian) + jnp.finfo(p.dtype).tiny
    return jnp.where(free, grad, 0), hessian + jnp.diag(jnp.where(free, least, 1))


def _minimise(rows: Regression, free: Array) -> Float[Array, " features"]:
    dtype, count = rows.features.dtype, rows.features.shape[1]
    rate = jnp.clip(jnp.sum(rows.share * rows.targets), jnp.finfo(dtype).eps, 1 - jnp.finfo(dtype).eps)
    start = jnp.zeros(count, dtype).at[-1].set(jnp.log(rate) - jnp.log1p(-rate))
    lengths = 2.0 ** -jnp.arange(12, dtype=dtype)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        params, _, num_steps = carry
        grad, hessian = _derivatives(params, rows, free)
        full = jnp.linalg.solve(hessian, grad)
        tried = params[None] - lengths[:, None] * full[None]
        losses = jax.vmap(_loss, in_axes=(0, None))(tried, rows)
        best = tried[jnp.argmin(jnp.where(jnp.isnan(losses), jnp.inf, losses))]
        # Close to the minimum the loss is dominated by rounding, the gradient is not: take the full Newton step.
        new = jnp.where(jnp.dot(grad, full) < 1e-3 * _loss(params, rows), tried[0], best)
        return new, jnp.max(jnp.abs(new - params)) / (1 + jnp.max(jnp.abs(params))), num_steps + 1

    def goes_on(carry: tuple[Array, Array, Array]) -> Array:
        _, moved, num_steps = carry
        return (moved > 4 * jnp.finfo(dtype).eps) & (num_steps < _MAX_STEPS)

    params, *_ = jax.lax.while_loop(goes_on, step, (start, jnp.asarray(jnp.inf, dtype), jnp.asarray(0)))
    return params


def _dot(first: Array, second: Array) -> Array:
    return jnp.matmul(first, second, precision=jax.lax.Precision.HIGHEST)
