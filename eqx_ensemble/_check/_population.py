from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def same_hyper(old: Any, new: Any, *, name: str) -> None:
    """A member's new hyper-parameters have the structure, the shapes and the kinds of its old ones."""
    shapes = lambda tree: [jnp.shape(x) for x in jax.tree.leaves(tree)]
    if jax.tree.structure(old) != jax.tree.structure(new) or shapes(old) != shapes(new):
        raise TypeError(
            f"`{name}` needs a function that returns hyper-parameters like those it is given: expected "
            f"{jax.tree.structure(old)} of shapes {shapes(old)}, got {jax.tree.structure(new)} of {shapes(new)}."
        )
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(old)[0], jax.tree.leaves(new), strict=True):
        if not jnp.issubdtype(x.dtype, jnp.inexact) and np.asarray(y).dtype.kind == "f":
            raise TypeError(
                f"`{name}` needs whole numbers where there were whole numbers; at `{jax.tree_util.keystr(path)}`: "
                f"got {y!r} for {x.dtype}.\nRound it in the function that changes it, or make it a float in `hyper`."
            )
