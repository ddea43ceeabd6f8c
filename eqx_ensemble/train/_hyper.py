import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from .. import _axes
from .._check import is_key, is_traced
from .._compiled import filter_jit
from .._jaxpr import output_sources, unused_inputs
from .._pytree import PyTree
from ..distributed import to_host
from ..plan import Vmap
from ._check_member import check_followed, check_hyper, check_hyper_structure, check_same_hyper, check_state_arrays
from ._together import bind
from .compiled._optimiser import Optimiser, init_member, update_alone

# Hyper-parameters that an optimiser's `init` stores in its state, as `optax.inject_hyperparams` does.
#
# `update` reads them there, so a new value of `hyper` would be reported and never used. `hyper` is replaced in many
# places (populations, revivals, `equinox.tree_at`), most of which do not have the optimiser. A state therefore holds
# the values that its optimiser state was made with, and whoever trains it compares them with `hyper` first.


def hyper_arrays(hyper: PyTree, num_members: int) -> PyTree:
    """Converts hyper-parameters, also lists of numbers, to JAX arrays `(members, ...)`, and checks them."""
    is_numbers = lambda x: isinstance(x, list) and not any(isinstance(item, eqx.Module) for item in x)
    keyed, treedef = jax.tree_util.tree_flatten_with_path(
        _axes.map_each(lambda value: value, hyper), is_leaf=is_numbers
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
    optimiser = bind(optimiser, fixed.tied)
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
