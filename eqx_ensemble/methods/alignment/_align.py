from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ... import _keys
from ..._check import check_installed, check_optional_function
from ..._ensemble import Ensemble
from ..._ensemble._check import check_ensemble
from ..._ensemble._check_state import check_model_state, check_model_state_given
from ..._pytree import PyTree
from ..._streams import generators
from ._check import check_finite, check_member_arrays, check_reference, check_units
from ._find import find_units
from ._match import Order, entries, match, shuffle
from ._resolve import Group, Part, resolve
from ._units import Heads, Units
from ._verify import check_equal_predictions

M = TypeVar("M")

_NAME = "methods.alignment.align"


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

    Members trained from different initialisations have their hidden units in different orders, so that the average of
    their weights is a poor network. Permuting hidden units changes no prediction. Weight matching chooses permutations
    that maximise $\sum_l \langle W_l^{\text{reference}}, P_l W_l P_{l-1}^\top \rangle$ over all weights and biases: it
    solves one linear assignment for each group of units in turn, in random order, until no group improves by more than
    rounding. The result is a local optimum that depends on `key`. A permuted copy is usually recovered exactly; narrow
    networks that were trained independently have only some units in common.

    Members remain the same functions. To verify this, all units are shuffled once and the predictions for `x` are
    compared; wrongly declared units raise an error.

    **Arguments:**

    - `ensemble`: the ensemble.
    - `x`: a few rows, any PyTree of arrays `(rows, ...)` as for [`eqx_ensemble.predict`][]; random numbers suffice.
    - `reference`: the position of the member to which the others are aligned.
    - `units`: the axes that share an order, a list of [`eqx_ensemble.methods.alignment.Units`][] and
        [`eqx_ensemble.methods.alignment.Heads`][]; by default the result of
        [`eqx_ensemble.methods.alignment.find_units`][]. Other units keep their order.
    - `state`: the stacked `equinox.nn.State` of stateful members; running statistics of BatchNorm are permuted too.
    - `fn`: how members are called, as for [`eqx_ensemble.predict`][].
    - `key`: the root key, for the order of the groups.

    **Returns:** the ensemble with the same members and ids; with `state`, also the new state. Optimiser states are not
    permuted: to train further, initialise a new one.

    **Raises:** `TypeError` or `ValueError` for inconsistent arguments, units whose permutation changes predictions, and
    weights that are not finite; `ImportError` without SciPy.

    ```python
    model = eqx.nn.MLP(3, 1, 16, 2, key=key)
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    x = jax.random.normal(key, (10, 3))
    aligned = ee.methods.alignment.align(ensemble, x, key=key)
    ee.average(aligned)
    ```

    ??? cite
        [Git Re-Basin: Merging Models modulo Permutation Symmetries](https://arxiv.org/abs/2209.04836), Ainsworth et
        al., 2023.
    """
    check_ensemble(ensemble, name=_NAME)
    check_model_state_given(ensemble.stacked, state, name=_NAME)
    check_model_state(state, ensemble.num_members, name=_NAME)
    check_optional_function(fn, "fn", name=_NAME, example="lambda model, x: model(x)")
    position = check_reference(reference, ensemble.num_members, name=_NAME)
    check_installed("scipy", what=_NAME, extra="sklearn")
    known = find_units(ensemble) if units is None else units
    groups = resolve(check_units(known, (Units, Heads), found=units is None), ensemble[0])
    arrays = _member_arrays(ensemble, groups)
    turns = list(generators(_keys.root(key, name=_NAME), ensemble.ids, purpose="align"))
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
        check_finite(array, jtu.keystr(path), ensemble.ids)
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
