"""Keys whose random numbers are compiled for one member, so that the first `build` of a process takes half as long.

XLA takes about three times as long to compile threefry under `jax.vmap` as for one key, and hardly longer inside
`jax.lax.map`, which draws the same bits for one member after another.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.extend.random import define_prng_impl, threefry_prng_impl

from .._check import is_traced, is_typed_key

MOST_MEMBERS = 128
"""For more members, a call after the first would be slower than under `jax.vmap`."""


def can_draw_by_member(keys: jax.Array) -> bool:
    """Whether `keys` are concrete threefry keys, on one CPU device, and not too many."""
    if is_traced(keys) or len(keys) > MOST_MEMBERS or len(keys.devices()) > 1:
        return False
    return all(device.platform == "cpu" for device in keys.devices())


def draw_by_member(keys: jax.Array) -> jax.Array:
    """The same keys, which under `jax.vmap` draw for one member after another."""
    return jax.random.wrap_key_data(jax.random.key_data(keys), impl=_BY_MEMBER)  # pyright: ignore[reportArgumentType]


def restore_keys(tree: Any, keys: jax.Array) -> Any:
    """Replaces keys made by `draw_by_member`, such as `keys`, by ordinary keys in `tree`."""
    ordinary = lambda x: jax.random.wrap_key_data(jax.random.key_data(x), impl="threefry2x32")
    return jax.tree.map(lambda x: ordinary(x) if is_typed_key(x) and x.dtype == keys.dtype else x, tree)


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    draw: Callable[[jax.Array], jax.Array] = lambda key: _THREEFRY.random_bits(key, bit_width, shape)

    @custom_vmap
    def draw_by_member(key: jax.Array) -> jax.Array:
        return draw(key)

    @draw_by_member.def_vmap
    def _(num_keys: int, _: Any, keys: jax.Array) -> tuple[jax.Array, bool]:
        few = num_keys <= MOST_MEMBERS  # a constructor may split its key into many
        return jax.lax.map(draw_by_member, keys) if few else jax.vmap(draw)(keys), True

    return draw_by_member(key)


_THREEFRY: Any = threefry_prng_impl
_BY_MEMBER: Any = define_prng_impl(
    key_shape=_THREEFRY.key_shape,
    seed=_THREEFRY.seed,
    split=_THREEFRY.split,
    random_bits=_random_bits,
    fold_in=_THREEFRY.fold_in,
    name=_THREEFRY.name,  # for `jax.random.key_impl`
    tag=_THREEFRY.tag,
)
