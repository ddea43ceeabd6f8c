from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._axes import is_array
from .._check import is_key
from .._ensemble import Ensemble
from .._files._like import evaluate_make
from ._member import MemberMaker


class Weights(NamedTuple):
    """The arrays of an ensemble, by path. The rest, including functions, is made again by the `MemberMaker`."""

    stacked: dict[str, Any]
    shared: dict[str, Any]
    state: dict[str, Any]
    ids: np.ndarray


def take_weights(ensemble: Ensemble, state: Any) -> Weights:
    """The part of an ensemble to pickle: functions such as `jax.nn.relu` cannot be pickled."""
    return Weights(_arrays(ensemble.arrays), _arrays(ensemble.shared), _arrays(state), np.asarray(ensemble.ids))


def restore_ensemble(maker: MemberMaker, weights: Weights) -> tuple[Ensemble, Any]:
    """The ensemble and its state, from the shapes of a member and the arrays."""
    made = evaluate_make(maker)
    member, state = made if isinstance(made, tuple) else (made, None)
    keyed, treedef = jtu.tree_flatten_with_path(member)
    stacked, shared = [], []
    for path, leaf in keyed:
        text = jtu.keystr(path)
        stacked.append(_array(weights.stacked.get(text)))
        shared.append(_array(weights.shared.get(text)) if _is_array_like(leaf) else leaf)
    if state is not None:
        keyed, structure = jtu.tree_flatten_with_path(state)
        state = jtu.tree_unflatten(structure, [_array(weights.state[jtu.keystr(path)]) for path, _ in keyed])
    own, common = (jtu.tree_unflatten(treedef, leaves) for leaves in (stacked, shared))
    return Ensemble(own, common, jnp.asarray(weights.ids)), state


def _arrays(tree: Any) -> dict[str, Any]:
    leaves = jtu.tree_leaves_with_path(eqx.filter(tree, is_array))
    return {jtu.keystr(path): _plain(leaf) for path, leaf in leaves}


def _plain(leaf: Any) -> Any:
    """A NumPy array; for keys, their data with the name of the generator."""
    return (str(jax.random.key_impl(leaf)), np.asarray(jax.random.key_data(leaf))) if is_key(leaf) else np.asarray(leaf)


def _array(value: Any) -> Any:
    if value is None:
        return None
    return jax.random.wrap_key_data(value[1], impl=value[0]) if isinstance(value, tuple) else jnp.asarray(value)


def _is_array_like(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
