import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

# Permutations of `range(length)` of which any part can be computed without the rest. Stored ones take memory for all
# rows and members, and are sorted anew in each epoch, also for a run of few steps.
#
# Constants, rounds and sides are part of every result: with others, a run that is resumed within an epoch would see
# some rows twice and others never. All integers have 32 bits, as JAX has no others by default: a side is below 2**16,
# so that its product with half a hash fits. A cycle walk has a fixed number of rounds, because under `vmap` a loop
# "until inside" runs for all members as long as for the slowest.

_FEW = 64  # rows that are ranked instead
_MOST_PER_SIDE = 2**16 - 1


def permute(words: UInt32[Array, "2"], epoch: Int[Array, ""], positions: Int[Array, " n"], length: int) -> Array:
    """The entries at `positions` of a permutation of `range(length)`.

    It is determined by two words of a key and the epoch. Time and memory depend on the number of positions, not on the
    length.

    A Feistel network permutes `rows * columns` numbers, few more than `length`, with sides of similar size: in turn,
    the row and the column of a number move by a hash of the other. Numbers outside of `range(length)` are mapped again
    until they are inside (cycle walking), which preserves the permutation. Fewer than 64 numbers are ranked by a hash.

    ??? cite

        Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002): cycle walking, and networks of other
        sizes than powers of two.

        Mitchell, Stokes, Frank and Holmes, "Bandwidth-Optimal Random Shuffling for GPUs" (2021; ACM Transactions on
        Parallel Computing, 2022): such permutations in place of stored ones.
    """
    of_epoch = _epoch_words(words, epoch.astype(jnp.uint32))
    x = positions.astype(jnp.uint32)
    x = _rank(of_epoch, x, length) if length < _FEW else _walk(of_epoch, x, length)
    return x.astype(jnp.int32)


def _mix(x: Array) -> Array:
    """A hash of 32 bits ("lowbias32" of Wellons' hash-prospector)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _epoch_words(words: Array, epoch: Array) -> tuple[Array, Array]:
    """Two words for an epoch; the first is different in every epoch."""
    first = _mix(_mix(words[0] ^ (epoch * jnp.uint32(0x9E3779B9))) + words[1])
    return first, _mix(first + words[1] + jnp.uint32(0x85EBCA6B))


def _rank(words: tuple[Array, Array], x: Array, length: int) -> Array:
    """The rank of each number by its hash; equal hashes are ranked by the number."""
    hashes = lambda x: _mix(_mix(x + words[0]) ^ words[1])
    of_all, of_x = jax.lax.optimization_barrier((hashes(jnp.arange(length, dtype=jnp.uint32)), hashes(x)))
    of_all, of_x, x = of_all[None], of_x[:, None], x[:, None]
    first = (of_all == of_x) & (jnp.arange(length, dtype=jnp.uint32)[None] < x)
    return jnp.sum((of_all < of_x) | first, axis=1, dtype=jnp.uint32)


def _walk(words: tuple[Array, Array], x: Array, length: int) -> Array:
    """The network at `x`, with cycle walking for numbers outside.

    The numbers outside are so few that the ends of their own walks are computed first, by doubling: after `k` rounds,
    of `2**k` steps each.
    """
    rows, columns = factors(length)
    outside = rows * columns - length
    ends = _network(words, np.divmod(length + np.arange(outside, dtype=np.uint32), np.uint32(columns)), rows, columns)

    def walk(x: Array) -> Array:
        walked = x
        for i in range(outside):
            walked = jnp.where(x == jnp.uint32(length + i), ends[i], walked)
        return walked

    for _ in range(outside.bit_length()):
        ends = walk(ends)
    by = jnp.full_like(x, columns)
    return walk(_network(words, (jax.lax.div(x, by), jax.lax.rem(x, by)), rows, columns))


def _network(words: tuple[Array, Array], place: tuple[Any, Any], rows: int, columns: int) -> Array:
    """The network at rows and columns."""
    for i in range(0, num_rounds(min(rows, columns)), 2):
        keys = [words[0] + np.uint32(0x9E3779B9 * (i + j) % 2**32) for j in (1, 2)]
        place = _two_rounds(place, keys, words[1], (rows, columns))
    return place[0] * jnp.uint32(columns) + place[1]


@ft.partial(jax.jit, static_argnums=3, inline=True)  # the network is unrolled, and traced only once
def _two_rounds(place: tuple[Array, Array], keys: list[Array], other: Array, sides: tuple[int, int]) -> tuple:
    (row, column), (rows, columns) = place, sides
    row = _move(row, _hash(column, keys[0], other), rows)
    return row, _move(column, _hash(row, keys[1], other), columns)


def _hash(x: Array, key: Array, other: Array) -> Array:
    x = (x + key) * jnp.uint32(0x7FEB352D)
    return (x ^ (x >> 15) ^ other) * jnp.uint32(0x846CA68B)


def _move(x: Array, by: Array, size: int) -> Array:
    """`x` moved around a circle of `size`, by a hash scaled to it."""
    part = (by >> 16) * jnp.uint32(size)
    if size > 2**10:  # for which 16 bits of the hash are not uniform enough
        part += ((by & jnp.uint32(0xFFFF)) * jnp.uint32(size)) >> 16
    x = x + (part >> 16)
    return jnp.minimum(x, x - jnp.uint32(size))


def num_rounds(side: int) -> int:
    """The number of rounds of a network whose smaller side is `side`.

    The chi-square of the positions of pairs, over a million keys, exceeds its expectation by
    `6e5 / side ** (rounds - 2)` standard deviations, even with ideal hashes. The rounds limit this to 0.01.
    """
    return max(2 + 2 * math.ceil(math.log(6e7) / math.log(side) / 2), 6)


@ft.lru_cache(maxsize=256)
def factors(length: int) -> tuple[int, int]:
    """The sides of the network for `length` numbers: the cheapest in rounds and in walks of the numbers outside."""
    root = math.isqrt(length)
    sides = np.arange(max(root // 2, -(-length // _MOST_PER_SIDE)), min(2 * root, _MOST_PER_SIDE) + 1)
    others = -(-length // sides)
    outside = sides * others - length
    rounds = np.array([num_rounds(side) for side in np.minimum(sides, others).tolist()])
    best = np.lexsort((np.abs(sides - root), rounds * (32 + outside) + 6 * outside))[0]
    return int(sides[best]), int(others[best])


def stream(
    words: UInt32[Array, "2"], step: Int[Array, ""], *, length: int, batch_size: int, steps: int, permutations: int
) -> Int[Array, "steps batch"]:
    """The rows of `steps` batches of one member, from its step `step` on.

    Batches are full, and are taken from an endless stream of permutations of `range(length)`: the last batch of an
    epoch is filled with the first rows of the next permutation. So every row comes once in `length` draws. The batches
    touch at most so many `permutations`.
    """
    per_epoch = -(-length // batch_size)
    epoch, first = step // per_epoch, step % per_epoch * batch_size
    surplus = per_epoch * batch_size - length  # rows that each epoch takes from the next permutation
    place = epoch * surplus + first + jnp.arange(steps * batch_size, dtype=jnp.int32)
    draw, place = epoch + place // length, place % length
    first = draw[0]
    rows = permute(words, first, place, length)
    for later in range(1, permutations):
        rows = jnp.where(draw == first + later, permute(words, first + later, place, length), rows)
    # Otherwise XLA computes them anew in each read of the data.
    return jax.lax.optimization_barrier(rows).reshape(steps, batch_size)
