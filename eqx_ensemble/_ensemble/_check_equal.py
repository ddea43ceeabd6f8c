from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._check import is_key, is_member_array, is_traced
from .._pytree import PyTree
from .._warnings import warn


def warn_of_equal_members(stacked: PyTree, keys: Any, arguments: Iterable[str]) -> None:
    """Warns if all members are equal, because of equal keys or a `make` that does not use its key.

    Constant arrays, such as zeros, involve no randomness and are ignored.
    """
    count, arguments = len(keys), list(arguments)
    arrays = [x for x in jax.tree.leaves((stacked, keys)) if is_member_array(x)]
    if count < 2 or any(is_traced(x) or not _is_here(x) for x in arrays):
        return
    again = None if arguments else _first_repeat(keys)
    if again is not None:
        reason = f"`keys[{again[1]}]` is `keys[{again[0]}]`: make keys with `jax.random.split(key, {count})`."
    elif _all_equal([x for x in arrays[:-1] if x.size]):
        reason = f"`make` does not use its key: write `lambda {', '.join(['key', *arguments])}: Model(..., key=key)`."
    else:
        return
    warn(
        f"`build` made identical members, which stay identical if trained on the same rows.\n{reason} "
        f"If they are meant to be identical, write `stack([model] * {count})`."
    )


def warn_of_equal_models(stacked: PyTree, models: list[Any]) -> None:
    """Warns if several models are equal, as those made from one key; one model, repeated, is meant to be."""
    arrays = [x for x in jax.tree.leaves(stacked) if is_member_array(x)]
    if all(model is models[0] for model in models) or any(is_traced(x) or not _is_here(x) for x in arrays):
        return
    if _all_equal([x for x in arrays if x.size]):
        warn(
            "`stack` got identical models, which stay identical if trained on the same rows.\n"
            "Make each with a key of its own: `[make(k) for k in jax.random.split(key, n)]`. If they are meant to be "
            f"identical, write `stack([model] * {len(models)})`."
        )


def _is_here(x: Any) -> bool:
    """Whether this process holds the whole array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def _all_equal(arrays: list[Any]) -> bool:
    """Whether all members are equal, and not only in constants. Small arrays come first: one usually decides."""
    arrays = sorted(arrays, key=lambda x: x.size)
    return all(map(_alike, arrays)) and not all(map(_constant, arrays))


def _first_repeat(keys: Any) -> tuple[int, int] | None:
    """The first two members with the same key."""
    seen: dict[bytes, int] = {}
    for i, key in enumerate(_numbers(keys)):
        if key.tobytes() in seen:
            return seen[key.tobytes()], i
        seen[key.tobytes()] = i
    return None


def _alike(x: Any) -> bool:
    numbers = _numbers(x)
    return bool((numbers[1] == numbers[0]).all() and (numbers == numbers[:1]).all())


def _constant(x: Any) -> bool:
    """Whether an array involves no randomness: one value, or counters such as the ids of a nested ensemble."""
    if not is_key(x) and not jnp.issubdtype(x.dtype, jnp.inexact):
        return True
    numbers = _numbers(x)
    return bool((numbers == numbers.reshape(-1)[0]).all())


def _numbers(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)
