"""Checks of the parts of a training state, which users replace with `equinox.tree_at`."""

from typing import Any

import jax
import jax.numpy as jnp

from .._check import is_member_array
from .._leaf_text import leaf_text


def check_state_arrays(state: Any, *, name: str) -> None:
    """Raises unless the parts of a training state are arrays, with one value per member where they should be."""
    moving, fixed, ids = state.moving, state.fixed, state.ids
    if not _is_integers(ids) or ids.ndim != 1:
        raise _wrong("ids", ids, "integers `(members,)`", name)
    count = ids.shape[0]
    if not _is_integers(state.step) or state.step.ndim != 0:
        raise _wrong("step", state.step, "an integer array of shape `()`", name)
    for part, value in (("status", moving.status), ("stopped_at", moving.stopped_at), ("fault", moving.fault)):
        if not _is_integers(value) or value.shape != (count,):
            raise _wrong(part, value, f"integers of shape `({count},)`", name)
    arrays_only = {"params": moving.params, "hyper": fixed.hyper, "key": fixed.key}
    each = arrays_only | {"opt_state": moving.opt_state, "model_state": moving.model_state, "frozen": fixed.frozen}
    for part, tree in each.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            is_array = is_member_array(leaf)
            if leaf.shape[:1] != (count,) if is_array else part in arrays_only:
                where = f"{part}{jax.tree_util.keystr(path)}"
                raise _wrong(where, leaf, f"an array with one value per member, of shape `({count}, ...)`", name)


def check_hyper_structure(before: Any, now: Any, *, name: str) -> None:
    """Raises unless `hyper` has the structure of those that the optimiser's state was made with, `None` for others."""
    expected, got = (jax.tree.structure(hyper, is_leaf=lambda x: x is None) for hyper in (before, now))
    if expected != got:
        raise TypeError(
            f"`{name}` needs `hyper` of the training state to keep its structure; expected {expected}, got {got}.\n"
            "For other hyper-parameters begin anew, with `train.init`."
        )


def _is_integers(value: Any) -> bool:
    return is_member_array(value) and jnp.issubdtype(value.dtype, jnp.integer)


def _wrong(where: str, value: Any, wanted: str, name: str) -> TypeError | ValueError:
    kind = ValueError if is_member_array(value) else TypeError
    return kind(
        f"`{name}` needs `{where}` of the training state to be {wanted}; got {leaf_text(value)}.\n"
        "Replace a part by an array of its shape: `eqx.tree_at(lambda s: s.hyper['lr'], state, jnp.asarray(new))`."
    )
