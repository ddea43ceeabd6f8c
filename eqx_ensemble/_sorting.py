"""Sorting over the leading axis: on a CPU by a network of minima and maxima, since XLA's sort compares scalars."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_FEWEST_NUMBERS = 2**15  # below, the compilation of a network costs more than it saves
_MOST_MEMBERS = 256
_BYTES = 2**18  # of keys in a block of columns, which a cache holds


@jax.custom_jvp
def sort(values: Float[Array, "members ..."]) -> Float[Array, "members ..."]:
    """The values in ascending order, NaN last; the gradient is that of `jnp.sort`."""
    if not _is_worth_a_network(values):
        return _sort(values)
    return jax.lax.platform_dependent(values, cpu=_sort_by_network, default=_sort)


@jax.custom_jvp
def sort_pairs(
    values: Float[Array, "members ..."], weights: Float[Array, "members ..."]
) -> tuple[Float[Array, "members ..."], Float[Array, "members ..."]]:
    """The values in ascending order, NaN last, and their weights; the order of equal values is arbitrary."""
    if not _is_worth_a_network(values):
        return _sort_pairs(values, weights)
    return jax.lax.platform_dependent(values, weights, cpu=_sort_pairs_by_network, default=_sort_pairs)


@sort.defjvp
def _sort_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return jax.jvp(_sort, primals, tangents)


@sort_pairs.defjvp
def _sort_pairs_jvp(primals: tuple, tangents: tuple) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    return jax.jvp(_sort_pairs, primals, tangents)


def _is_worth_a_network(values: Array) -> bool:
    return values.size >= _FEWEST_NUMBERS and 2 <= values.shape[0] <= _MOST_MEMBERS


def _sort(values: Array) -> Array:
    return jnp.sort(values, axis=0)


def _sort_pairs(values: Array, weights: Array) -> tuple[Array, Array]:
    first, second = jax.lax.sort((values, weights), dimension=0, num_keys=1)
    return first, second


def _sort_by_network(values: Array) -> Array:
    return _by_columns(values)[0]


def _sort_pairs_by_network(values: Array, weights: Array) -> tuple[Array, Array]:
    first, second = _by_columns(values, weights)
    return first, second


def _by_columns(values: Array, *payload: Array) -> tuple[Array, ...]:
    """The network on blocks of columns, one block after another."""
    num_members = values.shape[0]
    flat = [jnp.reshape(x, (num_members, -1)) for x in (values, *payload)]
    columns = flat[0].shape[1]
    size = max(_BYTES // (num_members * values.dtype.itemsize), 1)
    count, rest = divmod(columns, size) if columns > 2 * size else (0, columns)

    def block(start: Array | int, size: int) -> tuple[Array, ...]:
        keys, *others = (jax.lax.dynamic_slice_in_dim(x, start, size, 1) for x in flat)
        keys, *others = _network(_to_keys(keys), *others)
        return _from_keys(keys, values.dtype), *others

    parts = []
    if count:
        blocks = jax.lax.map(lambda i: block(i * size, size), jnp.arange(count))
        parts.append([jnp.reshape(jnp.moveaxis(x, 0, 1), (num_members, -1)) for x in blocks])
    if rest:
        parts.append(block(count * size, rest))
    joined = (x[0] if len(x) == 1 else jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    return tuple(jnp.reshape(x, values.shape) for x in joined)


def _to_keys(values: Float[Array, "members columns"]) -> Int[Array, "members columns"]:
    """Integers in the order of the numbers: their bits, those of negative numbers reversed; NaN is the largest."""
    whole = jnp.int32 if values.dtype == jnp.float32 else jnp.int64
    bits = jax.lax.bitcast_convert_type(values, whole)
    keys = jnp.where(bits < 0, bits ^ jnp.iinfo(whole).max, bits)
    return jnp.where(jnp.isnan(values), jnp.iinfo(whole).max, keys)


def _from_keys(keys: Int[Array, "members columns"], dtype: jnp.dtype) -> Float[Array, "members columns"]:
    return jax.lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ jnp.iinfo(keys.dtype).max, keys), dtype)


def _network(keys: Int[Array, "members columns"], *payload: Array) -> tuple[Array, ...]:
    """Batcher's bitonic network in its form where all comparisons have one direction."""
    num_members, columns = keys.shape
    width = 1 << (num_members - 1).bit_length()
    missing = ((0, width - num_members), (0, 0))
    rows = (jnp.pad(keys, missing, constant_values=jnp.iinfo(keys.dtype).max), *(jnp.pad(x, missing) for x in payload))
    run = 2
    while run <= width:
        # Sorted runs of half the length become one: the second is compared in reverse.
        first, second = zip(*((y[:, : run // 2], y[:, run // 2 :][:, ::-1]) for y in _runs(rows, run)), strict=True)
        low, high = _compare(first, second)
        rows = _rows(zip(low, (x[:, ::-1] for x in high), strict=True), (width, columns))
        step = run // 2
        while step > 1:
            first, second = zip(*((y[:, : step // 2], y[:, step // 2 :]) for y in _runs(rows, step)), strict=True)
            rows = _rows(zip(*_compare(first, second), strict=True), (width, columns))
            step //= 2
        run *= 2
    return tuple(x[:num_members] for x in rows)


def _runs(rows: tuple[Array, ...], length: int) -> list[Array]:
    return [jnp.reshape(x, (-1, length, x.shape[1])) for x in rows]


def _rows(halves, shape: tuple[int, int]) -> tuple[Array, ...]:
    # The barrier keeps XLA from computing a layer anew for each of its uses.
    joined = tuple(jnp.reshape(jnp.concatenate(pair, axis=1), shape) for pair in halves)
    return jax.lax.optimization_barrier(joined)


def _compare(first: tuple[Array, ...], second: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    low, high = (jnp.minimum(first[0], second[0]),), (jnp.maximum(first[0], second[0]),)
    swap = first[0] > second[0]
    for x, y in zip(first[1:], second[1:], strict=True):
        low, high = (*low, jnp.where(swap, y, x)), (*high, jnp.where(swap, x, y))
    return low, high
