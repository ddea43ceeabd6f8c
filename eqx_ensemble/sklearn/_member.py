import dataclasses
import functools
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from .. import scores

Hyper = Mapping[str, Any]


def default_optimiser(hyper: Hyper) -> optax.GradientTransformation:
    """AdamW, whose hyper-parameters are traced: a grid of them shares one compiled program."""
    return optax.adamw(hyper["learning_rate"], weight_decay=hyper["weight_decay"])


def optimiser_of_rate(make: Callable[..., optax.GradientTransformation]) -> Callable[[Hyper], Any]:
    """The optimiser as a function of hyper-parameters: one object for equal functions, hence one compiled program.

    `sklearn.base.clone` copies a `functools.partial`, and copies do not compare equal: their parts are compared.
    """
    if isinstance(make, functools.partial):
        try:
            return _of_partial(make.func, make.args, tuple(sorted(make.keywords.items())))
        except TypeError:  # arguments without a hash: one program each
            pass
    return _of_function(make)


@functools.lru_cache(maxsize=64)
def _of_partial(function: Any, args: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]) -> Callable[[Hyper], Any]:
    make = functools.partial(function, *args, **dict(keywords))
    return lambda hyper: make(hyper["learning_rate"])


@functools.lru_cache(maxsize=64)
def _of_function(make: Any) -> Callable[[Hyper], Any]:
    return lambda hyper: make(hyper["learning_rate"])


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


MakeNetwork = Callable[..., Any]
"""`make(in_size, out_size, key=key)` returns a Module, or a Module and its `equinox.nn.State`."""


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
        return self.network(x, *state, **({"key": key} if self.takes_key else {}))

    def __call__(self, x: Float[Array, "..."], *state: eqx.nn.State, key: Key[Array, ""] | None = None) -> Any:
        out = self.outputs(self.scaling.inputs.standardise(x), *state, key=key)
        outputs, *state_after = out if state else (out,)
        prediction = self.head.restore(self.head.read(outputs), self.scaling.targets)
        return (prediction, *state_after) if state else prediction


@final
@dataclasses.dataclass(frozen=True)
class MemberMaker:
    """The constructor of one member from one key, for `build`; it is pickled to make the members again."""

    make: MakeNetwork
    in_size: int
    head: AbstractHead
    scaling: Scaling

    def __call__(self, key: Key[Array, ""]) -> Any:
        made = self.make(self.in_size, self.head.out_size, key=key)
        network, *state = made if isinstance(made, tuple) else (made,)
        member = Member(network, self.scaling, self.head, _takes_key(network))
        return (member, *state) if state else member

    def networks(self) -> "NetworkMaker":
        """The constructor of its network alone."""
        return NetworkMaker(self.make, self.in_size, self.head.out_size)


@final
@dataclasses.dataclass(frozen=True)
class NetworkMaker:
    """The constructor of one network from one key, the member of a method."""

    make: MakeNetwork
    in_size: int
    out_size: int

    def __call__(self, key: Key[Array, ""]) -> Any:
        return self.make(self.in_size, self.out_size, key=key)


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
