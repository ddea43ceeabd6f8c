import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

Link = Literal["probit", "bridge", "bridge_norm", "mc"]
LINKS = ("probit", "bridge", "bridge_norm", "mc")


def probit(mean: Float[Array, " classes"], covariance: Float[Array, "classes classes"]) -> Float[Array, " classes"]:
    """Log-probabilities from differences of logits, divided by `sqrt(1 + pi / 8 * variance)` of the difference."""
    variances = jnp.diagonal(covariance)
    # Of a difference: what all logits share cancels. Rounding may leave it negative.
    spread = jnp.maximum(variances[:, None] + variances[None] - 2 * covariance, 0)
    differences = (mean[:, None] - mean[None]) / jnp.sqrt(1 + math.pi / 8 * spread)
    return jax.nn.log_softmax(-jax.nn.logsumexp(-differences, axis=1))


def bridge(
    mean: Float[Array, " classes"], covariance: Float[Array, "classes classes"], *, normalise: bool
) -> Float[Array, " classes"]:
    """Log-probabilities of the mean of the Dirichlet distribution given by the Laplace bridge.

    Logits are first conditioned on a sum of zero. Computed in log space, because the concentration of a large logit
    overflows.
    """
    classes = mean.shape[0]
    across = jnp.sum(covariance, axis=1)
    total = jnp.sum(across)
    share = across / jnp.where(total > 0, total, 1)
    mean = mean - share * jnp.sum(mean)
    variance = jnp.diagonal(covariance) - share * across
    # The difference may round to zero, and a zero variance would make a class certain.
    variance = jnp.maximum(variance, jnp.finfo(mean.dtype).eps * jnp.diagonal(covariance))
    if normalise:
        scale = jnp.mean(variance) / math.sqrt(classes / 2)
        mean, variance = mean / jnp.sqrt(scale), variance / scale
    odds = mean + jax.nn.logsumexp(-mean) - 2 * math.log(classes)
    log_base = math.log1p(-2 / classes) if classes > 2 else -math.inf
    return jax.nn.log_softmax(jnp.logaddexp(jnp.full_like(odds, log_base), odds) - jnp.log(variance))


def monte_carlo(
    mean: Float[Array, " classes"], covariance: Float[Array, "classes classes"], num_samples: int, key: Key[Array, ""]
) -> Float[Array, " classes"]:
    """The logarithm of the mean probabilities over draws of the logits."""
    values, vectors = jnp.linalg.eigh(covariance)  # the covariance may be singular
    root = vectors * jnp.sqrt(jnp.maximum(values, 0))[None]
    noise = jax.random.normal(key, (num_samples, mean.shape[0]), mean.dtype)
    logs = jax.nn.log_softmax(mean[None] + noise @ root.T)
    return jax.nn.logsumexp(logs, axis=0) - math.log(num_samples)


def log_probabilities(
    mean: Float[Array, " classes"],
    covariance: Float[Array, "classes classes"],
    *,
    link: Link,
    num_samples: int,
    key: Key[Array, ""] | None,
) -> Float[Array, " classes"]:
    """The log-probabilities of the classes with the given link."""
    if link == "probit":
        return probit(mean, covariance)
    if link == "mc":
        assert key is not None
        return monte_carlo(mean, covariance, num_samples, key)
    return bridge(mean, covariance, normalise=link == "bridge_norm")


def both_classes(
    mean: Float[Array, " 1"], covariance: Float[Array, "1 1"]
) -> tuple[Float[Array, " 2"], Float[Array, "2 2"]]:
    """The logits of classes 0 and 1 from one logit, and their covariance."""
    return jnp.concatenate([jnp.zeros_like(mean), mean]), jnp.pad(covariance, ((1, 0), (1, 0)))
