import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import equinox as eqx
import jax
import optax
from jaxtyping import Array, Float, Key

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
