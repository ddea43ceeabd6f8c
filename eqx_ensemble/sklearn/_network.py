from collections.abc import Callable, Sequence
from typing import final

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key

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
