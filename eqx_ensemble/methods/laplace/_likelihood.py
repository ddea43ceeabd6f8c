"""Likelihoods of one row of outputs `(out,)`, and the probabilities of classes whose logits are Gaussian."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

Link = Literal["probit", "mc"]
LINKS = ("probit", "mc")


class Likelihood(NamedTuple):
    """The loss and curvature of a likelihood, at a standard deviation of 1 if it has noise.

    `loss(outputs, target)` is the negative log-likelihood in nats; with noise, the sum of squared errors.
    `root(outputs, jacobian)` is `L' jacobian`, where `L L'` is the second derivative of the negative log-likelihood.
    """

    loss: Callable[[Float[Array, " out"], Array], Float[Array, ""]]
    root: Callable[[Float[Array, " out"], Float[Array, "out n"]], Float[Array, "out n"]]
    has_noise: bool = False


def _squared_error(outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
    return jnp.sum((outputs - target.astype(outputs.dtype)) ** 2)


def _binary_loss(outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
    """The cross-entropy of a logit; NaN unless the target is from 0 to 1."""
    share = jnp.where((target >= 0) & (target <= 1), target.astype(outputs.dtype), jnp.nan)
    return -jnp.sum(share * jax.nn.log_sigmoid(outputs) + (1 - share) * jax.nn.log_sigmoid(-outputs))


def _binary_root(outputs: Float[Array, " out"], jacobian: Float[Array, "out n"]) -> Float[Array, "out n"]:
    """The second derivative is `p (1 - p)`, computed in log space for accuracy."""
    log = jax.nn.log_sigmoid(outputs) + jax.nn.log_sigmoid(-outputs)
    return jnp.exp(log / 2)[:, None] * jacobian


def _class_loss(outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
    """The cross-entropy of logits; NaN unless the target is a class."""
    is_class = (target >= 0) & (target < outputs.shape[0])
    return jnp.where(is_class, -jax.nn.log_softmax(outputs)[target], jnp.nan)


def _class_root(outputs: Float[Array, " out"], jacobian: Float[Array, "out n"]) -> Float[Array, "out n"]:
    """The second derivative `diag(p) - p p'` has the root `(diag(p) - p p') / sqrt(p)`, column by column."""
    logs = jax.nn.log_softmax(outputs)
    return jnp.exp(logs / 2)[:, None] * (jacobian - (jnp.exp(logs) @ jacobian)[None])


LIKELIHOODS = {
    "regression": Likelihood(_squared_error, lambda _, jacobian: jacobian, has_noise=True),
    "binary": Likelihood(_binary_loss, _binary_root),
    "classification": Likelihood(_class_loss, _class_root),
}


def probit(mean: Float[Array, " classes"], covariance: Float[Array, "classes classes"]) -> Float[Array, " classes"]:
    """Log-probabilities from differences of logits, divided by `sqrt(1 + pi / 8 * variance)` of the difference."""
    variances = jnp.diagonal(covariance)
    # Of a difference: what all logits share cancels. Rounding may leave it negative.
    spread = jnp.maximum(variances[:, None] + variances[None] - 2 * covariance, 0)
    differences = (mean[:, None] - mean[None]) / jnp.sqrt(1 + math.pi / 8 * spread)
    return jax.nn.log_softmax(-jax.nn.logsumexp(-differences, axis=1))


def monte_carlo(
    mean: Float[Array, " classes"], covariance: Float[Array, "classes classes"], num_samples: int, key: Key[Array, ""]
) -> Float[Array, " classes"]:
    """The logarithm of the mean probabilities over draws of the logits."""
    values, vectors = jnp.linalg.eigh(covariance)  # the covariance may be singular
    root = vectors * jnp.sqrt(jnp.maximum(values, 0))[None]
    noise = jax.random.normal(key, (num_samples, mean.shape[0]), mean.dtype)
    logs = jax.nn.log_softmax(mean[None] + noise @ root.T)
    return jax.nn.logsumexp(logs, axis=0) - math.log(num_samples)


def both_classes(mean: Float[Array, " 1"], covariance: Float[Array, "1 1"]) -> tuple[Array, Array]:
    """The logits of classes 0 and 1 from one logit, and their covariance."""
    return jnp.concatenate([jnp.zeros_like(mean), mean]), jnp.pad(covariance, ((1, 0), (1, 0)))
