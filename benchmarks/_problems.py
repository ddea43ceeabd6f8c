"""The work that all contenders do: models, losses and data, written once for one member."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_ensemble as ee


@dataclasses.dataclass(frozen=True)
class Problem:
    """An ensemble to train. Data are random NumPy arrays on the host, never zeros."""

    name: str
    sizes: tuple[int, ...]
    loss: Callable[[Any, Any, Any], jax.Array]
    x: np.ndarray
    y: np.ndarray
    num_members: int
    batch_size: int
    learning_rate: float = 1e-3

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch; all are full."""
        return len(self.x) // self.batch_size

    def make(self, key: Any) -> eqx.nn.MLP:
        """One member."""
        inputs, *hidden, out = self.sizes
        return eqx.nn.MLP(inputs, out, hidden[0], len(hidden), key=key)

    def ensemble(self) -> ee.Ensemble[eqx.nn.MLP]:
        """All members; the same at every call."""
        return ee.build(self.make, self.num_members, key=jax.random.key(0))

    @property
    def layers(self) -> list[tuple[int, int]]:
        """Inputs and outputs of every layer."""
        return list(itertools.pairwise(self.sizes))

    def flops_per_step(self) -> int:
        """Operations of a step's matrix products; the data themselves need no gradient."""
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


def tiny(*, quick: bool) -> Problem:
    """The tiny MLP: the machine idles over one member."""
    generator = np.random.default_rng(1)
    rows = 256 if quick else 2048
    x = generator.standard_normal((rows, 13), np.float32)
    y = np.sin(x[:, 0]) + 0.1 * generator.standard_normal(rows, np.float32)
    return Problem("tiny", (13, 50, 1), mean_squared_error, x, y, 4 if quick else 64, 32)


def middle(*, quick: bool) -> Problem:
    """The middle MLP: one member keeps a core busy."""
    generator = np.random.default_rng(1)
    rows = 256 if quick else 2048
    x = generator.standard_normal((rows, 784), np.float32)
    y = generator.integers(0, 10, rows).astype(np.int32)
    return Problem("middle", (784, 256, 256, 10), cross_entropy, x, y, 2 if quick else 16, 128)
