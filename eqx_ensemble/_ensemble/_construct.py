from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax

from .. import _axes, _keys
from .. import tree as _tree
from .._axes._check import check_member_axis
from .._check import check_flag
from .._pytree import PyTree
from ..tree._check import check_trees
from ..tree._compare import Rules, compare_trees
from ._check import check_equal_shared, check_no_text_arrays, check_selection
from ._check_equal import warn_of_equal_models
from ._ensemble import Ensemble, M, Where


def from_stacked(model: M, *, ids: Any = None, shared: Where | None = None) -> Ensemble[M]:
    """Makes an [`eqx_ensemble.Ensemble`][] of a Module that is already stacked, as by `eqx.filter_vmap(make)(keys)`.

    **Arguments:**

    - `model`: a model whose array leaves all carry the leading `members` axis.
    - `ids`: the members' ids `(members,)`; `0, 1, 2, ...` if not given. They determine the number of members if no
        array of the model has the axis.
    - `shared`: selects the nodes that all members use, as in `equinox.tree_at`: `lambda model: model.trunk`. Their
        arrays must not carry the axis.

    **Raises:** `MemberMismatchError` if array leaves lack the axis, or disagree on the number of members; `TypeError`
    for a model without stacked arrays if `ids` is not given, and for NumPy arrays of strings or objects; `ValueError`
    for an invalid `shared`.

    ```python
    stacked = eqx.filter_vmap(lambda key: eqx.nn.Linear(2, 3, key=key))(
        jax.random.split(key, 4)
    )
    ensemble = ee.from_stacked(stacked)  # four members
    ```
    """
    check_no_text_arrays(model, name="from_stacked")
    stacked, rest = eqx.partition(_axes.strip_weak_types(model), _axes_mask(model, shared))
    has_arrays = any(map(_axes.is_array, jax.tree.leaves(stacked)))
    if ids is None or has_arrays:
        num_members = check_member_axis(stacked, axis=0, name="from_stacked")
        ids = num_members if ids is None else ids
    return Ensemble(stacked, rest, _keys.member_ids(ids, name="from_stacked"))


def stack(
    models: Iterable[M], *, ids: Any = None, shared: Where | None = None, promote_scalars: bool = False
) -> Ensemble[M]:
    """Stacks a list of models into one [`eqx_ensemble.Ensemble`][].

    [`eqx_ensemble.tree.stack`][] does the same for PyTrees of any kind: it returns a tree of the same type, without ids
    and shared leaves.

    **Arguments:**

    - `models`: models that differ only in the values of their arrays. Equal ones cause a warning, except for one model
        repeated: `[model] * 8`.
    - `ids`: the members' ids `(members,)`; `0, 1, 2, ...` if not given.
    - `shared`: selects the nodes that all members use, as in `equinox.tree_at`: `lambda model: model.trunk`. They
        must be equal in all models, and are stored once.
    - `promote_scalars`: stack Python floats that differ into an array instead of raising an error. They stay constants
        in training unless `trainable` of [`eqx_ensemble.fit`][] selects them.

    **Raises:** `MemberMismatchError` if the models differ in anything but array values, naming leaf, members and both
    values; `TypeError` for a single model, and for NumPy arrays of strings or objects, which JAX cannot hold;
    `ValueError` for an empty list or an invalid `shared`.

    ```python
    models = [eqx.nn.MLP(2, 1, 8, 1, key=k) for k in jax.random.split(key, 3)]
    ensemble = ee.stack(models)
    ```
    """
    models = check_trees(models, name="stack", noun="model")
    check_flag(promote_scalars, "promote_scalars", name="stack")
    rules = Rules(scalars="floats" if promote_scalars else "equal")
    compare_trees(models, name="stack", rules=rules)
    for model in models:
        check_no_text_arrays(model, name="stack")
    stacked = _axes.strip_weak_types(_tree.stack(models, promote_scalars=promote_scalars))
    warn_of_equal_models(stacked, models)
    numbers = jax.tree.map(lambda x, y: _axes.is_array(x) and type(y) is float, stacked, models[0])
    stacked, rest = eqx.partition(stacked, _axes_mask(stacked, shared))
    if shared is not None:
        unstacked = [eqx.filter(model, _axes_mask(model, shared), inverse=True) for model in models]
        rules = Rules(needs="models whose shared nodes are equal", noun="model")
        compare_trees(unstacked, name="stack", rules=rules)
        check_equal_shared(unstacked, name="stack")
        rest = _axes.strip_weak_types(unstacked[0])
    rest = mark_numbers(stacked, rest, numbers)
    return Ensemble(stacked, rest, _keys.member_ids(len(models) if ids is None else ids, name="stack"))


def mark_numbers(stacked: PyTree, shared: PyTree, numbers: PyTree) -> PyTree:
    """Marks stacked leaves that are Python floats in one member, by zeros in the shared part of the model."""
    mark = lambda x, y, is_number: 0.0 if is_number and x is not None else y
    return jax.tree.map(mark, stacked, shared, numbers, is_leaf=lambda x: x is None)


def number_flags(stacked: PyTree, shared: PyTree) -> list[bool]:
    """For each leaf of `stacked`, also in nested ensembles, whether `shared` marks it as Python floats."""
    is_node = lambda x: x is None or isinstance(x, Ensemble)
    flags = []
    for x, y in zip(jax.tree.leaves(stacked, is_leaf=is_node), jax.tree.leaves(shared, is_leaf=is_node), strict=True):
        if isinstance(x, Ensemble) and isinstance(y, Ensemble):
            flags += number_flags(x.stacked, y.shared)
            flags += [False] * len(jax.tree.leaves((x.shared, x.ids)))
        elif x is not None:
            flags.append(type(y) is float)
    return flags


def _axes_mask(model: PyTree, shared: Where | None) -> PyTree:
    mask = jax.tree.map(_axes.is_array, model)
    if shared is None:
        return mask
    return check_selection(lambda tree: eqx.tree_at(shared, tree, replace_fn=_all_false), mask)


def _all_false(node: PyTree) -> PyTree:
    return jax.tree.map(lambda _: False, node)
