import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from .. import _axes
from .._caller import caller
from .._check import MemberMismatchError, array_leaves, is_key, is_member_array, is_traced, kind_text
from .._compiled import filter_jit
from .._jaxpr import output_sources, unused_inputs
from .._leaf_text import leaf_text
from .._pytree import PyTree
from ..distributed import to_host
from ..plan import Vmap
from .compiled._optimiser import Optimiser, init_member, update_alone

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


TABLE_COLUMNS = ("member", "loss", "validation", "best_step", "status", "stopped_at")
"""The columns of a run's table in addition to those of its hyper-parameters."""


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


# Hyper-parameters that an optimiser's `init` stores in its state, as `optax.inject_hyperparams` does.
#
# `update` reads them there, so a new value of `hyper` would be reported and never used. `hyper` is replaced in many
# places (populations, revivals, `equinox.tree_at`), most of which do not have the optimiser. A state therefore holds
# the values that its optimiser state was made with, and whoever trains it compares them with `hyper` first.


def hyper_arrays(hyper: PyTree, num_members: int) -> PyTree:
    """Converts hyper-parameters, also lists of numbers, to JAX arrays `(members, ...)`, and checks them."""
    keyed, treedef = jax.tree_util.tree_flatten_with_path(
        _axes.map_each(lambda value: value, hyper), is_leaf=lambda x: isinstance(x, list)
    )
    path_of = lambda path: f"hyper{jax.tree_util.keystr(path)}"
    arrays = [_axes.as_array(values, path=path_of(path)) for path, values in keyed]
    hyper = jax.tree.unflatten(treedef, arrays)
    check_hyper(hyper, num_members)
    return hyper


def change_hyper(
    hyper: PyTree, fn: Callable[[PyTree, Key[Array, ""]], PyTree], members: np.ndarray, keys: Key[Array, " chosen"]
) -> PyTree:
    """Replaces the hyper-parameters of the chosen members by `fn(hyper, key)` of their own."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.array, to_host(hyper)))
    for member, key in zip(members.tolist(), keys, strict=True):
        own = jax.tree.unflatten(treedef, [jnp.asarray(x[member]) for x in leaves])
        new = fn(own, key)
        check_same_hyper(own, new)
        for x, y in zip(leaves, jax.tree.leaves(new), strict=True):
            x[member] = y
    return jax.tree.unflatten(treedef, [jnp.asarray(x) for x in leaves])


S = TypeVar("S")


def hyper_of_init(optimiser: Optimiser, params: PyTree, hyper: PyTree, ids: Int[Array, " members"]) -> tuple[bool, ...]:
    """Whether the initial optimiser state depends on each hyper-parameter."""
    sources = _sources(optimiser, params, hyper, ids)
    return tuple(any(source >> i & 1 for source in sources) for i in range(len(jax.tree.leaves(hyper))))


def filter_hyper(hyper: PyTree, is_used: tuple[bool, ...]) -> PyTree:
    """The hyper-parameters that are used, `None` for the others, or for all if none is."""
    leaves, treedef = jax.tree.flatten(hyper)
    kept = [x if used else None for x, used in zip(leaves, is_used, strict=True)]
    return jax.tree.unflatten(treedef, kept) if any(is_used) else None


def follow_hyper(state: S, optimiser: Optimiser) -> S:
    """A training state whose optimiser state is made with the current hyper-parameters.

    Leaves of the optimiser state that still have the value that `init` gave them are computed again. Others have
    changed in training (accumulators, scheduled values): they are kept, as when a member trains alone and its optimiser
    is exchanged, and it is an error if a hyper-parameter that has changed is used nowhere else.
    """
    moving, fixed, ids = state.moving, state.fixed, state.ids  # pyright: ignore[reportAttributeAccessIssue]
    if fixed.opt_hyper is None:
        return state
    is_none = lambda x: x is None
    check_hyper_structure(fixed.opt_hyper, fixed.hyper)
    now = jax.tree.map(lambda old, new: None if old is None else new, fixed.opt_hyper, fixed.hyper, is_leaf=is_none)
    pairs = list(zip(jax.tree.leaves(fixed.opt_hyper), jax.tree.leaves(now), strict=True))
    if all(old is new for old, new in pairs):  # as in every step of a loop, which then waits for nothing
        return state
    check_state_arrays(state)
    followed = dataclasses.replace(fixed, opt_hyper=now)
    concrete = not any(map(is_traced, jax.tree.leaves((moving, fixed))))
    if concrete and all(np.array_equal(to_host(old), to_host(new)) for old, new in pairs):
        return dataclasses.replace(state, fixed=followed)  # pyright: ignore[reportArgumentType]
    before = jax.tree.map(lambda old, new: new if old is None else old, fixed.opt_hyper, fixed.hyper, is_leaf=is_none)
    opt_state, kept = _derive_again(optimiser, moving.params, moving.opt_state, (before, fixed.hyper), ids)
    if concrete and any(x.any() for x in to_host(jax.tree.leaves(kept))):
        sources = _sources(optimiser, moving.params, fixed.hyper, ids)
        unused = _unused_in_update(optimiser, moving, fixed.hyper, ids)
        check_followed(before, fixed.hyper, to_host(kept), sources, unused, ids=to_host(ids))
    moving = dataclasses.replace(moving, opt_state=opt_state)
    return dataclasses.replace(state, moving=moving, fixed=followed)  # pyright: ignore[reportArgumentType]


@filter_jit
def _derive_again(
    optimiser: Optimiser, params: PyTree, opt_state: PyTree, hyper: tuple[PyTree, PyTree], ids: Int[Array, " members"]
) -> tuple[PyTree, PyTree]:
    """The optimiser states for the second of two `hyper`; and the leaves that would differ, but have changed since."""
    sources = _sources(optimiser, params, hyper[1], ids)

    def one(part: tuple) -> tuple[list[Any], list[Any]]:
        params, leaves, hyper, member_id = part
        before, after = (jax.tree.leaves(init_member(optimiser, params, own, member_id)) for own in hyper)
        derived = [
            _replace_initial(*values) if source else (values[0], jnp.zeros((), bool))
            for source, *values in zip(sources, leaves, before, after, strict=True)
        ]
        new, kept = zip(*derived, strict=True)
        return list(new), list(kept)

    leaves, treedef = jax.tree.flatten(opt_state)
    new, kept = _axes.over_leading_axis(Vmap().run, one, (params, leaves, hyper, ids))
    return jax.tree.unflatten(treedef, new), jax.tree.unflatten(treedef, kept)


def _replace_initial(x: Array, before: Array, after: Array) -> tuple[Array, Bool[Array, ""]]:
    """`after`, if `x` is still the initial value `before`; and whether it is not, although the two differ."""
    moves, is_initial = _differ(before, after), ~_differ(x, before)
    return jnp.where(moves & is_initial, after, x), moves & ~is_initial


def _differ(x: Array, y: Array) -> Bool[Array, ""]:
    x, y = (jax.random.key_data(value) if is_key(value) else value for value in (x, y))
    return jnp.any((x != y) & ((x == x) | (y == y)))


def _one_member(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


def _sources(optimiser: Optimiser, params: PyTree, hyper: PyTree, ids: Int[Array, " members"]) -> list[int]:
    """The hyper-parameters on which each leaf of an initial optimiser state depends, as bits."""
    count = len(jax.tree.leaves(hyper))
    if count == 0:
        return []
    init = lambda hyper, params, member_id: jax.tree.leaves(init_member(optimiser, params, hyper, member_id))
    closed, _, _ = eqx.filter_make_jaxpr(init)(*_one_member((hyper, params, ids)))
    return [source & ((1 << count) - 1) for source in output_sources(closed.jaxpr)[0]]


def _unused_in_update(optimiser: Optimiser, moving: Any, hyper: PyTree, ids: Int[Array, " members"]) -> list[bool]:
    """Whether the optimiser's `update` does not use each hyper-parameter."""
    call = lambda hyper, params, opt_state, value: update_alone(optimiser, params, opt_state, value, hyper)
    value = jax.ShapeDtypeStruct((), jnp.result_type(float))
    one, params, opt_state = _one_member((hyper, moving.params, moving.opt_state))
    closed, _, _ = eqx.filter_make_jaxpr(call)(one, params, opt_state, value)
    return unused_inputs(closed.jaxpr)[: len(jax.tree.leaves(hyper))]
