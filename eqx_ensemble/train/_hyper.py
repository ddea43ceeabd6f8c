from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from .. import _check
from ..distributed import fetch


def changed_hyper(
    hyper: PyTree,
    fn: Callable[[PyTree, Key[Array, ""]], PyTree],
    members: np.ndarray,
    keys: Key[Array, " chosen"],
    *,
    name: str,
) -> PyTree:
    """Hyper-parameters `(members, ...)`, those of the chosen members being `fn(hyper, key)` of what they were."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.array, fetch(hyper)))
    for member, key in zip(members.tolist(), keys, strict=True):
        own = jax.tree.unflatten(treedef, [jnp.asarray(x[member]) for x in leaves])
        new = fn(own, key)
        _check.same_hyper(own, new, name=name)
        for x, y in zip(leaves, jax.tree.leaves(new), strict=True):
            x[member] = y
    return jax.tree.unflatten(treedef, [jnp.asarray(x) for x in leaves])
