"""The work that all contenders do: models, losses and data, written once for one member."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_ensemble as ee


@dataclasses.dataclass(frozen=True)
class Problem:
    """An ensemble to train. Data are random NumPy arrays on the host, never zeros.

    `make(key)` is one member; `sizes` are those of the layers of an MLP, and empty for other models.
    """

    name: str
    make: Callable[[Any], eqx.Module]
    loss: Callable[[Any, Any, Any], jax.Array]
    x: np.ndarray
    y: np.ndarray
    num_members: int
    batch_size: int
    sizes: tuple[int, ...] = ()
    learning_rate: float = 1e-3

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch; all are full."""
        return len(self.x) // self.batch_size

    @property
    def adam(self) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)

    def ensemble(self, mesh: Any = None) -> ee.Ensemble:
        """All members; the same at every call."""
        return ee.build(self.make, self.num_members, mesh=mesh, key=jax.random.key(0))

    def own_rows(self, epochs: int) -> Iterator[np.ndarray]:
        """Per epoch, rows of every step `(steps, members, batch)`: a row order of its own for every member."""
        generator = np.random.default_rng(0)
        tiled = np.tile(np.arange(len(self.x), dtype=np.int32), (self.num_members, 1))
        for _ in range(epochs):
            rows = generator.permuted(tiled, axis=1)
            rows = rows.reshape(self.num_members, self.steps_per_epoch, self.batch_size)
            yield np.ascontiguousarray(rows.swapaxes(0, 1))

    def fit(self, *, shuffle: bool = True, mesh: Any = None, **options: Any) -> Callable[[], ee.Run]:
        """A whole `fit`; with `shuffle=False` every member still has its own rows, but none are drawn."""
        ensemble, key, adam = self.ensemble(mesh), jax.random.key(0), self.adam
        rows = None if shuffle else np.concatenate(list(next(self.own_rows(1))), axis=1)
        options |= {"batch_size": self.batch_size, "progress": False, "key": key, "mesh": mesh}
        return lambda: ee.fit(ensemble, self.loss, adam, (self.x, self.y), shuffle=shuffle, rows=rows, **options)


def mean_squared_error(model: Any, batch: Any, key: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def cross_entropy(model: Any, batch: Any, key: Any) -> jax.Array:
    x, y = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))


def mlp(sizes: Sequence[int], key: Any) -> eqx.nn.MLP:
    """An MLP whose hidden layers are of one size."""
    inputs, *hidden, out = sizes
    return eqx.nn.MLP(inputs, out, hidden[0], len(hidden), key=key)


class CNN(eqx.Module):
    """Two convolutions, each before a pooling, and a linear layer, for images of 28 x 28."""

    layers: eqx.nn.Sequential

    def __init__(self, channels: int, *, key: Any):
        keys = jax.random.split(key, 3)
        relu, pool = eqx.nn.Lambda(jax.nn.relu), eqx.nn.MaxPool2d(2, 2)
        first = eqx.nn.Conv2d(1, channels, 3, padding=1, key=keys[0])
        second = eqx.nn.Conv2d(channels, 2 * channels, 3, padding=1, key=keys[1])
        linear = eqx.nn.Linear(2 * channels * 7 * 7, 10, key=keys[2])
        flat = eqx.nn.Lambda(jnp.ravel)
        self.layers = eqx.nn.Sequential([first, relu, pool, second, relu, pool, flat, linear])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers(x)


def tiny(*, quick: bool) -> Problem:
    """The tiny MLP: one member leaves the machine idle."""
    generator, sizes = np.random.default_rng(1), (13, 50, 1)
    x = generator.standard_normal((256 if quick else 2048, 13), np.float32)
    y = np.sin(x[:, 0]) + 0.1 * generator.standard_normal(len(x), np.float32)
    return Problem("tiny", ft.partial(mlp, sizes), mean_squared_error, x, y, 4 if quick else 64, 32, sizes)


def middle(*, quick: bool) -> Problem:
    """The middle MLP: one member keeps a core busy."""
    (x, y), sizes = _classes(256 if quick else 2048, 784), (784, 256, 256, 10)
    return Problem("middle", ft.partial(mlp, sizes), cross_entropy, x, y, 2 if quick else 16, 128, sizes)


def cnn(*, quick: bool) -> Problem:
    """A small CNN on 28 x 28."""
    channels, batch_size, num_members = (2, 4, 2) if quick else (16, 32, 4)
    x, y = _classes(2 * batch_size, 1, 28, 28)
    make = lambda key: CNN(channels, key=key)
    return Problem(f"CNN, {num_members} members", make, cross_entropy, x, y, num_members, batch_size)


def _classes(rows: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Examples of a shape, and one of ten classes for each."""
    generator = np.random.default_rng(1)
    x = generator.standard_normal((rows, *shape), np.float32)
    return x, generator.integers(0, 10, rows).astype(np.int32)
