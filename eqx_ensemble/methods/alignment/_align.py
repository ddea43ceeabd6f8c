from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ... import _keys
from ..._axes import is_array
from ..._caller import caller
from ..._check import check_installed, check_optional_function
from ..._ensemble import Ensemble, check_ensemble, check_model_state, check_model_state_given
from ..._keys import generators
from ..._predict import predict
from ..._pytree import PyTree
from ._check import (
    check_axis_of,
    check_divisible,
    check_member_arrays,
    check_predictions,
    check_reference,
    check_some_axes,
    check_units,
    check_where,
)
from ._find import Heads, Units, find_units, input_axes, output_axes

Path = tuple[Any, ...]


class Leaf(NamedTuple):
    """The path and shape of an array of a model."""

    path: Path
    shape: tuple[int, ...]


class Axis(NamedTuple):
    """An axis of an array with `repeat` entries per unit."""

    path: Path
    axis: int
    repeat: int


class Part(NamedTuple):
    """Axes that share one order of `size` units, and the BatchNorms whose statistics share it."""

    size: int
    axes: tuple[Axis, ...]
    batch_norms: tuple[eqx.nn.BatchNorm, ...]


class Group(NamedTuple):
    """Parts whose `num_blocks` blocks of units are permuted together: one part for hidden units, two for heads."""

    name: str
    num_blocks: int
    parts: tuple[Part, ...]


def outline(model: Any) -> Any:
    """The model with a `Leaf` for each of its arrays."""
    return jtu.tree_map_with_path(lambda path, x: Leaf(path, x.shape) if is_array(x) else x, model)


def resolve(units: list[Units | Heads], model: Any) -> list[Group]:
    """Resolves units to axes of the arrays of a model."""
    drawn = outline(model)
    return [_group(each, drawn, i) for i, each in enumerate(units)]


def _group(units: Units | Heads, model: Any, number: int) -> Group:
    name = f"units[{number}]"
    if isinstance(units, Units):
        return Group(name, 1, (_part(units, model, name),))
    parts = _part(units.qk, model, f"{name}.qk"), _part(units.vo, model, f"{name}.vo")
    for part in parts:
        check_divisible(part.size, units.num_heads, f"{name}: {part.size} units in {units.num_heads} heads")
    return Group(name, units.num_heads, parts)


def _part(units: Units, model: Any, of: str) -> Part:
    found, norms = [], []
    for argument, entries, axes_of in (("outputs", units.outputs, output_axes), ("inputs", units.inputs, input_axes)):
        for i, entry in enumerate(entries):
            path = f"{of}.{argument}[{i}]"
            if isinstance(entry, tuple):
                leaf = check_where(entry[0], model, path)
                found.append((check_axis_of(leaf, entry[1], path, Leaf), entry[1] % len(leaf.shape)))
                continue
            layer = check_where(entry, model, path)
            found += check_some_axes(axes_of(layer), layer, path, argument)
            norms += [layer] if isinstance(layer, eqx.nn.BatchNorm) else []
    if not found and not norms:
        raise ValueError(f"`{caller()}` needs `{of}.outputs` to hold an array; the layers that it selects have none.")
    size = units.size or _size(found, norms)
    axes = [Axis(leaf.path, axis, _repeat(leaf, axis, size, of)) for leaf, axis in found]
    for norm in norms:
        check_divisible(norm.input_size, size, f"{of}: `BatchNorm` of {norm.input_size} for {size} units")
    return Part(size, tuple(dict.fromkeys(axes)), tuple(norms))


def _size(found: list[tuple[Leaf, int]], norms: list[eqx.nn.BatchNorm]) -> int:
    """The number of units of the first array, or else of the first norm."""
    return found[0][0].shape[found[0][1]] if found else norms[0].input_size


def _repeat(leaf: Leaf, axis: int, size: int, of: str) -> int:
    length = leaf.shape[axis]
    check_divisible(length, size, f"{of}: axis {axis} of `{jtu.keystr(leaf.path)}` {leaf.shape} for {size} units")
    return length // size


# Weight matching: finds, for each group of units in turn, the order that best matches the reference.

Arrays = dict[Path, np.ndarray]
Order = np.ndarray
"""The unit of a member at each position."""

_TOLERANCE = 1e-12


def match(groups: list[Group], member: Arrays, reference: Arrays, rng: np.random.Generator) -> list[list[Order]]:
    """The orders of all groups' parts, by coordinate ascent on the inner product of member and reference."""
    orders = [[np.arange(part.size) for part in group.parts] for group in groups]
    scale = sum(np.linalg.norm(member[path]) * np.linalg.norm(reference[path]) for path in member)
    gaining = True
    while gaining:
        gaining = False
        for i in rng.permutation(len(groups)).tolist():
            before = orders[i]
            found = _best(groups[i], _gains(groups, orders, i, member, reference))
            value = _similarity(groups, orders, i, member, reference)
            orders[i] = found
            # If an array has the units on both axes, the best order given the old one on the other axis may be worse.
            if _similarity(groups, orders, i, member, reference) > value + _TOLERANCE * scale:
                gaining = True
            else:
                orders[i] = before
    return orders


def shuffle(group: Group, rng: np.random.Generator) -> list[Order]:
    """Random orders of the parts of a group: of the blocks, and of the units inside each block."""
    blocks = _other_order(group.num_blocks, rng)
    inside = [part.size // group.num_blocks for part in group.parts]
    return [np.concatenate([size * block + _other_order(size, rng) for block in blocks]) for size in inside]


def _other_order(size: int, rng: np.random.Generator) -> Order:
    """A random order that differs from the identity, which would test nothing."""
    order = rng.permutation(size)
    while size > 1 and (order == np.arange(size)).all():
        order = rng.permutation(size)
    return order


def permute(array: np.ndarray, axes: list[tuple[Axis, Order]]) -> np.ndarray:
    """Permutes the units of an array."""
    for axis, order in axes:
        array = np.take(array, entries(order, axis.repeat), axis=axis.axis)
    return array


def entries(order: Order, repeat: int) -> np.ndarray:
    """Indices along an axis with `repeat` entries for each unit, for an order of its units."""
    return (order[:, None] * repeat + np.arange(repeat)).ravel()


def _axes_of(groups: list[Group], orders: list[list[Order]], path: Path) -> list[tuple[Axis, Order]]:
    return [
        (axis, order)
        for group, own in zip(groups, orders, strict=True)
        for part, order in zip(group.parts, own, strict=True)
        for axis in part.axes
        if axis.path == path
    ]


def _gains(
    groups: list[Group], orders: list[list[Order]], i: int, member: Arrays, reference: Arrays
) -> list[np.ndarray]:
    """For each part of group `i`, `(size, size)`: the inner product of unit `k` of the member at position `j`."""

    def gain(part: Part) -> np.ndarray:
        total = np.zeros((part.size, part.size))
        for axis in part.axes:
            others = [pair for pair in _axes_of(groups, orders, axis.path) if pair[0] != axis]
            rows = lambda x, axis=axis: np.moveaxis(x, axis.axis, 0).reshape(part.size, -1)
            total += np.real(rows(reference[axis.path]) @ rows(permute(member[axis.path], others)).conj().T)
        return total

    return [gain(part) for part in groups[i].parts]


def _similarity(groups: list[Group], orders: list[list[Order]], i: int, member: Arrays, reference: Arrays) -> float:
    """The inner product of all arrays that hold units of group `i`."""
    paths = dict.fromkeys(axis.path for part in groups[i].parts for axis in part.axes)
    moved = {path: permute(member[path], _axes_of(groups, orders, path)) for path in paths}
    return float(sum(np.real(np.vdot(reference[path], moved[path])) for path in paths))


def _best(group: Group, gains: list[np.ndarray]) -> list[Order]:
    """The orders with the largest gain: of the blocks, and of the units inside each block."""
    from scipy.optimize import linear_sum_assignment

    assign = lambda gain: linear_sum_assignment(gain, maximize=True)[1]
    blocks = group.num_blocks
    # (blocks, units, blocks, units): the gain of each unit of each block at each position of each other block.
    inside = [gain.reshape(blocks, len(gain) // blocks, blocks, -1) for gain in gains]
    orders = {(j, k): [assign(gain[j, :, k]) for gain in inside] for j, k in product(range(blocks), repeat=2)}
    value = np.zeros((blocks, blocks))
    for (j, k), own in orders.items():
        value[j, k] = sum(gain[j, np.arange(len(o)), k, o].sum() for gain, o in zip(inside, own, strict=True))
    chosen = enumerate(assign(value))
    pairs = [(k, orders[j, k]) for j, k in chosen]
    return [np.concatenate([k * gain.shape[1] + own[part] for k, own in pairs]) for part, gain in enumerate(inside)]


Orders = list[list[list[Order]]]
"""One order per member, group and part."""


def check_equal_predictions(
    ensemble: Ensemble[Any],
    state: eqx.nn.State | None,
    permuted: Callable[[Orders], tuple[Ensemble[Any], eqx.nn.State | None]],
    shuffled: Orders,
    groups: list[Group],
    x: PyTree,
    fn: Callable[..., Any] | None,
) -> None:
    """Raises if members with shuffled units give other predictions, and lists the groups that cause the change."""
    call: Any = predict  # its overloads are for known types
    before = check_predictions(call(ensemble, x, state=state, fn=fn))

    def change(orders: Orders) -> float:
        moved, moved_state = permuted(orders)
        return _change(before, check_predictions(call(moved, x, state=moved_state, fn=fn)))

    if (found := change(shuffled)) <= 1:
        return
    still = [[np.arange(part.size) for part in group.parts] for group in groups]
    only = lambda i: [[own[j] if j == i else still[j] for j in range(len(groups))] for own in shuffled]
    changes = {i: change(only(i)) for i in range(len(groups))}
    described = [f"  {_describe(groups[i])}" for i, size in changes.items() if size > 1]
    listed = "\n".join(described or ["  all of them together"])
    raise ValueError(
        f"`{caller()}` needs units whose order does not change predictions; shuffling them changed predictions by "
        f"{found:.1e} times the rounding tolerance:\n{listed}\n"
        "Name everything that has these units: norms and what adds to them among `outputs`, all that reads them among "
        "`inputs`."
    )


def _change(before: list[np.ndarray], after: list[np.ndarray]) -> float:
    """The largest difference, in multiples of the rounding tolerance."""
    most = 0.0
    for x, y in zip(before, after, strict=True):
        rounding = float(jnp.finfo(x.dtype).eps) ** 0.5 * np.abs(x).max(initial=0)
        wide = lambda z: z.astype(np.complex128 if np.iscomplexobj(z) else np.float64)
        difference = np.abs(wide(x) - wide(y)).max(initial=0)
        most = max(most, difference / rounding if rounding else float(difference > 0) * np.inf)
    return most


def _describe(group: Group) -> str:
    axes = [axis for part in group.parts for axis in part.axes]
    listed = ", ".join(f"`{jtu.keystr(axis.path)}` axis {axis.axis}" for axis in axes)
    return f"{group.name}: {listed}"


M = TypeVar("M")


@overload
def align(
    ensemble: Ensemble[M],
    x: PyTree,
    *,
    reference: int = 0,
    units: Sequence[Units | Heads] | None = None,
    state: None = None,
    fn: Callable[..., Any] | None = None,
    key: Any,
) -> Ensemble[M]: ...
@overload
def align(
    ensemble: Ensemble[M],
    x: PyTree,
    *,
    reference: int = 0,
    units: Sequence[Units | Heads] | None = None,
    state: eqx.nn.State,
    fn: Callable[..., Any] | None = None,
    key: Any,
) -> tuple[Ensemble[M], eqx.nn.State]: ...
def align(
    ensemble: Ensemble[Any],
    x: PyTree,
    *,
    reference: int = 0,
    units: Sequence[Units | Heads] | None = None,
    state: eqx.nn.State | None = None,
    fn: Callable[..., Any] | None = None,
    key: Any,
) -> Any:
    r"""Permutes the hidden units of all members so that their weights best match those of a reference member.

    Without it, the average of members from different initialisations is a poor network. Weight matching maximises
    $\sum_l \langle W_l^{\text{reference}}, P_l W_l P_{l-1}^\top \rangle$ by linear assignments, group by group, to a
    local optimum that depends on `key`.

    Predictions do not change: this is verified for `x`, and wrongly declared units raise an error.

    **Arguments:**

    - `ensemble`: the ensemble.
    - `x`: a few rows as for [`eqx_ensemble.predict`][]; random numbers suffice.
    - `reference`: the position of the member to which the others are aligned.
    - `units`: a list of [`eqx_ensemble.methods.alignment.Units`][] and [`eqx_ensemble.methods.alignment.Heads`][]; by
        default that of [`eqx_ensemble.methods.alignment.find_units`][].
    - `state`: the stacked `equinox.nn.State` of stateful members.
    - `fn`: how members are called, as for [`eqx_ensemble.predict`][].
    - `key`: the root key, for the order of the groups.

    **Returns:** the ensemble with the same members and ids; with `state`, also the new state. Optimiser states are not
    permuted: to train further, initialise a new one.

    **Raises:** `ValueError` for units whose permutation changes predictions; `ImportError` without SciPy.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    x = jax.random.normal(key, (10, 3))
    aligned = ee.methods.alignment.align(ensemble, x, key=key)
    ee.average_parameters(aligned)
    ```

    ??? cite
        [Ainsworth et al. 2023](https://arxiv.org/abs/2209.04836)
    """
    check_ensemble(ensemble)
    check_model_state_given(ensemble.stacked, state)
    check_model_state(state, ensemble.num_members)
    check_optional_function(fn, "fn", example="lambda model, x: model(x)")
    position = check_reference(reference, ensemble.num_members)
    check_installed("scipy", what=caller(), extra="sklearn")
    known = find_units(ensemble) if units is None else units
    groups = resolve(check_units(known, (Units, Heads), found=units is None), ensemble[0])
    arrays = _member_arrays(ensemble, groups)
    turns = list(generators(_keys.root(key), ensemble.ids, purpose="align"))
    permuted = lambda orders: _permute(ensemble, state, groups, orders)
    shuffled = [[shuffle(group, rng) for group in groups] for rng in turns]
    check_equal_predictions(ensemble, state, permuted, shuffled, groups, x, fn)
    own = [{path: array[i] for path, array in arrays.items()} for i in range(ensemble.num_members)]
    still = [[np.arange(part.size) for part in group.parts] for group in groups]
    orders = [
        still if i == position else match(groups, member, own[position], rng)
        for i, (member, rng) in enumerate(zip(own, turns, strict=True))
    ]
    aligned, moved = permuted(orders)
    return aligned if state is None else (aligned, moved)


def _member_arrays(ensemble: Ensemble[Any], groups: list[Group]) -> dict[tuple, np.ndarray]:
    """The arrays of all members that hold units, on the host in double precision."""
    stacked = dict(jtu.tree_leaves_with_path(ensemble.arrays))
    paths = dict.fromkeys(axis.path for group in groups for part in group.parts for axis in part.axes)
    found = {path: check_member_arrays(stacked.get(path), jtu.keystr(path)) for path in paths}
    for path, array in found.items():
        wrong = ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
        if wrong.any():
            raise ValueError(
                f"`{caller()}` needs finite weights; at `{jtu.keystr(path)}`: not finite in members "
                f"{np.asarray(ensemble.ids)[wrong].tolist()}.\nLeave members that diverged out: `ensemble[finite]`."
            )
    return found


def _permute(
    ensemble: Ensemble[Any], state: eqx.nn.State | None, groups: list[Group], orders: list[list[list[Order]]]
) -> tuple[Ensemble[Any], eqx.nn.State | None]:
    """Permutes the units of all members; `orders` has one order per member, group and part."""
    moves: dict[tuple, list[tuple[int, np.ndarray]]] = {}
    state = jax.tree.map(lambda x: x, state)  # `State.set` invalidates the one that it is called on
    for i, group in enumerate(groups):
        for j, part in enumerate(group.parts):
            own = np.stack([member[i][j] for member in orders])
            for axis in part.axes:
                index = np.stack([entries(order, axis.repeat) for order in own])
                moves.setdefault(axis.path, []).append((axis.axis, index))
            state = _permute_statistics(state, part, own)

    def move(path: tuple, x: Any) -> Any:
        for axis, index in moves.get(path, ()):
            x = _take(x, index, axis)
        return x

    stacked = jtu.tree_map_with_path(move, ensemble.stacked)
    return Ensemble(stacked, ensemble.shared, ensemble.ids), state


def _permute_statistics(state: eqx.nn.State | None, part: Part, order: np.ndarray) -> eqx.nn.State | None:
    """Permutes the running means and variances of the BatchNorms of a part."""
    for layer in part.batch_norms:
        index = layer.ema_state_index if layer.mode == "ema" else layer.batch_state_index
        if state is None or index is None:
            continue
        every = np.stack([entries(own, layer.input_size // part.size) for own in order])
        moved = jax.tree.map(lambda x, every=every: _take(x, every, 0), state.get(index))
        state = state.set(index, moved)
    return state


def _take(stacked: Any, index: np.ndarray, axis: int) -> jax.Array:
    """Indexes each member along an axis, and keeps the sharding."""
    taken = jax.vmap(lambda x, i: jnp.take(x, i, axis=axis))(stacked, jnp.asarray(index))
    return jax.device_put(taken, stacked.sharding) if isinstance(stacked, jax.Array) else taken
