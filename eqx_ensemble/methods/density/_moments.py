"""Class means and Cholesky factors of covariances, for one member."""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Integer


def centre_rows(
    features: Float[Array, "batch hidden"], counted: Float[Array, " batch"]
) -> tuple[Float[Array, "batch hidden"], Float[Array, " hidden"]]:
    """Deviations from the mean of the unmasked rows, and this mean; avoids cancellation for large offsets."""
    share = counted / jnp.sum(counted)
    rough = share @ features
    away = features - rough[None]
    return away - (share @ away)[None], rough + share @ away


def class_means(
    deviations: Float[Array, "batch hidden"], member_of: Float[Array, "batch classes"]
) -> Float[Array, "classes hidden"]:
    """The mean of each class."""
    return (member_of / jnp.sum(member_of, axis=0, keepdims=True)).T @ deviations


def one_hot_rows(
    labels: Integer[Array, " batch"], mask: Bool[Array, " batch"] | None, num_classes: int, dtype: jnp.dtype
) -> Float[Array, "batch classes"]:
    """One-hot labels; masked rows are all zero."""
    found = jax.nn.one_hot(labels, num_classes, dtype=dtype)
    return found if mask is None else jnp.where(mask[:, None], found, 0)


def factor(
    residuals: Float[Array, "batch hidden"],
    counted: Float[Array, " batch"],
    ddof: int,
    ridge: Float[Array, ""],
    largest: Float[Array, " hidden"],
) -> Float[Array, "hidden hidden"]:
    """The lower Cholesky factor of a covariance around zero, with a ridge; NaN if it is numerically singular.

    `largest` is the largest magnitude of each unit. A variance, or the residual variance of a unit given the previous
    ones, counts as zero if it is within rounding.
    """
    kept = jnp.where(counted[:, None] > 0, residuals, 0)
    covariance = kept.T @ kept / (jnp.sum(counted) - ddof)
    variances = jnp.diagonal(covariance) + ridge
    lower = jnp.linalg.cholesky(covariance + ridge * jnp.eye(covariance.shape[0], dtype=covariance.dtype))
    eps = float(jnp.finfo(lower.dtype).eps)
    known = variances > (4 * eps * largest) ** 2
    known &= jnp.diagonal(lower) ** 2 > 2 * len(lower) ** 0.5 * eps * variances
    return jnp.where(jnp.all(known), lower, jnp.nan)


def squared_distance(
    away: Float[Array, "batch hidden"], lower: Float[Array, "hidden hidden"]
) -> Float[Array, " batch"]:
    """Squared Mahalanobis distance from zero."""
    return jnp.sum(solve_triangular(lower, away.T, lower=True) ** 2, axis=0)
