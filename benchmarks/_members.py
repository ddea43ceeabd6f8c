"""Members whose predictions are compared: an MLP, one with dropout, and many heads on a shared trunk."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Net(eqx.Module):
    """An MLP with two hidden layers, and dropout behind each of them if `rate` is above 0."""

    layers: tuple[eqx.nn.Linear, ...]
    dropout: eqx.nn.Dropout

    def __init__(self, sizes: tuple[int, ...], rate: float, *, key: PRNGKeyArray):
        keys = jax.random.split(key, len(sizes) - 1)
        self.layers = tuple(eqx.nn.Linear(a, b, key=k) for a, b, k in zip(sizes, sizes[1:], keys, strict=False))
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x: Float[Array, " features"], key: Any = None) -> Float[Array, " outputs"]:
        """Logits, or a mean and a raw variance."""
        *hidden, last = self.layers
        keys = [None] * len(hidden) if key is None else jax.random.split(key, len(hidden))
        for layer, layer_key in zip(hidden, keys, strict=True):
            x = self.dropout(jax.nn.relu(layer(x)), key=layer_key)
        return last(x)


class Heads(eqx.Module):
    """One hidden layer that `num_heads` heads share; each is a hidden layer and an output layer."""

    trunk: eqx.nn.Linear
    heads: Net

    def __init__(self, sizes: tuple[int, ...], num_heads: int, *, key: PRNGKeyArray):
        trunk_key, key = jax.random.split(key)
        self.trunk = eqx.nn.Linear(*sizes[:2], key=trunk_key)
        self.heads = eqx.filter_vmap(lambda key: Net(sizes[1:], 0.0, key=key))(jax.random.split(key, num_heads))

    def __call__(self, x: Float[Array, " features"], key: Any = None) -> Float[Array, "heads outputs"]:
        """The outputs of all heads."""
        x = jax.nn.relu(self.trunk(x))
        return eqx.filter_vmap(lambda head: head(x))(self.heads)


def as_gaussian(outputs: Float[Array, "... 2"]) -> tuple[Array, Array]:
    """The mean and the variance that two outputs stand for."""
    return outputs[..., 0], jax.nn.softplus(outputs[..., 1]) + 1e-3


def row_losses(outputs: Array, y: Array) -> Array:
    """Negative log-likelihoods of real targets or class indices `y`; all axes of `outputs` but the last are kept."""
    if jnp.issubdtype(y.dtype, jnp.integer):
        log_p = jax.nn.log_softmax(outputs)
        return -jnp.take_along_axis(log_p, jnp.broadcast_to(y, log_p.shape[:-1])[..., None], axis=-1)[..., 0]
    mean, variance = as_gaussian(outputs)
    return 0.5 * (jnp.log(2 * jnp.pi * variance) + (y - mean) ** 2 / variance)


def loss(model: Any, batch: tuple[Array, Array], key: Any) -> Array:
    """The mean over rows; of all heads, where there are any."""
    x, y = batch
    keys = jax.random.split(key, len(x))
    return jnp.mean(jax.vmap(row_losses)(jax.vmap(model)(x, keys), y))
