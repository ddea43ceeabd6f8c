import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._caller import caller
from .._check import MemberMismatchError, array_leaves, is_member_array, kind_text
from .._leaf_text import leaf_text
from ..sweep._engine import TABLE_COLUMNS

# Checks of the parts of a training state, which users replace with `equinox.tree_at`.


def check_state_arrays(state: Any) -> None:
    """Raises unless the parts of a training state are arrays, with one value per member where they should be."""
    moving, fixed, ids = state.moving, state.fixed, state.ids
    if not _is_integers(ids) or ids.ndim != 1:
        raise _wrong("ids", ids, "integers `(members,)`")
    count = ids.shape[0]
    if not _is_integers(state.step) or state.step.ndim != 0:
        raise _wrong("step", state.step, "an integer array of shape `()`")
    for part, value in (("status", moving.status), ("stopped_at", moving.stopped_at), ("fault", moving.fault)):
        if not _is_integers(value) or value.shape != (count,):
            raise _wrong(part, value, f"integers of shape `({count},)`")
    arrays_only = {"params": moving.params, "hyper": fixed.hyper, "key": fixed.key}
    each = arrays_only | {"opt_state": moving.opt_state, "model_state": moving.model_state, "frozen": fixed.frozen}
    for part, tree in each.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            is_array = is_member_array(leaf)
            if leaf.shape[:1] != (count,) if is_array else part in arrays_only:
                where = f"{part}{jax.tree_util.keystr(path)}"
                raise _wrong(where, leaf, f"an array with one value per member, of shape `({count}, ...)`")


def check_hyper_structure(before: Any, now: Any) -> None:
    """Raises unless `hyper` has the structure of those that the optimiser's state was made with, `None` for others."""
    expected, got = (jax.tree.structure(hyper, is_leaf=lambda x: x is None) for hyper in (before, now))
    if expected != got:
        raise TypeError(
            f"`{caller()}` needs `hyper` of the training state to keep its structure; expected {expected}, got {got}.\n"
            "For other hyper-parameters begin anew, with `train.init`."
        )


def _is_integers(value: Any) -> bool:
    return is_member_array(value) and jnp.issubdtype(value.dtype, jnp.integer)


def _wrong(where: str, value: Any, wanted: str) -> TypeError | ValueError:
    kind = ValueError if is_member_array(value) else TypeError
    return kind(
        f"`{caller()}` needs `{where}` of the training state to be {wanted}; got {leaf_text(value)}.\n"
        "Replace a part by an array of its shape: `eqx.tree_at(lambda s: s.hyper['lr'], state, jnp.asarray(new))`."
    )


def hyper_column_text(path: tuple) -> str:
    """The column of a hyper-parameter in a run's table."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "hyper"


def check_hyper(values: Any, num_members: int) -> None:
    """Raises unless every hyper-parameter has one value per member and a unique column in the table."""
    leaves = array_leaves(values)
    if not leaves:
        raise TypeError(f"`{caller()}` needs `hyper` to hold arrays with one value per member, got {values!r}.")
    for path, x in leaves:
        if x.ndim == 0 or x.shape[0] != num_members:
            hint = f"\nOne value for all members? Pass `jnp.full({num_members}, value)`." if x.ndim == 0 else ""
            raise MemberMismatchError(
                f"`{caller()}` needs one value per member in `hyper`; at `{path}`: expected ({num_members}, ...), "
                f"got {x.shape}.{hint}"
            )
    columns = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(values):
        column = hyper_column_text(path)
        if column in TABLE_COLUMNS or column in columns:
            other = f"`hyper{jax.tree_util.keystr(columns[column])}`" if column in columns else "the run's results"
            raise ValueError(
                f"`{caller()}` needs names in `hyper` that are unique columns in `run.table()`; "
                f"`hyper{jax.tree_util.keystr(path)}` clashes with the column `{column}` of {other}.\n"
                "Name it differently."
            )
        columns[column] = path


def check_same_hyper(old: Any, new: Any) -> None:
    """Raises unless new hyper-parameters have the structure, the shapes and the kinds of the old ones."""
    shapes = lambda tree: [jnp.shape(x) for x in jax.tree.leaves(tree)]
    if jax.tree.structure(old) != jax.tree.structure(new) or shapes(old) != shapes(new):
        raise TypeError(
            f"`{caller()}` needs a function that returns hyper-parameters like those it is given: expected "
            f"{jax.tree.structure(old)} of shapes {shapes(old)}, got {jax.tree.structure(new)} of {shapes(new)}."
        )
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(old)[0], jax.tree.leaves(new), strict=True):
        if not jnp.issubdtype(x.dtype, jnp.inexact) and np.asarray(y).dtype.kind == "f":
            raise TypeError(
                f"`{caller()}` needs integers for hyper-parameters that are integers; at "
                f"`{jax.tree_util.keystr(path)}`: got {y!r} for {x.dtype}.\nRound it in the function that changes it, "
                "or make it a float in `hyper`."
            )


def check_followed(before: Any, now: Any, kept: Any, sources: list[int], unused: list[bool], *, ids: Any) -> None:
    """Raises if a hyper-parameter has changed that reaches the optimiser only by a state that cannot be made again."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(now)]
    values = zip(jax.tree.leaves(before), jax.tree.leaves(now), strict=True)
    changed = [np.any(np.asarray(old != new).reshape(len(ids), -1), axis=1) for old, new in values]
    for (path, stays), source in zip(jax.tree_util.tree_leaves_with_path(kept), sources, strict=True):
        for i, (own, is_unused) in enumerate(zip(changed, unused, strict=True)):
            lost = stays & own
            if source >> i & 1 and is_unused and lost.any():
                raise ValueError(
                    f"`{caller()}` cannot use the new values of `hyper{jax.tree_util.keystr(paths[i])}` of member(s) "
                    f"{', '.join(map(str, ids[lost].tolist()))}: the optimiser reads it only to initialise its state, "
                    f"and `{jax.tree_util.keystr(path)}` there has changed since.\n"
                    "Keep the old values, or begin anew with `train.init`."
                )


def check_trainable(value: Any) -> None:
    """Raises unless `trainable` is a function of a leaf, or a tree of booleans and functions."""
    for leaf in [None] if value is None else jax.tree.leaves(value):
        if not isinstance(leaf, bool | np.bool_) and not callable(leaf):
            raise TypeError(
                f"`{caller()}` needs `trainable` to be a function of a leaf, or a tree of booleans, got "
                f"{kind_text(leaf)}.\n"
                "For example `lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim == 2`."
            )


@contextlib.contextmanager
def explain_trainable() -> Iterator[None]:
    """Adds a note to an error in `trainable`: how it is called."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"`{caller()}` calls `trainable` with each leaf of one member, or takes a tree of booleans like one "
            "member, as `equinox.partition` does.\nTo train a part of a model: "
            "`eqx.tree_at(lambda m: m.part, jax.tree.map(lambda _: False, ensemble[0]), replace=True)`."
        )
        raise


def check_same_choice(first: list[bool], last: list[bool], leaves: Any) -> None:
    """Raises unless the same leaves are trained in all members."""
    if first == last:
        return
    keyed = jax.tree_util.tree_leaves_with_path(leaves)
    where = next(path for (path, _), a, b in zip(keyed, first, last, strict=True) if a != b)
    raise ValueError(
        f"`{caller()}` trains the same leaves in all members; `trainable` differs between the first and the last "
        f"member at `{jax.tree_util.keystr(where)}`.\nDecide by type, shape and dtype, not by values."
    )


def check_trained(params: Any) -> None:
    """Raises unless at least one array is trained, and all of them are floating-point."""
    leaves = array_leaves(params)
    if not leaves:
        raise ValueError(
            f"`{caller()}` found nothing to train: no stacked floating-point array is selected by `trainable`.\n"
            "Shared leaves are constants in training."
        )
    for path, x in leaves:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"`{caller()}` can train floating-point arrays only; `trainable` selects `{path}` of dtype {x.dtype}."
            )
