import dataclasses
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from .. import scores


def default_optimiser(hyper: dict[str, Any]) -> optax.GradientTransformation:
    """AdamW, whose hyper-parameters are traced: a grid of them shares one compiled program."""
    return optax.adamw(hyper["learning_rate"], weight_decay=hyper["weight_decay"])


@dataclasses.dataclass(frozen=True)
class OptimiserOfRate:
    """A function of a learning rate as one of hyper-parameters; equal for equal functions, to share programs."""

    make: Callable[..., optax.GradientTransformation]

    def __call__(self, hyper: dict[str, Any]) -> optax.GradientTransformation:
        return self.make(hyper["learning_rate"])


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
    """The interpretation of the outputs of a member's network."""

    @property
    @abstractmethod
    def out_size(self) -> int:
        """The number of outputs that the network needs."""

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

    def read(self, outputs: Float[Array, " out"]) -> Float[Array, " classes"]:
        return outputs

    def restore(self, prediction: Any, targets: Scaler | None) -> Float[Array, " classes"]:
        return prediction

    def loss(self, outputs: Float[Array, " out"], target: Int[Array, ""]) -> Float[Array, ""]:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, target)


class Scaling(eqx.Module):
    """The standardisation of features and targets, shared by all members."""

    inputs: Scaler
    targets: Scaler | None


@final
class Member(eqx.Module):
    """One member of a fitted estimator: a network with the standardisation of its inputs and outputs.

    Called with the features of one row `(features,)`, it returns a prediction: `(mean, variance)` for Gaussian heads,
    each of the shape of one target; the target for point heads; logits `(classes,)` for classifiers.
    """

    network: Any
    scaling: Scaling
    head: AbstractHead
    takes_key: bool = eqx.field(static=True)

    def outputs(self, x: Float[Array, "..."], *state: eqx.nn.State, key: Key[Array, ""] | None = None) -> Any:
        """The network's outputs for standardised features."""
        out = self.network(x, *state, **({"key": key} if self.takes_key else {}))
        outputs = out[0] if state else out
        if outputs.shape != (self.head.out_size,):
            raise ValueError(
                f"`make(in_size, out_size, key=key)` must make a network that returns `(out_size,)`, here "
                f"({self.head.out_size},); got {outputs.shape}."
            )
        return out

    def __call__(self, x: Float[Array, "..."], *state: eqx.nn.State, key: Key[Array, ""] | None = None) -> Any:
        out = self.outputs(self.scaling.inputs.standardise(x), *state, key=key)
        outputs, *state_after = out if state else (out,)
        prediction = self.head.restore(self.head.read(outputs), self.scaling.targets)
        return (prediction, *state_after) if state else prediction


@final
@dataclasses.dataclass(frozen=True)
class MemberMaker:
    """The constructor of one member from one key, for `build`; it is pickled to make the members again."""

    make: Callable[..., Any]
    in_size: int
    head: AbstractHead
    scaling: Scaling

    def __call__(self, key: Key[Array, ""]) -> Any:
        made = self.make(self.in_size, self.head.out_size, key=key)
        network, *state = made if isinstance(made, tuple) else (made,)
        member = Member(network, self.scaling, self.head, _takes_key(network))
        return (member, *state) if state else member


def _takes_key(network: Any) -> bool:
    """Whether the call of a network takes a key, as with dropout."""
    parameters = inspect.signature(network).parameters.values()
    return any(p.name == "key" or p.kind is p.VAR_KEYWORD for p in parameters)


def loss(model: Member, batch: tuple[Array, Array, Array], key: Key[Array, ""]) -> Float[Array, ""]:
    """The weighted loss of a batch; weights have mean one over all training rows."""
    x, y, weights = batch
    outputs = jax.vmap(lambda x, key: model.outputs(x, key=key), axis_name="batch")(x, _keys(model, key, x))
    return jnp.mean(weights * jax.vmap(model.head.loss)(outputs, y))


def stateful_loss(
    model: Member, state: eqx.nn.State, batch: tuple[Array, Array, Array], key: Key[Array, ""]
) -> tuple[Float[Array, ""], eqx.nn.State]:
    """The same for networks with a state, such as batch normalisation over the axis `"batch"`."""
    x, y, weights = batch
    one = lambda x, state, key: model.outputs(x, state, key=key)
    over_batch = jax.vmap(one, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    outputs, state = over_batch(x, state, _keys(model, key, x))
    return jnp.mean(weights * jax.vmap(model.head.loss)(outputs, y)), state


def _keys(model: Member, key: Key[Array, ""], x: Array) -> Key[Array, " batch"] | None:
    return jax.random.split(key, len(x)) if model.takes_key else None


def call_network(model: Member, x: Float[Array, "..."], *state: eqx.nn.State) -> Any:
    """The prediction of standardised targets from standardised features, as `predict` calls it."""
    out = model.outputs(x, *state)
    return model.head.read(out[0] if state else out)
