import collections
import contextlib
import functools as ft
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .. import _axes, _check
from .._axes import check_has_axis, check_no_batch
from .._compiled import CompiledCall
from .._foreign import as_hashable_leaf
from .._ids import close_all, has_ids
from .._pytree import PyTree
from .._sharding import layout_for
from .._typing import MappedFunction, Out, P
from ._argument import AnyPlan, as_plan, check_equal_constants
from ._plans import AbstractPlan, sharded_plan

if TYPE_CHECKING:
    from .._ensemble import Ensemble

M = TypeVar("M", bound=eqx.Module)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@overload
def map_members(
    fn: Callable[P, M], *, plan: AnyPlan = None, mesh: Mesh | None = None, out_axis: int = 0
) -> MappedFunction[P, "Ensemble[M]"]: ...
@overload
def map_members(
    fn: Callable[P, tuple[M, *Ts]], *, plan: AnyPlan = None, mesh: Mesh | None = None, out_axis: int = 0
) -> MappedFunction[P, "tuple[Ensemble[M], *Ts]"]: ...
@overload
def map_members(
    fn: Callable[P, tuple[T, M]], *, plan: AnyPlan = None, mesh: Mesh | None = None, out_axis: int = 0
) -> MappedFunction[P, "tuple[T, Ensemble[M]]"]: ...
@overload
def map_members(
    fn: Callable[P, Out], *, plan: AnyPlan = None, mesh: Mesh | None = None, out_axis: int = 0
) -> MappedFunction[P, Out]: ...
def map_members(
    fn: Callable[P, Any], *, plan: AnyPlan = None, mesh: Mesh | None = None, out_axis: int = 0
) -> MappedFunction[P, Any]:
    """Transforms a function of one member into a function of all members.

    Arguments that are an [`eqx_ensemble.Ensemble`][], an [`eqx_ensemble.Each`][] or an `equinox.nn.State`, at any
    depth, are mapped over: `fn` receives one member's model, value or state. All others are shared and passed
    unchanged.

    What is returned has a value per member, and can be passed to a mapped function again:

    - a Module, such as a model or its gradient, becomes an `Ensemble` with the ids of the first one among the arguments
        (an `Each` if there is none). Shared arrays that `fn` returns unchanged stay shared;
    - another custom node, such as an optimiser's state, and random keys become an `Each`;
    - a tuple, list or dict with the structure and shapes of an argument's becomes what the argument was;
    - any other array gains a `members` axis. Mark it `Each` to pass it to a mapped function per member;
    - what is not an array is returned once, and must be equal for all members.

    Outside `jax.jit`, `Chunked` and `Sequential` compile `fn` once, and again if its code changes; `Vmap` needs
    `equinox.filter_jit` around the result.

    **Arguments:**

    - `fn`: any function of one member; it may take and return any PyTree.
    - `plan`: how the members are executed, by default [`eqx_ensemble.plan.Vmap`][].
    - `mesh`: the devices to shard members over, from [`eqx_ensemble.make_mesh`][]; each runs its own under the plan.
    - `out_axis`: the position of the `members` axis in every plain array that is returned.

    **Returns:** the function of all members.

    **Raises:** (when called) `MemberMismatchError` if arguments disagree on the number of members, and if outputs that
    are not arrays differ between members; `TypeError` if no argument has members; `ValueError` if an output has no axis
    `out_axis`.

    ```python
    def mse(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    x, y = jnp.ones((10, 3)), jnp.zeros((10, 1))
    ee.map_members(mse)(ensemble, x, y).shape  # (4,)

    optimiser = optax.sgd(1e-3, momentum=0.9)

    @ee.map_members
    def init(model):
        return optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    @ee.map_members
    def step(model, state, x, y):
        loss, gradient = eqx.filter_value_and_grad(mse)(model, x, y)
        update, state = optimiser.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, update), state, loss

    state = init(ensemble)
    for _ in range(3):
        ensemble, state, loss = step(ensemble, state, x, y)
    ```
    """
    return over_members(fn, plan=plan, mesh=mesh, out_axis=out_axis, marks=True)


def over_members(
    fn: Callable[P, Out], *, plan: AnyPlan = None, mesh: Mesh | None = None, out_axis: int = 0, marks: bool = False
) -> MappedFunction[P, Out]:
    """`map_members`; without `marks`, all that is returned is plain."""
    _check.check_function(fn, "fn", example="lambda model, x: model(x)")
    fn = as_hashable_leaf(fn)
    out_axis = _check.check_axis(out_axis, "out_axis")
    call = _Mapping(sharded_plan(as_plan(plan), layout_for(mesh)), out_axis, marks)

    # cloudpickle sends this by value: all that it does can be imported, and no import hook wraps a lambda.
    mapped: Any = ft.wraps(fn)(lambda *args, **kwargs: _run_outside(call, fn, args, kwargs))
    return mapped


def call_members(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> PyTree:
    """`fn` of every member; all that is returned is plain."""
    return _run(_Mapping(as_plan(None), 0, marks=False), fn, args, kwargs)


class _Mapping(eqx.Module):
    plan: AbstractPlan
    out_axis: int = eqx.field(static=True)
    marks: bool = eqx.field(static=True)


def _run_outside(call: _Mapping, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> PyTree:
    # `jax.lax.map` outside `jax.jit` would compile in every call.
    if call.plan.compiles and not _check.is_inside_transformation():
        # In a program, shared leaves have only a shape and a dtype; `fn` may need more, or be at fault.
        with contextlib.suppress(TypeError, IndexError):
            return close_all(_compiled_run((call, fn, *args, kwargs))[1])
    return _run(call, fn, args, kwargs)


def _run(call: _Mapping, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> PyTree:
    if call.marks:
        check_no_batch((args, kwargs))
    parts, view, num_members = _axes.split_members((args, kwargs))
    marking = _Marking((args, kwargs)) if call.marks else None
    constants = []

    def one(part: PyTree) -> PyTree:
        own_args, own_kwargs = view(part)
        out = fn(*own_args, **own_kwargs)
        constants.append(eqx.filter(out, eqx.is_array, inverse=True))
        return marking.of_member(out, part) if marking else out

    with _explain_shared(args, kwargs, num_members):
        out = _axes.over_leading_axis(call.plan.run, one, parts)
    check_equal_constants(constants)
    if marking is None:
        return out
    out = marking.of_all(out)
    if call.out_axis == 0:
        return out
    plain, rest = eqx.partition(out, eqx.is_array, is_leaf=_axes.is_per_member)
    check_has_axis(plain, call.out_axis, "out_axis")
    plain = jax.tree.map(lambda x: jnp.moveaxis(x, 0, call.out_axis), plain)
    return eqx.combine(plain, rest, is_leaf=_axes.is_per_member)


def _run_compiled(read: tuple[Any, ...], _: None) -> tuple[None, PyTree]:
    call, fn, *args, kwargs = read
    return None, _run(call, fn, tuple(args), kwargs)


_compiled_run = CompiledCall(_run_compiled, most=64)


@contextlib.contextmanager
def _explain_shared(args: tuple, kwargs: dict[str, Any], num_members: Any) -> Iterator[None]:
    """Adds to an error of a function of one member which shared arguments have an axis as long as there are members."""
    try:
        yield
    except Exception as error:
        shapes = {
            name: {leaf.shape[:1] if eqx.is_array(leaf) else () for leaf in jax.tree.leaves(value)}
            for name, value in ({f"args[{i}]": x for i, x in enumerate(args)} | kwargs).items()
            if not any(map(_axes.is_per_member, jax.tree.leaves(value, is_leaf=_axes.is_per_member)))
        }
        found = [f"`{name}`" for name, sizes in shapes.items() if sizes == {(num_members,)}]
        if found:
            error.add_note(
                f"Each member got the whole of {', '.join(found)}, with {num_members} values along the first axis. If "
                "there is one per member, mark it `Each(x)`; of a stacked Module, make an ensemble by `from_stacked`."
            )
        raise


class _Marking:
    """Marks what the function of one member returned to a call with these arguments.

    What it is going to be is decided for one member, inside the plan. A shared array in a returned model is recognised
    by identity: a function of one member gets the shared arrays themselves.
    """

    def __init__(self, arguments: PyTree) -> None:
        nodes = enumerate(jax.tree.leaves(arguments, is_leaf=_axes.is_per_member))
        self._given: dict[int, Any] = {i: x for i, x in nodes if has_ids(x) or isinstance(x, _axes.Each)}
        self._ensembles = {i: x for i, x in self._given.items() if has_ids(x)}
        self._outer: Any = None  # the structure of what is returned, above what gets a mark
        self._marks: list[Callable[[PyTree], Any]] = []

    def of_member(self, out: PyTree, part: dict[int, PyTree]) -> PyTree:
        """What was returned for one member, without the arrays of its models that all members share."""
        outlines = [(_outline(x.one(part[i])), x) for i, x in self._given.items()]
        like = lambda x: next((node for outline, node in outlines if outline and outline == _outline(x)), None)
        shared = {id(x): y for i, node in self._ensembles.items() for x, y in _shared_leaves(node, part[i])}
        is_node = lambda x: type(x) not in _CONTAINERS or like(x) is not None
        nodes, self._outer = jax.tree.flatten(out, is_leaf=is_node)
        own, self._marks = [], []
        for node in nodes:
            of = next(iter(self._ensembles.values()), None) if isinstance(node, eqx.Module) else like(node)
            if has_ids(of):
                rest = jax.tree.map(lambda x: shared.get(id(x), None if eqx.is_array(x) else x), node)
                node = jax.tree.map(lambda x: None if eqx.is_array(shared.get(id(x))) else x, node)
                self._marks.append(ft.partial(_as_ensemble, of, rest))
            else:
                is_plain = of is None and (isinstance(node, eqx.nn.State) or eqx.is_array(node))
                self._marks.append(_as_each if not is_plain or _check.is_key(node) else lambda x: x)
            own.append(node)
        return self._outer.unflatten(own)

    def of_all(self, out: PyTree) -> PyTree:
        """What was returned for all members, with its marks."""
        nodes = self._outer.flatten_up_to(out)
        return self._outer.unflatten([mark(node) for mark, node in zip(self._marks, nodes, strict=True)])


def _shared_leaves(ensemble: Any, part: PyTree) -> Iterator[tuple[Any, Any]]:
    """Leaves of the model of one member that keep their leaf in `shared`: arrays, and numbers that are Python floats
    in a member alone.
    """
    own, shared = (jax.tree.leaves(tree, is_leaf=lambda x: x is None) for tree in (part[0], ensemble.shared))
    for x, y in zip(own, shared, strict=True):
        if eqx.is_array(y) or (x is not None and y is not None):
            yield (y if x is None else x), y


def _as_ensemble(ensemble: Any, shared: PyTree, out: PyTree) -> PyTree:
    """Other models of the same members."""
    own = eqx.filter(out, eqx.is_array)
    return type(ensemble)(own, shared, ensemble.ids) if _has_arrays(own) else eqx.combine(out, shared)


def _as_each(out: PyTree) -> PyTree:
    return _axes.Each(out) if _has_arrays(out) else out


def _has_arrays(tree: PyTree) -> bool:
    return any(map(eqx.is_array, jax.tree.leaves(tree)))


_CONTAINERS = {tuple, list, dict, collections.OrderedDict, collections.defaultdict, collections.deque, type(None)}


def _outline(tree: Any) -> Any:
    """The structure and the shapes of a plain container of arrays; `None` for anything else."""
    if type(tree) not in _CONTAINERS or not tree:
        return None
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(x.shape, x.dtype) if eqx.is_array(x) else None for x in leaves]
