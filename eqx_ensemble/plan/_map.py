import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .. import _axes, _check
from .._axes import check_has_axis
from .._compiled import CompiledCall
from .._foreign import as_hashable_leaf
from .._pytree import PyTree
from .._typing import MappedFunction, Out, P
from ..sharding._engine import as_layout
from ._auto import AnyPlan, as_plan, check_equal_constants, check_no_parts
from ._plans import AbstractPlan, sharded_plan


def map_members(
    fn: Callable[P, Out], *, plan: AnyPlan = None, mesh: Mesh | None = None, out_axis: int = 0
) -> MappedFunction[P, Out]:
    """Transforms a function of one member into a function of all members.

    Arguments that are an [`eqx_ensemble.Ensemble`][], an [`eqx_ensemble.Each`][] or an `equinox.nn.State`, at any
    depth of the arguments' trees, are mapped over: `fn` receives one member's model, value or state. All others are
    shared and passed unchanged. Array outputs gain a `members` axis; outputs that are not arrays are returned once,
    and must be equal for all members.

    Outside `jax.jit`, `Chunked` and `Sequential` run a compiled loop. It is compiled once for a function, and again if
    its code, or a variable that it reads from outside, has been replaced since, also in functions that it calls.
    `equinox.filter_jit` around the result compiles under any plan.

    **Arguments:**

    - `fn`: any function of one member; it may take and return any PyTree.
    - `plan`: how the members are executed: [`eqx_ensemble.plan.Vmap`][] (the default), `Chunked(size)` or
        `Sequential()`, `Unrolled()`; or `"auto"`, which analyses `fn`. It affects only time and memory.
    - `mesh`: the devices to shard members over, from [`eqx_ensemble.make_mesh`][]; each device runs its own members
        under the plan.
    - `out_axis`: the position of the `members` axis in every array output.

    **Returns:** the function of all members.

    **Raises:** (when called) `MemberMismatchError` if arguments disagree on the number of members, and if outputs that
    are not arrays differ between members; `TypeError` if no argument has members, or for a group; `ValueError` if an
    output has no axis `out_axis`.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    x, y = jnp.ones((10, 3)), jnp.zeros((10, 1))

    @ee.map_members
    def mse(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    mse(ensemble, x, y).shape  # (4,)
    ```
    """
    _check.check_function(fn, "fn", example="lambda model, x: model(x)")
    fn = as_hashable_leaf(fn)
    out_axis = _check.check_axis(out_axis, "out_axis")
    call = _Mapping(sharded_plan(as_plan(plan), as_layout(mesh)), out_axis)

    @ft.wraps(fn)
    def run_all(*args: Any, **kwargs: Any) -> PyTree:
        # `jax.lax.map` outside `jax.jit` would compile in every call.
        if call.plan.compiles and not _check.is_inside_transformation():
            try:
                return _compiled_run((call, fn, *args, kwargs))[1]
            except (TypeError, IndexError):
                pass  # in a program, shared leaves have only a shape and a dtype; `fn` may need more, or be at fault
        return _run(call, fn, args, kwargs)

    return run_all


def call_members(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> PyTree:
    """`map_members(fn)(*args, **kwargs)`."""
    return _run(_Mapping(as_plan(None), 0), fn, args, kwargs)


class _Mapping(eqx.Module):
    plan: AbstractPlan
    out_axis: int = eqx.field(static=True)


def _run(call: _Mapping, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> PyTree:
    check_no_parts((args, kwargs))
    parts, view, _ = _axes.split_members((args, kwargs))
    constants = []

    def one(part: PyTree) -> PyTree:
        own_args, own_kwargs = view(part)
        out = fn(*own_args, **own_kwargs)
        constants.append(eqx.filter(out, eqx.is_array, inverse=True))
        return out

    out = _axes.over_leading_axis(call.plan.run, one, parts)
    check_equal_constants(constants)
    if call.out_axis == 0:
        return out
    check_has_axis(out, call.out_axis, "out_axis")
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, call.out_axis) if _axes.is_array(x) else x, out)


def _run_compiled(read: tuple[Any, ...], _: None) -> tuple[None, PyTree]:
    call, fn, *args, kwargs = read
    return None, _run(call, fn, tuple(args), kwargs)


_compiled_run = CompiledCall(_run_compiled, most=64)
