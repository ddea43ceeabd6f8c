from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._caller import caller
from ..._check import check_installed, is_traced
from ..._ensemble import Ensemble, check_ensemble, check_model_state
from ..._keys import generators
from ..._predict import predict
from ..._pytree import PyTree
from ._units import Axis, Group, Units, find_units, resolve

Arrays = dict[tuple, np.ndarray]

Order = np.ndarray
"""The unit of a member at each position."""

_TOLERANCE = 1e-12


def match(groups: list[Group], member: Arrays, reference: Arrays, rng: np.random.Generator) -> list[Order]:
    """The orders of all groups, by coordinate ascent on the inner product of member and reference."""
    from scipy.optimize import linear_sum_assignment

    orders = [np.arange(group.size) for group in groups]
    scale = sum(np.linalg.norm(member[path]) * np.linalg.norm(reference[path]) for path in member)
    gaining = True
    while gaining:
        gaining = False
        for i in rng.permutation(len(groups)).tolist():
            before = orders[i]
            found = linear_sum_assignment(_gain(groups, orders, i, member, reference), maximize=True)[1]
            value = _similarity(groups, orders, i, member, reference)
            orders[i] = found
            # If an array has the units on both axes, the best order given the old one on the other axis may be worse.
            if _similarity(groups, orders, i, member, reference) > value + _TOLERANCE * scale:
                gaining = True
            else:
                orders[i] = before
    return orders


def shuffle(size: int, rng: np.random.Generator) -> Order:
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


def _axes_of(groups: list[Group], orders: list[Order], path: tuple) -> list[tuple[Axis, Order]]:
    pairs = zip(groups, orders, strict=True)
    return [(axis, order) for group, order in pairs for axis in group.axes if axis.path == path]


def _gain(groups: list[Group], orders: list[Order], i: int, member: Arrays, reference: Arrays) -> np.ndarray:
    """Of group `i`, `(size, size)`: the inner product with unit `k` of the member at position `j`."""
    size = groups[i].size
    total = np.zeros((size, size))
    for axis in groups[i].axes:
        others = [pair for pair in _axes_of(groups, orders, axis.path) if pair[0] != axis]
        rows = lambda x, axis=axis: np.moveaxis(x, axis.axis, 0).reshape(size, -1)
        total += np.real(rows(reference[axis.path]) @ rows(permute(member[axis.path], others)).conj().T)
    return total


def _similarity(groups: list[Group], orders: list[Order], i: int, member: Arrays, reference: Arrays) -> float:
    """The inner product of all arrays that hold units of group `i`."""
    paths = dict.fromkeys(axis.path for axis in groups[i].axes)
    moved = {path: permute(member[path], _axes_of(groups, orders, path)) for path in paths}
    return float(sum(np.real(np.vdot(reference[path], moved[path])) for path in paths))


Orders = list[list[Order]]
"""One order per member and group."""


def check_equal_predictions(
    ensemble: Ensemble[Any],
    state: eqx.nn.State | None,
    shuffled: Orders,
    groups: list[Group],
    x: PyTree,
    fn: Callable[..., Any] | None,
) -> None:
    """Raises if members with shuffled units give other predictions, and lists the groups that cause the change."""

    def predictions(ensemble: Ensemble[Any], state: Any) -> list[np.ndarray]:
        found = jax.tree.leaves(predict(ensemble, x, state=state, fn=fn))
        return [np.asarray(x) for x in found if jnp.issubdtype(x.dtype, jnp.inexact)]

    before = predictions(ensemble, state)
    if not before or not all(np.isfinite(x).all() for x in before):
        raise ValueError(f"`{caller()}` compares predictions for `x`, and needs finite floating-point ones.")
    change = lambda orders: _change(before, predictions(*_permute(ensemble, state, groups, orders)))
    if (found := change(shuffled)) <= 1:
        return
    still = [np.arange(group.size) for group in groups]
    only = lambda i: [[own[j] if j == i else still[j] for j in range(len(groups))] for own in shuffled]
    wrong = [_describe(group) for i, group in enumerate(groups) if change(only(i)) > 1]
    listed = "; ".join(wrong or ["all of them together"])
    raise ValueError(
        f"`{caller()}` needs units whose order does not change predictions; shuffling them changed predictions by "
        f"{found:.1e} times the rounding tolerance: {listed}.\n"
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
    return f"{group.name}: " + ", ".join(f"`{jtu.keystr(axis.path)}` axis {axis.axis}" for axis in group.axes)


M = TypeVar("M")


@overload
def align(
    ensemble: Ensemble[M],
    x: PyTree,
    *,
    reference: int = 0,
    units: Sequence[Units] | None = None,
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
    units: Sequence[Units] | None = None,
    state: eqx.nn.State,
    fn: Callable[..., Any] | None = None,
    key: Any,
) -> tuple[Ensemble[M], eqx.nn.State]: ...
def align(
    ensemble: Ensemble[Any],
    x: PyTree,
    *,
    reference: int = 0,
    units: Sequence[Units] | None = None,
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
    - `units`: a list of [`eqx_ensemble.methods.alignment.Units`][]; by default that of
        [`eqx_ensemble.methods.alignment.find_units`][].
    - `state`: the stacked `equinox.nn.State` of stateful members.
    - `fn`: how members are called, as for [`eqx_ensemble.predict`][].
    - `key`: one key, or one per member `(members,)`, for the order of the groups.

    **Returns:** the ensemble with the same members; with `state`, also the new state. Optimiser states are not
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
    check_model_state(ensemble, state)
    check_installed("scipy", what=caller(), extra="sklearn")
    position = range(ensemble.num_members)[reference]
    groups = resolve(find_units(ensemble) if units is None else units, ensemble[0])
    if not groups:
        raise ValueError(
            f"`{caller()}` found no units between layers of known types.\n"
            "Say which axes share an order: `units=[methods.alignment.Units(...)]`."
        )
    arrays = _member_arrays(ensemble, groups)
    turns = list(generators(key, ensemble.num_members, purpose="align"))
    shuffled = [[shuffle(group.size, rng) for group in groups] for rng in turns]
    check_equal_predictions(ensemble, state, shuffled, groups, x, fn)
    own = [{path: array[i] for path, array in arrays.items()} for i in range(ensemble.num_members)]
    still = [np.arange(group.size) for group in groups]
    orders = [
        still if i == position else match(groups, member, own[position], rng)
        for i, (member, rng) in enumerate(zip(own, turns, strict=True))
    ]
    aligned, moved = _permute(ensemble, state, groups, orders)
    return aligned if state is None else (aligned, moved)


def _member_arrays(ensemble: Ensemble[Any], groups: list[Group]) -> Arrays:
    """The arrays of all members that hold units, on the host in double precision."""
    leaves = jtu.tree_flatten_with_path(ensemble.stacked, is_leaf=lambda x: x is None)[0]
    stacked = {path: x for (path, x), axis in zip(leaves, ensemble.axes, strict=True) if axis == 0}
    found = {}
    for path in dict.fromkeys(axis.path for group in groups for axis in group.axes):
        if path not in stacked:
            raise ValueError(
                f"`{caller()}` permutes each member's own arrays; the one at `{jtu.keystr(path)}` is shared by all."
            )
        if is_traced(stacked[path]):
            raise TypeError(f"`{caller()}` matches units on the host, and cannot run inside a transformation.")
        array = np.asarray(stacked[path])
        found[path] = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
        wrong = ~np.isfinite(found[path]).reshape(len(array), -1).all(axis=1)
        if wrong.any():
            raise ValueError(
                f"`{caller()}` needs finite weights; at `{jtu.keystr(path)}`: not finite in members "
                f"{np.flatnonzero(wrong).tolist()}.\nLeave members that diverged out: `ensemble[finite]`."
            )
    return found


def _permute(
    ensemble: Ensemble[Any], state: eqx.nn.State | None, groups: list[Group], orders: Orders
) -> tuple[Ensemble[Any], eqx.nn.State | None]:
    """Permutes the units of all members."""
    moves: dict[tuple, list[tuple[int, np.ndarray]]] = {}
    state = jax.tree.map(lambda x: x, state)  # `State.set` invalidates the one that it is called on
    for i, group in enumerate(groups):
        index = lambda repeat, i=i: np.stack([entries(own[i], repeat) for own in orders])
        for axis in group.axes:
            moves.setdefault(axis.path, []).append((axis.axis, index(axis.repeat)))
        for norm in group.batch_norms:
            where = norm.ema_state_index if norm.mode == "ema" else norm.batch_state_index
            if state is not None and where is not None:
                every = index(norm.input_size // group.size)
                moved = jax.tree.map(lambda x, every=every: _take(x, every, 0), state.get(where))
                state = state.set(where, moved)

    def move(path: tuple, x: Any) -> Any:
        for axis, index in moves.get(path, ()):
            x = _take(x, index, axis)
        return x

    return Ensemble(jtu.tree_map_with_path(move, ensemble.stacked), ensemble.axes), state


def _take(stacked: Any, index: np.ndarray, axis: int) -> jax.Array:
    """Indexes each member along an axis, and keeps the sharding."""
    taken = jax.vmap(lambda x, i: jnp.take(x, i, axis=axis))(stacked, jnp.asarray(index))
    return jax.device_put(taken, stacked.sharding) if isinstance(stacked, jax.Array) else taken
