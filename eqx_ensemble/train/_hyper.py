from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from .. import _axes
from .._pytree import PyTree
from ..distributed import to_host
from ._check_member import check_hyper, check_same_hyper


def hyper_arrays(hyper: PyTree, num_members: int, *, name: str) -> PyTree:
    """Converts hyper-parameters, also lists of numbers, to JAX arrays `(members, ...)`, and checks them."""
    keyed, treedef = jax.tree_util.tree_flatten_with_path(
        _axes.map_each(lambda value: value, hyper), is_leaf=lambda x: isinstance(x, list)
    )
    path_of = lambda path: f"hyper{jax.tree_util.keystr(path)}"
    arrays = [_axes.as_array(values, path=path_of(path), name=name) for path, values in keyed]
    hyper = jax.tree.unflatten(treedef, arrays)
    check_hyper(hyper, num_members, name=name)
    return hyper


def change_hyper(
    hyper: PyTree,
    fn: Callable[[PyTree, Key[Array, ""]], PyTree],
    members: np.ndarray,
    keys: Key[Array, " chosen"],
    *,
    name: str,
) -> PyTree:
    """Replaces the hyper-parameters of the chosen members by `fn(hyper, key)` of their own."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.array, to_host(hyper)))
    for member, key in zip(members.tolist(), keys, strict=True):
        own = jax.tree.unflatten(treedef, [jnp.asarray(x[member]) for x in leaves])
        new = fn(own, key)
        check_same_hyper(own, new, name=name)
        for x, y in zip(leaves, jax.tree.leaves(new), strict=True):
            x[member] = y
    return jax.tree.unflatten(treedef, [jnp.asarray(x) for x in leaves])
