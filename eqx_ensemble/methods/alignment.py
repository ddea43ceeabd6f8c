"""Alignment: a common order of hidden units for independent members."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._caller import caller
from .._ensemble import Ensemble, check_ensemble, check_model_state
from .._keys import generators
from .._leaves import kind_text
from .._predict import predict
from .._pytree import PyTree

__all__ = ["Units", "align", "find_units"]

Where = Callable[[Any], Any]

Entry = Where | tuple[Where, int]
"""A function that selects a layer of a model; or a function that selects an array, and one of its axes."""


class Units(eqx.Module):
    """Hidden units that may be permuted: the layers that output them, and the layers that take them as input.

    Channels and the entries of a residual stream are units too. Layers of Equinox are selected as in `equinox.tree_at`,
    for others arrays, each with its axis: `(lambda model: model.scale, 0)`.

    **Arguments:**

    - `outputs`: all layers that output these units or have one value per unit: the preceding layer, norms, depthwise
        convolutions; for a residual stream, every layer that adds to it. The first one says how many units there are.
    - `inputs`: all layers that take these units as input.

    ```python
    units = ee.methods.alignment.Units(
        outputs=[lambda model: model.conv, lambda model: model.norm],
        inputs=[lambda model: model.linear],
    )
    ```
    """

    outputs: Sequence[Entry]
    inputs: Sequence[Entry] = ()


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

    **Raises:** `ValueError` for units whose permutation changes predictions.

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
    groups = _groups(find_units(ensemble) if units is None else units, ensemble[0])
    if not groups:
        fix = "Say which axes share an order: `units=[methods.alignment.Units(...)]`."
        raise ValueError(f"`{caller()}` found no units between layers of known types.\n{fix}")
    arrays, turns = _arrays(ensemble, groups), list(generators(key, len(ensemble), purpose="align"))
    _check_predictions(ensemble, state, groups, x, fn, turns)
    own = [{path: np.asarray(array[i], np.float64) for path, array in arrays.items()} for i in range(len(ensemble))]
    orders = [_match(groups, member, own[reference], rng) for member, rng in zip(own, turns, strict=True)]
    aligned, moved = _permute(ensemble, state, groups, orders)
    return aligned if state is None else (aligned, moved)


class _Axis(NamedTuple):
    """An axis of an array with `repeat` entries per unit."""

    path: tuple
    axis: int
    repeat: int


class _Group(NamedTuple):
    """Axes that share one order of `size` units, and the BatchNorms whose statistics share it."""

    size: int
    axes: tuple[_Axis, ...]
    batch_norms: tuple[eqx.nn.BatchNorm, ...]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """In place of an array."""

    path: tuple
    shape: tuple[int, ...]


def _groups(units: Sequence[Units], model: Any) -> list[_Group]:
    """The axes of the arrays of a model that units have."""
    model = jtu.tree_map_with_path(lambda path, x: _Leaf(path, x.shape) if eqx.is_array(x) else x, model)
    found = []
    for each in units:
        axes: list[tuple[_Leaf, int]] = []
        for side, entries in enumerate((each.outputs, each.inputs)):
            for entry in entries:
                axes += [(entry[0](model), entry[1])] if isinstance(entry, tuple) else _axes_of(entry(model), side)
        layers = [entry(model) for entry in each.outputs if not isinstance(entry, tuple)]
        norms = tuple(layer for layer in layers if isinstance(layer, eqx.nn.BatchNorm))
        size = axes[0][0].shape[axes[0][1]]
        wrong = [leaf.shape for leaf, axis in axes if leaf.shape[axis] % size]
        if wrong:
            raise ValueError(f"`{caller()}` needs entries for each of {size} units, got {wrong}: do layers share them?")
        own = (_Axis(leaf.path, axis, leaf.shape[axis] // size) for leaf, axis in axes)
        found.append(_Group(size, tuple(dict.fromkeys(own)), norms))
    return found


def _axes_of(layer: Any, side: int) -> list[tuple[Any, int]]:
    """The arrays of a layer with the units that it outputs or scales (side 0), or takes (1), and their axes."""
    if isinstance(layer, eqx.nn.MLP):
        return _axes_of(layer.layers[side - 1], side)
    if side == 1 and isinstance(layer, _DENSE):
        return [(layer.weight, 1)]
    if side == 0 and isinstance(layer, (*_DENSE, *_NORMS)):
        return [(x, 0) for x in (layer.weight, layer.bias) if x is not None]
    fix = "Select its arrays, each with its axis: `(lambda model: model.layer.weight, 0)`."
    raise TypeError(f"`{caller()}` cannot infer the axes of {kind_text(layer)}.\n{fix}")


Arrays = dict[tuple[Any, ...], np.ndarray]
Order = np.ndarray
"""The unit of a member at each position."""


def _arrays(ensemble: Ensemble[Any], groups: list[_Group]) -> Arrays:
    """The stacked arrays that hold units."""
    leaves = jtu.tree_flatten_with_path(ensemble.stacked, is_leaf=lambda x: x is None)[0]
    stacked = {path: x for (path, x), axis in zip(leaves, ensemble.axes, strict=True) if axis == 0}
    paths = dict.fromkeys(axis.path for group in groups for axis in group.axes)
    shared = [jtu.keystr(path) for path in paths if path not in stacked]
    if shared:
        raise ValueError(f"`{caller()}` permutes each member's own arrays; shared by all: {', '.join(shared)}.")
    return {path: np.asarray(stacked[path]) for path in paths}


def _match(groups: list[_Group], member: Arrays, reference: Arrays, rng: np.random.Generator) -> list[Order]:
    """The orders of all groups, by coordinate ascent on the inner product of member and reference."""
    from scipy.optimize import linear_sum_assignment

    def move(orders: list[Order], path: tuple, but: Any = None) -> np.ndarray:
        """A member's array in new orders, but for one axis."""
        array = member[path]
        for group, order in zip(groups, orders, strict=True):
            for own in (x for x in group.axes if x.path == path and x != but):
                array = np.take(array, _entries(order, own.repeat), axis=own.axis)
        return array

    def gain(orders: list[Order], group: _Group) -> np.ndarray:
        """`(size, size)`: the inner product with unit `k` of the member at position `j`."""
        total = np.zeros((group.size, group.size))
        for own in group.axes:
            rows = lambda x, axis=own.axis: np.moveaxis(x, axis, 0).reshape(group.size, -1)
            total += rows(reference[own.path]) @ rows(move(orders, own.path, own)).T
        return total

    def similarity(orders: list[Order], group: _Group) -> float:
        paths = {own.path for own in group.axes}
        return float(sum(np.vdot(reference[path], move(orders, path)) for path in paths))

    orders = [np.arange(group.size) for group in groups]
    least = 1e-12 * sum(np.linalg.norm(member[path]) * np.linalg.norm(reference[path]) for path in member)
    gaining = member is not reference
    while gaining:
        gaining = False
        for i in rng.permutation(len(groups)).tolist():
            new = [*orders]
            new[i] = linear_sum_assignment(gain(orders, groups[i]), maximize=True)[1]
            # If an array has the units on both axes, the best order given the old one on the other axis may be worse.
            if similarity(new, groups[i]) > similarity(orders, groups[i]) + least:
                gaining, orders = True, new
    return orders


def _entries(order: Order, repeat: int) -> np.ndarray:
    """Indices along an axis with `repeat` entries for each unit, for an order of its units."""
    return (order[:, None] * repeat + np.arange(repeat)).ravel()


def _permute(
    ensemble: Ensemble[Any], state: eqx.nn.State | None, groups: list[_Group], orders: list[list[Order]]
) -> tuple[Ensemble[Any], eqx.nn.State | None]:
    """Permutes the units of all members."""
    moves: dict[tuple, list[tuple[int, np.ndarray]]] = {}
    state = jax.tree.map(lambda x: x, state)  # `State.set` invalidates the one that it is called on
    take = lambda x, index, axis: jax.vmap(lambda x, i: jnp.take(x, i, axis=axis))(x, jnp.asarray(index))
    for i, group in enumerate(groups):
        index = lambda repeat, i=i: np.stack([_entries(own[i], repeat) for own in orders])
        for path, axis, repeat in group.axes:
            moves.setdefault(path, []).append((axis, index(repeat)))
        for norm in group.batch_norms:
            where = norm.ema_state_index if norm.mode == "ema" else norm.batch_state_index
            if state is not None and where is not None:
                every = index(norm.input_size // group.size)
                state = state.set(where, jax.tree.map(lambda x, every=every: take(x, every, 0), state.get(where)))

    def move(path: tuple, x: Any) -> Any:
        for axis, index in moves.get(path, ()):
            x = take(x, index, axis)
        return x

    return Ensemble(jtu.tree_map_with_path(move, ensemble.stacked), ensemble.axes), state


def _check_predictions(
    ensemble: Ensemble[Any], state: Any, groups: list[_Group], x: PyTree, fn: Any, turns: list[np.random.Generator]
) -> None:
    """Raises if members whose units are shuffled predict otherwise, and lists the groups that cause it."""

    def predictions(ensemble: Ensemble[Any], state: Any) -> list[np.ndarray]:
        found = jax.tree.leaves(predict(ensemble, x, state=state, fn=fn))
        return [np.asarray(x) for x in found if jnp.issubdtype(x.dtype, jnp.inexact)]

    def is_same(groups: list[_Group], shuffled: list[list[Order]]) -> bool:
        after = predictions(*_permute(ensemble, state, groups, shuffled))
        rounding = lambda x: float(jnp.finfo(x.dtype).eps) ** 0.5 * np.abs(x).max(initial=0)
        return all(np.abs(x - y).max(initial=0) <= rounding(x) for x, y in zip(before, after, strict=True))

    before = predictions(ensemble, state)
    finite = np.all([np.isfinite(x).reshape(len(x), -1).all(axis=1) for x in before], axis=0)
    if not finite.all():
        raise ValueError(
            f"`{caller()}` compares predictions for `x`; for members {np.flatnonzero(~finite)} they are not finite."
        )
    shuffled = [[_shuffle(group.size, rng) for group in groups] for rng in turns]
    if not is_same(groups, shuffled):
        alone = [not is_same([group], [[own[i]] for own in shuffled]) for i, group in enumerate(groups)]
        listed = [f"`{jtu.keystr(group.axes[0].path)}`" for group, wrong in zip(groups, alone, strict=True) if wrong]
        raise ValueError(
            f"`{caller()}` needs units whose order does not change predictions; shuffling them changed predictions: "
            f"those of {', '.join(listed) or 'all together'}.\nName everything that has these units: norms and what "
            "adds to them among `outputs`, all that reads them among `inputs`."
        )


def _shuffle(size: int, rng: np.random.Generator) -> Order:
    """A random order that differs from the identity, which would test nothing."""
    order = rng.permutation(size)
    return np.roll(order, 1) if size > 1 and (order == np.arange(size)).all() else order


_DENSE = (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.ConvTranspose)
_NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
_KEEP_UNITS = (eqx.nn.Dropout, eqx.nn.Identity, eqx.nn.Lambda, eqx.nn.Pool, eqx.nn.AdaptivePool)
_is_chain = lambda x: isinstance(x, eqx.nn.MLP | eqx.nn.Sequential)


def find_units(model: Any) -> list[Units]:
    """Finds the hidden units of each `equinox.nn.MLP` and `Sequential`.

    Add others, such as residual streams: `find_units(model) + [Units(...)]`. An MLP with `scan=True` or a learnt
    activation, and inputs of grouped convolutions, are not found either.

    **Arguments:**

    - `model`: a model, or an [`eqx_ensemble.Ensemble`][].

    **Returns:** a list of [`eqx_ensemble.methods.alignment.Units`][].

    ```python
    model = eqx.nn.MLP(3, 1, 16, 2, key=key)
    len(ee.methods.alignment.find_units(model))  # 2, one for each hidden layer
    ```
    """
    model = model[0] if isinstance(model, Ensemble) else model
    nodes = jax.tree.leaves(model, is_leaf=_is_chain)
    at = lambda i: lambda model: jax.tree.leaves(model, is_leaf=_is_chain)[i]
    return [units for i, node in enumerate(nodes) if _is_chain(node) for units in _between(_chain(node, at(i)))]


def _chain(node: Any, where: Where) -> Iterator[tuple[Any, Where]]:
    """The layers of nested sequences in order, each with a function that selects it."""
    # With `scan` or a learnt activation, one array holds all hidden layers.
    is_mlp = (
        isinstance(node, eqx.nn.MLP) and not node.scan and not any(map(eqx.is_array, jax.tree.leaves(node.activation)))
    )
    if not is_mlp and not isinstance(node, eqx.nn.Sequential):
        yield node, where
        return
    for i, layer in enumerate(node.layers):
        yield from _chain(layer, lambda model, i=i: where(model).layers[i])


def _between(layers: Iterator[tuple[Any, Where]]) -> Iterator[Units]:
    """Units between consecutive dense layers. An unknown layer between two dense layers excludes their units."""
    outputs: Sequence[Entry] = ()
    size = 0
    for layer, where in layers:
        is_depthwise = isinstance(layer, eqx.nn.Conv) and layer.groups == layer.in_channels == layer.out_channels
        is_norm = isinstance(layer, _NORMS) and getattr(layer, "groups", 1) in (1, size)  # treats all units alike
        if isinstance(layer, _DENSE) and getattr(layer, "groups", 1) == 1:
            if outputs and size > 1 and layer.weight.shape[1] % size == 0:
                yield Units(outputs, [where])
            outputs, size = [where], layer.weight.shape[0]
        elif outputs and (is_depthwise or is_norm):
            outputs = [*outputs, where]
        elif outputs and not isinstance(layer, _KEEP_UNITS):
            outputs, size = (), 0
