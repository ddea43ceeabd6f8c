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
    r"""Puts the hidden units of all members into the order in which their weights are most like those of one of them.

    Members that were trained from different initialisations have their hidden units in different orders, and the
    average of their weights is no good network. A permutation of hidden units changes no prediction. Weight matching
    chooses it so that $\sum_l \langle W_l^{\text{reference}}, P_l W_l P_{l-1}^\top \rangle$ is largest, over all
    weights and biases: one linear assignment for each group of units in turn, in random order, until no group gains
    more than rounding. It is a local optimum that depends on `key`. A permuted copy is usually found exactly; of two
    networks that were trained apart, narrow ones have only a part of their units in common.

    The members stay the same functions: the order of all units is shuffled once and their predictions for `x` are
    compared with those before, so that units which were declared wrongly are an error.

    **Arguments:**

    - `ensemble`: the ensemble.
    - `x`: a few rows, any PyTree of arrays `(rows, ...)` as for [`eqx_ensemble.predict`][]: random numbers will do.
    - `reference`: the position of the member that the others are aligned with.
    - `units`: which axes share an order, a list of [`eqx_ensemble.methods.alignment.Units`][] and
        [`eqx_ensemble.methods.alignment.Heads`][]; by default what [`eqx_ensemble.methods.alignment.find_units`][]
        finds. Units that are not listed keep their places.
    - `state`: the stacked `equinox.nn.State` of stateful members; running statistics of BatchNorm move along.
    - `fn`: how members are called, as for [`eqx_ensemble.predict`][].
    - `key`: the root key, of the order in which groups take turns.

    **Returns:** the ensemble with the same members and ids; with `state`, and the new state. The state of an optimiser
    does not move along: train on with a new one.

    **Raises:** `TypeError` or `ValueError` for arguments that do not fit together, for units whose permutation changes
    predictions, and for weights that are not finite.

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
    """The members' arrays that hold units, on the host and in double precision."""
    stacked = dict(jtu.tree_leaves_with_path(ensemble.arrays))
    paths = dict.fromkeys(axis.path for group in groups for part in group.parts for axis in part.axes)
    found = {path: check_member_arrays(stacked.get(path), jtu.keystr(path)) for path in paths}
    for path, array in found.items():
        check_finite(array, jtu.keystr(path), ensemble.ids)
    return found


def _permute(
    ensemble: Ensemble[Any], state: eqx.nn.State | None, groups: list[Group], orders: list[list[list[Order]]]
) -> tuple[Ensemble[Any], eqx.nn.State | None]:
    """All members with their units in these orders: of each member, group and part."""
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
    """Running means and variances of a part's BatchNorms."""
    for layer in part.batch_norms:
        index = layer.ema_state_index if layer.mode == "ema" else layer.batch_state_index
        if state is None or index is None:
            continue
        every = np.stack([entries(own, layer.input_size // part.size) for own in order])
        moved = jax.tree.map(lambda x, every=every: _take(x, every, 0), state.get(index))
        state = state.set(index, moved)
    return state


def _take(stacked: Any, index: np.ndarray, axis: int) -> jax.Array:
    """Entries of each member, on the devices where it is."""
    taken = jax.vmap(lambda x, i: jnp.take(x, i, axis=axis))(stacked, jnp.asarray(index))
    return jax.device_put(taken, stacked.sharding) if isinstance(stacked, jax.Array) else taken
