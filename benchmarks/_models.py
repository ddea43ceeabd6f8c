"""Models of plain `eqx.nn` layers, as a user would write them for one example."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def mlp(sizes: Sequence[int], key: Key[Array, ""]) -> eqx.nn.MLP:
    """An MLP whose hidden layers are of one size."""
    inputs, *hidden, out = sizes
    return eqx.nn.MLP(inputs, out, hidden[0], len(hidden), key=key)


class CNN(eqx.Module):
    """Two convolutions, each before a pooling, and a linear layer, for images of 28 x 28."""

    layers: eqx.nn.Sequential

    def __init__(self, channels: int, *, key: Key[Array, ""]):
        keys = jax.random.split(key, 3)
        relu, pool = eqx.nn.Lambda(jax.nn.relu), eqx.nn.MaxPool2d(2, 2)
        first = eqx.nn.Conv2d(1, channels, 3, padding=1, key=keys[0])
        second = eqx.nn.Conv2d(channels, 2 * channels, 3, padding=1, key=keys[1])
        linear = eqx.nn.Linear(2 * channels * 7 * 7, 10, key=keys[2])
        flat = eqx.nn.Lambda(jnp.ravel)
        self.layers = eqx.nn.Sequential([first, relu, pool, second, relu, pool, flat, linear])

    def __call__(self, x: Float[Array, "1 28 28"]) -> Float[Array, " 10"]:
        return self.layers(x)


class Block(eqx.Module):
    """A transformer block, normalised before each part; the mean over the sequence is classified."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, width: int, num_heads: int, *, key: Key[Array, ""]):
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(num_heads, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])
        self.head = eqx.nn.Linear(width, 10, key=keys[2])

    def __call__(self, x: Float[Array, "length width"]) -> Float[Array, " 10"]:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        x = x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        return self.head(jnp.mean(x, axis=0))


class Layer(eqx.Module):
    """One layer of a transformer, normalised before each part."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, *, key: Key[Array, ""]):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(8, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: Float[Array, "length width"]) -> Float[Array, "length width"]:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, jnp.tri(len(x), dtype=bool))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    """A language model of bytes: logits of the byte after each."""

    embedding: eqx.nn.Embedding
    layers: list[Layer]
    head: eqx.nn.Linear

    def __init__(self, width: int, depth: int, *, key: Key[Array, ""]):
        first, last, *keys = jax.random.split(key, depth + 2)
        self.embedding = eqx.nn.Embedding(256, width, key=first)
        self.layers = [Layer(width, key=k) for k in keys]
        self.head = eqx.nn.Linear(width, 256, key=last)

    def __call__(self, x: Int[Array, " length"]) -> Float[Array, "length 256"]:
        x = jax.vmap(self.embedding)(x)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.head)(x)


class Recurrent(eqx.Module):
    """A GRU over a sequence; its last state is classified."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, width: int, *, key: Key[Array, ""]):
        keys = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(width, width, key=keys[0])
        self.head = eqx.nn.Linear(width, 10, key=keys[1])

    def __call__(self, x: Float[Array, "length width"]) -> Float[Array, " 10"]:
        start = jnp.zeros(self.cell.hidden_size)
        last, _ = jax.lax.scan(lambda state, x: (self.cell(x, state), None), start, x)
        return self.head(last)
