import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from .. import scores

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jax.numpy.tanh,
    "logistic": jax.nn.sigmoid,
    "identity": lambda x: x,
}
"""The activation functions of the default member, named as in scikit-learn if it has them."""


@final
class Network(eqx.Module):
    """The default member: a multilayer perceptron. The activation function is a name, so that it can be pickled."""

    layers: list[eqx.nn.Linear]
    activation: str = eqx.field(static=True)

    def __init__(
        self, in_size: int, out_size: int, hidden_layer_sizes: Sequence[int], activation: str, *, key: Key[Array, ""]
    ):
        sizes = [in_size, *hidden_layer_sizes, out_size]
        keys = jax.random.split(key, len(sizes) - 1)
        self.layers = [eqx.nn.Linear(m, n, key=k) for m, n, k in zip(sizes[:-1], sizes[1:], keys, strict=True)]
        self.activation = activation

    def __call__(self, x: Float[Array, " features"]) -> Float[Array, " out"]:
        for layer in self.layers[:-1]:
            x = ACTIVATIONS[self.activation](layer(x))
        return self.layers[-1](x)


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
    """The meaning of a network's outputs."""

    @property
    @abstractmethod
    def out_size(self) -> int:
        """The number of outputs that the network needs."""

    @abstractmethod
    def read(self, outputs: Float[Array, " out"]) -> Any:
        """The prediction of standardised targets."""

    @abstractmethod
    def restore(self, prediction: Any) -> Any:
        """The prediction in the unit of the targets."""

    @abstractmethod
    def loss(self, outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
        """The loss for one row, with a standardised target."""


@final
class GaussianHead(AbstractHead):
    """A mean and a variance for each target; the loss is the negative log likelihood in nats, the mean over targets."""

    targets: Scaler

    @property
    def out_size(self) -> int:
        return 2 * self.targets.mean.size

    def read(self, outputs: Float[Array, " out"]) -> tuple[Array, Array]:
        mean, raw = jnp.reshape(outputs, (2, *self.targets.mean.shape))
        return mean, jax.nn.softplus(raw) + _LEAST_VARIANCE

    def restore(self, prediction: tuple[Array, Array]) -> tuple[Array, Array]:
        mean, variance = prediction
        return self.targets.restore(mean), variance * self.targets.scale**2

    def loss(self, outputs: Float[Array, " out"], target: Float[Array, "*targets"]) -> Float[Array, ""]:
        return scores.nll_gaussian(*self.read(outputs), target)


@final
class PointHead(AbstractHead):
    """A number for each target; the loss is the squared error, the mean over targets."""

    targets: Scaler

    @property
    def out_size(self) -> int:
        return self.targets.mean.size

    def read(self, outputs: Float[Array, " out"]) -> Float[Array, "*targets"]:
        return jnp.reshape(outputs, self.targets.mean.shape)

    def restore(self, prediction: Float[Array, "*targets"]) -> Float[Array, "*targets"]:
        return self.targets.restore(prediction)

    def loss(self, outputs: Float[Array, " out"], target: Float[Array, "*targets"]) -> Float[Array, ""]:
        return jnp.mean((target - self.read(outputs)) ** 2)


@final
class Classes(AbstractHead):
    """A logit for each class; the loss is the cross entropy in nats."""

    num_classes: int = eqx.field(static=True)

    @property
    def out_size(self) -> int:
        return self.num_classes

    def read(self, outputs: Float[Array, " out"]) -> Float[Array, " classes"]:
        return outputs

    def restore(self, prediction: Float[Array, " classes"]) -> Float[Array, " classes"]:
        return prediction

    def loss(self, outputs: Float[Array, " out"], target: Int[Array, ""]) -> Float[Array, ""]:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, target)


@final
class Member(eqx.Module):
    """One member of a fitted estimator: a network with the standardisation of its inputs and outputs.

    Called with the features of one row `(features,)`, it returns a prediction: `(mean, variance)` for Gaussian heads,
    each of the shape of one target; the target for point heads; logits `(classes,)` for classifiers.
    """

    network: Any
    inputs: Scaler
    head: AbstractHead
    takes_key: bool = eqx.field(static=True)

    def __init__(self, make: Callable[..., Any], inputs: Scaler, head: AbstractHead, *, key: Key[Array, ""]):
        self.network = make(inputs.mean.size, head.out_size, key=key)
        self.inputs, self.head = inputs, head
        parameters = inspect.signature(self.network).parameters.values()
        self.takes_key = any(p.name == "key" or p.kind is p.VAR_KEYWORD for p in parameters)

    def outputs(self, x: Float[Array, " features"], key: Key[Array, ""] | None = None) -> Float[Array, " out"]:
        """The network's outputs for standardised features."""
        outputs = self.network(x, **({"key": key} if self.takes_key else {}))
        if outputs.shape != (self.head.out_size,):
            raise ValueError(
                f"`make(in_size, out_size, key=key)` must make a network that returns `(out_size,)`, here "
                f"({self.head.out_size},); got {outputs.shape}."
            )
        return outputs

    def __call__(self, x: Float[Array, " features"], *, key: Key[Array, ""] | None = None) -> Any:
        return self.head.restore(self.head.read(self.outputs(self.inputs.standardise(x), key)))


def loss(model: Member, batch: tuple[Array, Array, Array], key: Key[Array, ""]) -> Float[Array, ""]:
    """The weighted loss of a batch; weights have mean one over all training rows."""
    x, y, weights = batch
    outputs = jax.vmap(model.outputs)(x, jax.random.split(key, len(x)))
    return jnp.mean(weights * jax.vmap(model.head.loss)(outputs, y))


def predict_standardised(model: Member, x: Float[Array, " features"]) -> Any:
    """The prediction of standardised targets from standardised features."""
    return model.head.read(model.outputs(x))
