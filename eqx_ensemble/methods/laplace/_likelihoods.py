import abc
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class AbstractLikelihood(eqx.Module):
    """The loss and curvature of a likelihood, for one row of outputs `(out,)`.

    A likelihood with noise is evaluated at standard deviation 1, so that the noise can be changed afterwards.
    """

    has_noise: eqx.AbstractClassVar[bool]

    @abc.abstractmethod
    def loss(self, outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
        """The negative log-likelihood; with noise, the sum of squared errors."""

    @abc.abstractmethod
    def root(self, outputs: Float[Array, " out"], jacobian: Float[Array, "out n"]) -> Float[Array, "out n"]:
        """`L' jacobian`, where `L L'` is the Hessian of the negative log-likelihood with respect to the outputs."""


class Regression(AbstractLikelihood):
    """Gaussian noise with one standard deviation for all outputs."""

    has_noise: ClassVar[bool] = True

    def loss(self, outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
        """The sum of squared errors."""
        return jnp.sum((outputs - target.astype(outputs.dtype)) ** 2)

    def root(self, outputs: Float[Array, " out"], jacobian: Float[Array, "out n"]) -> Float[Array, "out n"]:
        """The Jacobian itself."""
        return jacobian


class Binary(AbstractLikelihood):
    """Labels 0 and 1; one output, the logit of 1."""

    has_noise: ClassVar[bool] = False

    def loss(self, outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
        """The cross-entropy in nats."""
        signed = jnp.where(target == 1, outputs, -outputs)
        return -jnp.sum(jax.nn.log_sigmoid(signed))

    def root(self, outputs: Float[Array, " out"], jacobian: Float[Array, "out n"]) -> Float[Array, "out n"]:
        """The second derivative is `p (1 - p)`, computed in log space for accuracy."""
        log = jax.nn.log_sigmoid(outputs) + jax.nn.log_sigmoid(-outputs)
        return jnp.exp(log / 2)[:, None] * jacobian


class Classification(AbstractLikelihood):
    """Labels from 0 to classes - 1; one output per class, the logits."""

    has_noise: ClassVar[bool] = False

    def loss(self, outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
        """The cross-entropy in nats."""
        return -jax.nn.log_softmax(outputs)[target]

    def root(self, outputs: Float[Array, " out"], jacobian: Float[Array, "out n"]) -> Float[Array, "out n"]:
        """The second derivative `diag(p) - p p'` has the root `(diag(p) - p p') / sqrt(p)`, column by column."""
        logs = jax.nn.log_softmax(outputs)
        mean = jnp.exp(logs) @ jacobian
        return jnp.exp(logs / 2)[:, None] * (jacobian - mean[None])


LIKELIHOODS: dict[str, AbstractLikelihood] = {
    "regression": Regression(),
    "binary": Binary(),
    "classification": Classification(),
}


def log_likelihood(kind: str, loss: Any, count: Any, noise: Any) -> Float[Array, ""]:
    """The log-likelihood of all rows in nats, from the sum of their losses and the number of targets."""
    if not LIKELIHOODS[kind].has_noise:
        return -loss
    return -loss / (2 * noise**2) - count * (jnp.log(noise) + math.log(2 * math.pi) / 2)
