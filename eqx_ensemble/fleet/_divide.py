"""Divides members into shards, and selects the arguments of each shard."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import _axes, _keys, tree
from .._caller import caller
from .._check import MemberMismatchError, check_sequence, is_key, kind_text
from .._ensemble import Ensemble, check_model_state
from .._foreign import as_numpy, from_foreign_tree
from .._pytree import PyTree
from ..checkpoint._engine import is_array_like
from ..train._engine import Run, TrainState, hyper_arrays, is_wrapper

# The shapes of members to read from files.


def resize(like: Any, count: int) -> Any:
    """The shapes of an ensemble, or of an ensemble and its state, for another number of members; no array data."""
    if not isinstance(like, tuple):
        return _ensemble_of(like, count)
    ensemble, state = like
    return _ensemble_of(ensemble, count), jax.tree.map(lambda x: _with_members(x, count), state)


def _ensemble_of(ensemble: Ensemble[Any], count: int) -> Ensemble[Any]:
    stacked = jax.tree.map(lambda x: _with_members(x, count), ensemble.arrays)
    ids = jax.ShapeDtypeStruct((count,), ensemble.ids.dtype)
    return eqx.filter_eval_shape(Ensemble, stacked, ensemble.shared, ids)


def _with_members(x: Any, count: int) -> Any:
    return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype) if is_array_like(x) else x


_SMALL = 2**16  # bytes; arrays up to this size are sent with every shard


def default_size(num_members: int, num_workers: int) -> int:
    """A shard size for which each worker gets about sixteen shards."""
    return max(2, -(-num_members // (16 * num_workers)))


def divide(num_members: int, size: int) -> list[np.ndarray]:
    """The positions of the members of each shard; at most two sizes, and no member alone in a shard.

    Each size is one compilation. One member alone is compiled to another program, with other rounding.
    """
    count = max(min(-(-num_members // size), num_members // 2), 1)
    return np.array_split(np.arange(num_members), count)


def on_host(data: PyTree, argument: str) -> PyTree:
    """Data whose large shared arrays are NumPy arrays, which can be written to files."""
    is_large = lambda x: isinstance(x, jax.Array) and not is_key(x) and x.nbytes > _SMALL
    to_host = lambda x: np.asarray(x) if is_large(x) else x
    return jax.tree.map(to_host, from_foreign_tree(data, argument), is_leaf=_axes.is_per_member)


def large_arrays(data: PyTree) -> list[np.ndarray]:
    """The shared arrays that are too large to be sent with every shard."""
    leaves = jax.tree.leaves(data, is_leaf=_axes.is_per_member)
    return [x for x in leaves if type(x) in (np.ndarray, np.memmap) and x.nbytes > _SMALL and _is_plain(x.dtype)]


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether an array is determined by its bytes and the name of its dtype."""
    return dtype.isnative and (dtype == np.bool_ or bool(jnp.issubdtype(dtype, jnp.number)))


def large_shared(tree: PyTree) -> list[Any]:
    """The large shared arrays of ensembles, training states and runs in a tree."""
    owners = (Ensemble, TrainState, Run)
    found: dict[int, Any] = {}
    for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, owners)):
        parts = (
            (node.ensemble.shared, node.train_state.shared) if isinstance(node, Run) else getattr(node, "shared", ())
        )
        for x in jax.tree.leaves(parts):
            if _axes.is_array(x) and not is_key(x) and x.nbytes > _SMALL:
                found[id(x)] = x
    return list(found.values())


def member_options(options: dict[str, Any], num_members: int) -> dict[str, Any]:
    """The options of `fit` with one value per member, in the form that `take_options` takes."""
    found = {word: options[word] for word in ("hyper", "rows", "state") if options.get(word) is not None}
    if "hyper" in found:
        found["hyper"] = hyper_arrays(found["hyper"], num_members)
    if "rows" in found:
        found["rows"] = as_numpy(found["rows"], "rows")
        if found["rows"].shape[:1] != (num_members,):
            raise MemberMismatchError(
                f"`{caller()}` needs the `rows` of each member, ({num_members}, n); got {found['rows'].shape}."
            )
    check_model_state(found.get("state"), num_members)
    return found


def take_options(options: dict[str, Any], positions: np.ndarray) -> dict[str, Any]:
    """The options of `member_options` for the members at some positions."""
    return tree.take(options, positions) if options else {}


# Ensembles that a function builds from member ids, on the worker.

_WITH_IDS = Ensemble | TrainState | Run


def check_ids_of_function(start: Any, ids: Any) -> np.ndarray | None:
    """Raises unless `ids` are given with a function, and only then. Returns them; `None` without a function."""
    if ids is not None and isinstance(start, _WITH_IDS):
        raise TypeError(
            f"`{caller()}` takes `ids` with a function that makes an ensemble of them; {kind_text(start)} has its own."
        )
    is_model = ids is None and isinstance(start, eqx.Module) and not is_wrapper(start)
    if is_model or not is_maker(start):
        return None
    if ids is None:
        raise TypeError(
            f"`{caller()}` needs `ids` with a function that makes an ensemble, such as `ids=range(1000)`: a function "
            "does not tell the number of members."
        )
    if isinstance(ids, int | np.integer):
        raise TypeError(f"`{caller()}` needs the ids of members as `ids`, got {ids}.\nWrite `ids=range({ids})`.")
    values = np.asarray(ids if isinstance(ids, np.ndarray) else check_sequence(ids, "ids", of="integers"))
    return np.asarray(_keys.member_ids(values if len(values) else values.astype(int)))


def is_maker(start: Any) -> bool:
    """Whether an argument is a function that builds an ensemble, or a Module that is called as one."""
    return callable(start) and not isinstance(start, _WITH_IDS)


def begin(make: Callable[[np.ndarray], Any], ids: np.ndarray) -> tuple[Ensemble[Any], Any]:
    """Calls the function for these ids. Returns the ensemble, and its state or `None`."""
    made = make(ids)
    ensemble, state = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(ensemble, Ensemble):
        raise TypeError(
            f"`{caller()}` needs a function that returns an `Ensemble`, or one and its state; got {kind_text(made)}.\n"
            "For example `lambda ids: ee.build(make, ids=ids, key=key)`."
        )
    if not np.array_equal(np.asarray(ensemble.ids), ids):
        raise ValueError(
            f"`{caller()}` needs a function that returns the members with the requested ids.\n"
            f"  requested {ids[:8].tolist()}, got {np.asarray(ensemble.ids)[:8].tolist()}\n"
            "Pass them on: `lambda ids: ee.build(make, ids=ids, key=key)`."
        )
    return ensemble, state


def shapes_of_start(start: Any, ids: np.ndarray, state: Any) -> Any:
    """The shapes of one member to train, or of it and its state; a function is called for the first two ids."""
    if is_maker(start):
        start, made = begin(start, ids[:2])
        state = state if made is None else made
    if isinstance(start, TrainState | Run):
        found = start.train_state if isinstance(start, Run) else start
        start, state = found.ensemble, found.model_state
    return resize(start if state is None else (start, state), 1)
