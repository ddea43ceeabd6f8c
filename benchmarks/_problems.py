"""The work that all contenders do: models, losses and data, written once for one member."""

import dataclasses
import functools as ft
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _models import CNN, Block, Recurrent, mlp

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
    learning_rate: float = 1e-3
    sizes: tuple[int, ...] = ()

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch; all are full."""
        return len(self.x) // self.batch_size

    def ensemble(self, mesh: Any = None) -> ee.Ensemble:
        """All members; the same at every call."""
        return ee.build(self.make, self.num_members, mesh=mesh, key=jax.random.key(0))

    @property
    def layers(self) -> list[tuple[int, int]]:
        """Inputs and outputs of every layer of an MLP."""
        if not self.sizes:
            raise NotImplementedError(f"{self.name} is not an MLP: its layers are not known here")
        return list(itertools.pairwise(self.sizes))

    def flops_per_step(self) -> int:
        """Operations of a step's matrix products; there is no gradient with respect to the data."""
        products = [2 * self.num_members * self.batch_size * inputs * out for inputs, out in self.layers]
        return 3 * sum(products) - products[0]

    def own_rows(self, epochs: int) -> Iterator[np.ndarray]:
        """Per epoch, rows of every step `(steps, members, batch)`: a row order of its own for every member."""
        generator = np.random.default_rng(0)
        tiled = np.tile(np.arange(len(self.x), dtype=np.int32), (self.num_members, 1))
        for _ in range(epochs):
            rows = generator.permuted(tiled, axis=1)
            rows = rows.reshape(self.num_members, self.steps_per_epoch, self.batch_size)
            yield np.ascontiguousarray(rows.swapaxes(0, 1))

    def shared_rows(self, epochs: int) -> Iterator[np.ndarray]:
        """Per epoch, rows of every step `(steps, batch)`: one row order for all members."""
        generator = np.random.default_rng(0)
        for _ in range(epochs):
            rows = generator.permutation(len(self.x)).astype(np.int32)
            yield rows.reshape(self.steps_per_epoch, self.batch_size)


def mean_squared_error(model: Any, batch: Any, key: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def cross_entropy(model: Any, batch: Any, key: Any) -> jax.Array:
    x, y = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))


def bfloat16_loss(loss: Callable[[Any, Any, Any], jax.Array], model: Any, batch: Any, key: Any) -> jax.Array:
    """A loss of outputs computed in bfloat16; weights stay in float32."""
    x, y = batch
    model, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a, (model, x))
    return loss(lambda x: model(x).astype(jnp.float32), (x, y), key)


def tiny(*, quick: bool) -> Problem:
    """The tiny MLP: one member leaves the machine idle."""
    generator = np.random.default_rng(1)
    rows = 256 if quick else 2048
    x = generator.standard_normal((rows, 13), np.float32)
    y = np.sin(x[:, 0]) + 0.1 * generator.standard_normal(rows, np.float32)
    return _of_mlps("tiny", (13, 50, 1), mean_squared_error, x, y, 4 if quick else 64, 32)


def middle(*, quick: bool) -> Problem:
    """The middle MLP: one member keeps a core busy."""
    x, y = _classes(256 if quick else 2048, 784)
    return _of_mlps("middle", (784, 256, 256, 10), cross_entropy, x, y, 2 if quick else 16, 128)


def deep(*, quick: bool) -> Problem:
    """MLPs with large weights and intermediate arrays: memory depends on how many members a plan runs at a time."""
    num_members, width, rows = (2, 32, 64) if quick else (32, 256, 256)
    x, y = _classes(rows, 16)
    return _of_mlps("deep", (16, width, width, width, width, 10), cross_entropy, x, y, num_members, rows)


def cnn(num_members: int, *, quick: bool) -> Problem:
    """A small CNN on 28 x 28."""
    channels, batch_size = (2, 4) if quick else (16, 32)
    x, y = _classes(2 * batch_size, 1, 28, 28)
    name = f"CNN, {num_members} members"
    return Problem(name, lambda key: CNN(channels, key=key), cross_entropy, x, y, num_members, batch_size)


def block(*, quick: bool) -> Problem:
    """A small transformer block: many operations, each of them small."""
    num_members, batch_size, length, width = (2, 4, 4, 8) if quick else (16, 32, 32, 64)
    x, y = _classes(8 * batch_size, length, width)
    return Problem("block", lambda key: Block(width, 4, key=key), cross_entropy, x, y, num_members, batch_size)


def recurrent(*, quick: bool) -> Problem:
    """A GRU: one small operation after another."""
    num_members, batch_size, length, width = (2, 4, 4, 8) if quick else (16, 32, 32, 64)
    x, y = _classes(8 * batch_size, length, width)
    return Problem("GRU", lambda key: Recurrent(width, key=key), cross_entropy, x, y, num_members, batch_size)


def _of_mlps(
    name: str, sizes: tuple[int, ...], loss: Any, x: np.ndarray, y: np.ndarray, num_members: int, batch_size: int
) -> Problem:
    return Problem(name, ft.partial(mlp, sizes), loss, x, y, num_members, batch_size, sizes=sizes)


def _classes(rows: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Examples of a shape, and one of ten classes for each."""
    generator = np.random.default_rng(1)
    x = generator.standard_normal((rows, *shape), np.float32)
    return x, generator.integers(0, 10, rows).astype(np.int32)
