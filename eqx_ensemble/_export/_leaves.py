from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._check import is_key, is_member_array, member_dtype
from .._ensemble import Ensemble
from .._pytree import PyTree
from ._check import check_exportable


class Parts(NamedTuple):
    """The arguments of a program in addition to its input."""

    ensemble: Ensemble[Any]
    state: PyTree
    weights: jax.Array | None
    keys: jax.Array | None


class Packed(NamedTuple):
    """The arrays of some parts by name.

    **Attributes:**

    - `arrays`: `model.layers.0.weight` and the like. Typed keys are replaced by their data, which files can hold.
    - `stacked`: the names of the arrays that carry the members axis.
    - `unpack`: rebuilds the parts from these arrays, or from others with the same names.
    """

    arrays: dict[str, jax.Array | np.ndarray]
    stacked: frozenset[str]
    unpack: Callable[[dict[str, Any]], Parts]


def pack(parts: Parts, *, name: str) -> Packed:
    """Separates the arrays of some parts; `unpack` keeps everything else."""
    own = {"model": parts.ensemble.stacked, "state": parts.state, "weights": parts.weights, "keys": parts.keys}
    keyed, treedef = jtu.tree_flatten_with_path((own, {"model": parts.ensemble.shared}))
    leaves = [leaf for _, leaf in keyed]
    arrays, positions, stacked = {}, {}, set()
    for position, (path, leaf) in enumerate(keyed):
        if is_member_array(leaf):
            text = _distinct(jtu.keystr(path[1:], simple=True, separator="."), arrays)
            check_exportable(leaf, text, name=name)
            generator = str(jax.random.key_impl(leaf)) if is_key(leaf) else None
            arrays[text] = _plain(leaf) if generator is None else jax.random.key_data(leaf)
            positions[text] = position, generator
            if path[0] == jtu.SequenceKey(0):
                stacked.add(text)

    def unpack(arrays: dict[str, Any]) -> Parts:
        filled = list(leaves)
        for text, (position, generator) in positions.items():
            x = jnp.asarray(arrays[text])
            filled[position] = x if generator is None else jax.random.wrap_key_data(x, impl=generator)
        own, shared = jtu.tree_unflatten(treedef, filled)
        count = next(arrays[text].shape[0] for text in arrays if text in stacked)
        # Ids select random streams, and `keys` are drawn already.
        ensemble = Ensemble(own["model"], shared["model"], jnp.arange(count, dtype=jnp.int32))
        return Parts(ensemble, own["state"], own["weights"], own["keys"])

    return Packed(arrays, frozenset(stacked), unpack)


def _plain(leaf: Any) -> jax.Array | np.ndarray:
    """A leaf with the dtype that it has in a program."""
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, dtype=member_dtype(leaf))


def _distinct(text: str, taken: dict[str, Any]) -> str:
    """A name that is not taken: a custom node may give two children the same name."""
    number = next(number for number in range(len(taken) + 1) if _with_number(text, number) not in taken)
    return _with_number(text, number)


def _with_number(text: str, number: int) -> str:
    return text if number == 0 else f"{text}#{number}"
