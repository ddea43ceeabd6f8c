import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from ..train import Frozen

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


NUM_BLOCKS = 3
_WAVES, _SOFT_LIMIT = 8, 3.0


@final
class TableNetwork(eqx.Module):
    """The network of tables: waves of the numbers, then residual blocks, of which each member uses some.

    Members of several depths are one stack: a block that a member does not use is skipped by a mask.
    """

    frequencies: Float[Array, "numbers waves"]
    phases: Float[Array, "numbers waves"]
    first: eqx.nn.Linear
    blocks: list[eqx.nn.Linear]
    last: eqx.nn.Linear
    uses: Bool[Array, " blocks"]
    dropout: Frozen
    activation: str = eqx.field(static=True)

    def __init__(
        self, in_size: int, out_size: int, num_numbers: int, width: int, activation: str,
        *, depth: Any, dropout: Any, scale: Any, key: Key[Array, ""],
    ):  # fmt: skip
        keys = jax.random.split(key, NUM_BLOCKS + 4)
        self.frequencies = 2 * jnp.pi * scale * jax.random.normal(keys[0], (num_numbers, _WAVES))
        self.phases = jax.random.uniform(keys[1], (num_numbers, _WAVES), maxval=2 * jnp.pi)
        self.first = eqx.nn.Linear(in_size + num_numbers * _WAVES, width, key=keys[2])
        self.blocks = [eqx.nn.Linear(width, width, key=key) for key in keys[4:]]
        self.last = eqx.nn.Linear(width, out_size, key=keys[3])
        self.uses = jnp.arange(NUM_BLOCKS) < depth
        self.dropout, self.activation = Frozen(jnp.asarray(dropout)), activation

    def __call__(self, x: Float[Array, " features"], *, key: Key[Array, ""] | None = None) -> Float[Array, " out"]:
        keys = [None] * (NUM_BLOCKS + 1) if key is None else jax.random.split(key, NUM_BLOCKS + 1)

        def drop(values: Array, key: Any) -> Array:
            if key is None:
                return values
            kept = 1 - self.dropout.value
            return jnp.where(jax.random.bernoulli(key, kept, values.shape), values / kept, 0)

        act = ACTIVATIONS[self.activation]
        x = x / jnp.sqrt(1 + (x / _SOFT_LIMIT) ** 2)  # features far from all others are drawn near
        numbers = x[: len(self.frequencies), None]
        waves = jnp.cos(self.frequencies * numbers + self.phases)
        hidden = drop(act(self.first(jnp.concatenate([x, waves.ravel()]))), keys[0])
        for block, used, own in zip(self.blocks, self.uses, keys[1:], strict=True):
            hidden = hidden + jnp.where(used, drop(act(block(hidden)), own), 0)
        return self.last(hidden)


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

    @abstractmethod
    def average(self, outputs: Float[Array, " out"]) -> Array:
        """What is averaged over members: means, or probabilities."""

    @abstractmethod
    def score(self, average: Array, target: Array) -> Float[Array, ""]:
        """The error of an average for one row, by which members are stopped and selected."""


@final
class GaussianHead(AbstractHead):
    r"""A mean and a variance for each target.

    The loss is the negative log likelihood times the variance, which is held constant: means are trained by the squared
    error, as of point heads, and not less where the variance is large.

    ??? cite
        [Seitzer et al., ICLR 2022](https://arxiv.org/abs/2203.09168), with $\beta = 1$.
    """

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
        mean, variance = self.read(outputs)
        nll = 0.5 * (jnp.log(variance) + (target - mean) ** 2 / variance)
        return jnp.mean(jax.lax.stop_gradient(variance) * nll)

    def average(self, outputs: Float[Array, " out"]) -> Float[Array, "*targets"]:
        return self.read(outputs)[0]

    def score(self, average: Float[Array, "*targets"], target: Float[Array, "*targets"]) -> Float[Array, ""]:
        return jnp.mean((target - average) ** 2)


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
        return self.score(self.read(outputs), target)

    def average(self, outputs: Float[Array, " out"]) -> Float[Array, "*targets"]:
        return self.read(outputs)

    def score(self, average: Float[Array, "*targets"], target: Float[Array, "*targets"]) -> Float[Array, ""]:
        return jnp.mean((target - average) ** 2)


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

    def average(self, outputs: Float[Array, " out"]) -> Float[Array, " classes"]:
        return jax.nn.softmax(outputs)

    def score(self, average: Float[Array, " classes"], target: Int[Array, ""]) -> Float[Array, ""]:
        return -jnp.log(jnp.maximum(average[target], jnp.finfo(average.dtype).tiny))


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

    def __init__(
        self, make: Callable[..., Any], inputs: Scaler, head: AbstractHead, *, key: Key[Array, ""], **own: Any
    ):
        self.network = make(inputs.mean.size, head.out_size, key=key, **own)
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


Rows = tuple[Array, tuple[Array, Array]]  # features, and targets with weights


def loss(model: Member, batch: Rows, key: Key[Array, ""]) -> Float[Array, ""]:
    """The weighted loss of a batch; weights have mean one over all training rows."""
    x, (y, weights) = batch
    outputs = jax.vmap(model.outputs)(x, jax.random.split(key, len(x)))
    return jnp.mean(weights * jax.vmap(model.head.loss)(outputs, y))


def score(model: Member, batch: Rows, key: Key[Array, ""]) -> Float[Array, ""]:
    """The score of a member on rows for validation."""
    del key
    x, targets = batch
    return score_of_average(model.head)(jax.vmap(lambda x: average(model, x))(x), targets)


def score_of_average(head: AbstractHead) -> Callable[[Array, tuple[Array, Array]], Float[Array, ""]]:
    """The weighted mean over rows of an average's score."""
    return lambda averages, targets: jnp.mean(targets[1] * jax.vmap(head.score)(averages, targets[0]))


def average(model: Member, x: Float[Array, " features"]) -> Array:
    """What is averaged over members, from standardised features."""
    return model.head.average(model.outputs(x))


def predict_standardised(model: Member, x: Float[Array, " features"]) -> Any:
    """The prediction of standardised targets from standardised features."""
    return model.head.read(model.outputs(x))
