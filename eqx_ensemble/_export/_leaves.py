from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._check import is_key, is_member_array, member_dtype
from .._ensemble import Ensemble
from ._check import check_exportable


class Parts(NamedTuple):
    """What a program needs beside its input: everything in it that has members."""

    ensemble: Ensemble[Any]
    state: PyTree
    weights: jax.Array | None
    keys: jax.Array | None


class Packed(NamedTuple):
    """The arrays of some parts by name.

    **Attributes:**

    - `arrays`: `model.layers.0.weight` and the like. Typed keys are there as their data: no file has them.
    - `stacked`: the names of those that carry the members axis.
    - `unpack`: makes the parts again, of these arrays or of others with the same names.
    """

    arrays: dict[str, jax.Array | np.ndarray]
    stacked: frozenset[str]
    unpack: Callable[[dict[str, Any]], Parts]


def pack(parts: Parts, *, name: str) -> Packed:
    """Takes the arrays out of some parts. What is not an array stays with `unpack`."""
    own = {"model": parts.ensemble.stacked, "state": parts.state, "weights": parts.weights, "keys": parts.keys}
    keyed, treedef = jtu.tree_flatten_with_path((own, {"model": parts.ensemble.shared}))
    leaves = [leaf for _, leaf in keyed]
    arrays, places, stacked = {}, {}, set()
    for place, (path, leaf) in enumerate(keyed):
        if is_member_array(leaf):
            text = _distinct(jtu.keystr(path[1:], simple=True, separator="."), arrays)
            check_exportable(leaf, text, name=name)
            generator = str(jax.random.key_impl(leaf)) if is_key(leaf) else None
            arrays[text] = _plain(leaf) if generator is None else jax.random.key_data(leaf)
            places[text] = place, generator
            if path[0] == jtu.SequenceKey(0):
                stacked.add(text)

    def unpack(arrays: dict[str, Any]) -> Parts:
        filled = list(leaves)
        for text, (place, generator) in places.items():
            x = jnp.asarray(arrays[text])
            filled[place] = x if generator is None else jax.random.wrap_key_data(x, impl=generator)
        own, shared = jtu.tree_unflatten(treedef, filled)
        count = next(arrays[text].shape[0] for text in arrays if text in stacked)
        # Ids say which random stream a member has: `keys` are drawn already, and nothing else asks for them.
        ensemble = Ensemble(own["model"], shared["model"], jnp.arange(count, dtype=jnp.int32))
        return Parts(ensemble, own["state"], own["weights"], own["keys"])

    return Packed(arrays, frozenset(stacked), unpack)


def _plain(leaf: Any) -> jax.Array | np.ndarray:
    """A leaf of the dtype that it has in a program."""
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, dtype=member_dtype(leaf))


def _distinct(text: str, taken: dict[str, Any]) -> str:
    """A node of the user's own may give two children one name."""
    number = next(number for number in range(len(taken) + 1) if _with_number(text, number) not in taken)
    return _with_number(text, number)


def _with_number(text: str, number: int) -> str:
    return text if number == 0 else f"{text}#{number}"
