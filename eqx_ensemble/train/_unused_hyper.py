import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._axes import ProgramKey, program_key
from .._check import is_typed_key
from .._jaxpr import unused_inputs
from .._pytree import PyTree
from .._warnings import ignore_warnings, warn
from ..distributed import to_host
from ._check_member import hyper_column_text
from ._state import MemberConstants, TrainState
from .compiled._loss import Loss
from .compiled._optimiser import Optimiser
from .data._data import member_shapes
from .resume._identity import optimiser_step


def warn_of_unused_hyper(state: TrainState, optimiser: Optimiser, losses: list[tuple[Loss, PyTree]]) -> None:
    """Warns of hyper-parameters without effect: nothing uses them, and no member was built with them.

    `losses` are those that take hyper-parameters, each with the shapes of one member's batch.
    """
    one = lambda tree: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if eqx.is_array(x) else x, tree
    )
    moving, fixed, ids = one((state.moving, state.fixed, state.ids))
    value = jax.ShapeDtypeStruct((), jnp.result_type(float))
    unused = _find_unused(optimiser_step, optimiser, fixed.hyper, moving, ids, value)
    for loss, batch in losses:
        if any(unused):
            own = _find_unused(_loss_of, loss, fixed.hyper, moving, fixed, member_shapes(state.shared), batch)
            unused = [a and b for a, b in zip(unused, own, strict=True)]
    keyed = zip(jax.tree_util.tree_leaves_with_path(state.hyper), unused, strict=True)
    names = [hyper_column_text(path) for (path, x), is_unused in keyed if is_unused and not _is_in_members(x, state)]
    if names:
        words = ", ".join(f"`{name}`" for name in names)
        warn(f"`fit` got {words} in `hyper`, but neither the optimiser nor the loss uses it: is the name misspelt?")


def _is_in_members(values: Any, state: TrainState) -> bool:
    """Whether the members hold these values, as after `build(zip=...)`."""
    same = [
        x
        for x in jax.tree.leaves((state.params, state.fixed.frozen))
        if eqx.is_array(x) and not is_typed_key(x) and (x.shape, x.dtype) == (values.shape, values.dtype)
    ]
    return any(np.array_equal(to_host(values), to_host(x)) for x in same)


def _find_unused(call: Callable[..., Any], fn: Any, *args: PyTree) -> list[bool]:
    leaves, treedef = jax.tree.flatten(args)
    return _unused_leaves(call, fn, tuple(leaves), treedef, program_key((fn, args)))


@ft.lru_cache(maxsize=64)
def _unused_leaves(call: Callable[..., Any], fn: Any, leaves: tuple, treedef: Any, _: ProgramKey) -> list[bool]:
    args = jax.tree.unflatten(treedef, leaves)
    try:
        with ignore_warnings():  # they are repeated when it is traced for training
            closed, _, _ = eqx.filter_make_jaxpr(ft.partial(call, fn))(*args)
    except Exception:  # raised again, with a note, when it is traced for training
        return [False] * len(jax.tree.leaves(args[0]))
    return unused_inputs(closed.jaxpr)[: len(jax.tree.leaves(args[0]))]


def _loss_of(loss: Loss, hyper: PyTree, moving: Any, fixed: MemberConstants, shared: PyTree, batch: PyTree) -> Any:
    model = eqx.combine(moving.params, fixed.frozen, shared)
    arguments = (model, moving.model_state, batch, fixed.key) if loss.stateful else (model, batch, fixed.key)
    return loss.fn(*arguments, hyper=hyper)
