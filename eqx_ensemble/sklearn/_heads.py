import math
from abc import abstractmethod
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from .. import scores

_LEAST_VARIANCE = 1e-6  # of standardised targets


class Scaler(eqx.Module):
    """The mean and the standard deviation by which features or targets are standardised."""

    mean: Float[Array, "*shape"]
    scale: Float[Array, "*shape"]

    def standardise(self, value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The distance from the mean, in standard deviations."""
        return (value - self.mean) / self.scale

    def restore(self, value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The inverse of `standardise`."""
        return value * self.scale + self.mean


class AbstractHead(eqx.Module):
    """The interpretation of the outputs of a member's network."""

    @property
    @abstractmethod
    def out_size(self) -> int:
        """The number of outputs that the network needs."""

    @property
    @abstractmethod
    def meaning(self) -> str:
        """A description of these outputs, for messages."""

    @abstractmethod
    def read(self, outputs: Float[Array, " out"]) -> Any:
        """The prediction, of standardised targets, from the network's outputs."""

    @abstractmethod
    def restore(self, prediction: Any, targets: Scaler | None) -> Any:
        """The prediction in the unit of the targets."""

    @abstractmethod
    def loss(self, outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
        """The loss for one row, with a standardised target."""


@final
class Gaussian(AbstractHead):
    """A mean and a variance for each target; the loss is the negative log likelihood in nats, the mean over targets."""

    shape: tuple[int, ...] = eqx.field(static=True)

    @property
    def out_size(self) -> int:
        return 2 * math.prod(self.shape)

    @property
    def meaning(self) -> str:
        return f"a mean and a raw variance for each of {math.prod(self.shape)} target(s)"

    def read(self, outputs: Float[Array, " out"]) -> tuple[Array, Array]:
        mean, raw = jnp.reshape(outputs, (2, *self.shape))
        return mean, jax.nn.softplus(raw) + _LEAST_VARIANCE

    def restore(self, prediction: Any, targets: Scaler | None) -> tuple[Array, Array]:
        assert targets is not None
        mean, variance = prediction
        return targets.restore(mean), variance * targets.scale**2

    def loss(self, outputs: Float[Array, " out"], target: Float[Array, "*targets"]) -> Float[Array, ""]:
        mean, variance = self.read(outputs)
        return scores.nll_gaussian(mean, variance, target)


@final
class Point(AbstractHead):
    """A number for each target; the loss is the squared error, the mean over targets."""

    shape: tuple[int, ...] = eqx.field(static=True)

    @property
    def out_size(self) -> int:
        return math.prod(self.shape)

    @property
    def meaning(self) -> str:
        return f"one number for each of {math.prod(self.shape)} target(s)"

    def read(self, outputs: Float[Array, " out"]) -> Float[Array, "*targets"]:
        return jnp.reshape(outputs, self.shape)

    def restore(self, prediction: Any, targets: Scaler | None) -> Float[Array, "*targets"]:
        assert targets is not None
        return targets.restore(prediction)

    def loss(self, outputs: Float[Array, " out"], target: Float[Array, "*targets"]) -> Float[Array, ""]:
        return jnp.mean((target - self.read(outputs)) ** 2)


@final
class Classes(AbstractHead):
    """A logit for each class; the loss is the cross entropy in nats."""

    num_classes: int = eqx.field(static=True)

    @property
    def out_size(self) -> int:
        return self.num_classes

    @property
    def meaning(self) -> str:
        return f"one logit for each of {self.num_classes} classes"

    def read(self, outputs: Float[Array, " out"]) -> Float[Array, " classes"]:
        return outputs

    def restore(self, prediction: Any, targets: Scaler | None) -> Float[Array, " classes"]:
        return prediction

    def loss(self, outputs: Float[Array, " out"], target: Int[Array, ""]) -> Float[Array, ""]:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, target)


def head_for_targets(head: str, targets: np.ndarray) -> AbstractHead:
    """The head of a regressor for targets `(rows,)` or `(rows, targets)`."""
    return {"gaussian": Gaussian, "point": Point}[head](targets.shape[1:])
