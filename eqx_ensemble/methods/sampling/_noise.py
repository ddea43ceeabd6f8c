from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from ... import _keys
from ..._pytree import PyTree
from ._check import check_num_rows, check_rate

Rates = Callable[[Int[Array, ""]], tuple[Float[Array, ""], Float[Array, ""]]]
"""The learning rate and the standard deviation of the noise in a step."""


def rates(learning_rate: Any, num_rows: Any, temperature: Any, *, name: str) -> Rates:
    """Returns a function of a step's learning rate and noise, `sqrt(2 * rate * temperature / num_rows)`."""
    learning_rate = check_rate(learning_rate, "learning_rate", name=name)
    temperature = check_rate(temperature, "temperature", name=name)
    num_rows = check_num_rows(num_rows, name=name)

    def at(count: Int[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        rate, heat = _number(learning_rate, count), _number(temperature, count)
        return rate, jnp.sqrt(2 * rate * heat / _number(num_rows, count))

    return at


def _number(value: Any, count: Int[Array, ""]) -> Float[Array, ""]:
    return jnp.asarray(value(count) if callable(value) else value).astype(jnp.result_type(float))


def first_key(key: Any, *, name: str) -> Key[Array, ""]:
    """The key in the initial state of a sampler, from which training derives one key per member."""
    return jax.random.fold_in(_keys.root(key, name=name), np.uint32(_keys.tag("sampling")))


def draw_noise(key: Key[Array, ""], count: Int[Array, ""], like: PyTree, std: Float[Array, ""]) -> PyTree:
    """Gaussian noise for one step, with the shapes and dtypes of `like`.

    The stream of each leaf is derived from its path, because parts of an `optax.multi_transform` share leaf numbers.
    """
    of_step = jax.random.fold_in(key, count)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    drawn = []
    for i, (path, x) in enumerate(leaves):
        of_path = jax.random.fold_in(of_step, np.uint32(_keys.tag(jax.tree_util.keystr(path))))
        own = jax.random.fold_in(of_path, i)
        drawn.append(std.astype(x.dtype) * jax.random.normal(own, x.shape, x.dtype))
    return jax.tree.unflatten(treedef, drawn)


def next_count(count: Int[Array, ""]) -> Int[Array, ""]:
    """The number of steps plus one, without overflow."""
    return jnp.asarray(optax.safe_increment(count))
