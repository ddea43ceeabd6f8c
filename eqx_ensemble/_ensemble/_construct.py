from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import _axes, _keys
from .. import tree as _tree
from .._axes import check_member_axis
from .._check import check_flag, is_key, is_member_array, is_traced
from .._ids import open_all
from .._pytree import PyTree
from .._warnings import warn
from ..tree._engine import Rules, check_trees, compare_trees
from ._check import check_no_text_arrays, check_selection
from ._cut import check_equal_shared
from ._ensemble import Ensemble, M, Where


def warn_of_equal_members(stacked: PyTree, keys: Any, arguments: Iterable[str]) -> None:
    """Warns if all members are equal, because of equal keys or a `make` that does not use its key.

    Constant arrays, such as zeros, involve no randomness and are ignored.
    """
    count, arguments = len(keys), list(arguments)
    arrays = [x for x in jax.tree.leaves((stacked, keys)) if is_member_array(x)]
    if count < 2 or any(is_traced(x) or not _is_here(x) for x in arrays):
        return
    again = None if arguments else _first_repeat(keys)
    if again is not None:
        reason = f"`keys[{again[1]}]` is `keys[{again[0]}]`: make keys with `jax.random.split(key, {count})`."
    elif _all_equal([x for x in arrays[:-1] if x.size]):
        reason = f"`make` does not use its key: write `lambda {', '.join(['key', *arguments])}: Model(..., key=key)`."
    else:
        return
    warn(
        f"`build` made identical members, which stay identical if trained on the same rows.\n{reason} "
        f"If they are meant to be identical, write `stack([model] * {count})`."
    )


def warn_of_equal_models(stacked: PyTree, models: list[Any]) -> None:
    """Warns if several models are equal, as those made from one key; one model, repeated, is meant to be."""
    arrays = [x for x in jax.tree.leaves(stacked) if is_member_array(x)]
    if all(model is models[0] for model in models) or any(is_traced(x) or not _is_here(x) for x in arrays):
        return
    if _all_equal([x for x in arrays if x.size]):
        warn(
            "`stack` got identical models, which stay identical if trained on the same rows.\n"
            "Make each with a key of its own: `[make(k) for k in jax.random.split(key, n)]`. If they are meant to be "
            f"identical, write `stack([model] * {len(models)})`."
        )


def _is_here(x: Any) -> bool:
    """Whether this process holds the whole array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def _all_equal(arrays: list[Any]) -> bool:
    """Whether all members are equal, and not only in constants. Small arrays come first: one usually decides."""
    arrays = sorted(arrays, key=lambda x: x.size)
    return all(map(_alike, arrays)) and not all(map(_constant, arrays))


def _first_repeat(keys: Any) -> tuple[int, int] | None:
    """The first two members with the same key."""
    seen: dict[bytes, int] = {}
    for i, key in enumerate(_numbers(keys)):
        if key.tobytes() in seen:
            return seen[key.tobytes()], i
        seen[key.tobytes()] = i
    return None


def _alike(x: Any) -> bool:
    numbers = _numbers(x)
    return bool((numbers[1] == numbers[0]).all() and (numbers == numbers[:1]).all())


def _constant(x: Any) -> bool:
    """Whether an array involves no randomness: one value, or counters such as the ids of a nested ensemble."""
    if not is_key(x) and not jnp.issubdtype(x.dtype, jnp.inexact):
        return True
    numbers = _numbers(x)
    return bool((numbers == numbers.reshape(-1)[0]).all())


def _numbers(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def from_stacked(model: M, *, ids: Any = None, shared: Where | None = None) -> Ensemble[M]:
    """Makes an [`eqx_ensemble.Ensemble`][] of a stacked Module, such as `eqx.filter_vmap(make)(keys)`.

    **Arguments:**

    - `model`: a model whose array leaves all have the leading `members` axis.
    - `ids`: the members' ids `(members,)`; by default `0, 1, 2, ...`. Needed for a model without stacked arrays.
    - `shared`: as in [`eqx_ensemble.build`][]; the arrays of these nodes have no `members` axis.

    **Raises:** `MemberMismatchError` if array leaves lack the axis, or disagree on the number of members; `TypeError`
    if `ids` are needed, and for NumPy arrays of strings or objects; `ValueError` for an invalid `shared`.

    ```python
    make = lambda key: eqx.nn.Linear(2, 3, key=key)
    ensemble = ee.from_stacked(eqx.filter_vmap(make)(jax.random.split(key, 4)))
    ```
    """
    check_no_text_arrays(model)
    stacked, rest = eqx.partition(_axes.strip_weak_types(model), _axes_mask(model, shared))
    has_arrays = any(map(_axes.is_array, jax.tree.leaves(stacked)))
    if ids is None or has_arrays:
        num_members = check_member_axis(stacked, axis=0)
        ids = num_members if ids is None else ids
    return Ensemble(stacked, rest, _keys.member_ids(ids))


def stack(
    models: Iterable[M], *, ids: Any = None, shared: Where | None = None, promote_scalars: bool = False
) -> Ensemble[M]:
    """Stacks a list of models into one [`eqx_ensemble.Ensemble`][].

    **Arguments:**

    - `models`: models that differ only in the values of their arrays. Equal models cause a warning, except
        `[model] * 8`.
    - `ids`: the members' ids `(members,)`; by default `0, 1, 2, ...`.
    - `shared`: as in [`eqx_ensemble.build`][]; these nodes must be equal in all models.
    - `promote_scalars`: stack Python floats that differ instead of raising an error. They stay constants in training
        unless `trainable` of [`eqx_ensemble.fit`][] selects them.

    **Raises:** `MemberMismatchError` if the models differ in anything but array values; `TypeError` for a single model,
    and for NumPy arrays of strings or objects; `ValueError` for an empty list or an invalid `shared`.

    ```python
    models = [eqx.nn.MLP(2, 1, 8, 1, key=k) for k in jax.random.split(key, 3)]
    ensemble = ee.stack(models)
    ```
    """
    models = check_trees(models, noun="model")
    check_flag(promote_scalars, "promote_scalars")
    rules = Rules(scalars="floats" if promote_scalars else "equal")
    opened = [open_all(model) for model in models]
    compare_trees(opened, rules=rules)
    for model in models:
        check_no_text_arrays(model)
    stacked = _axes.strip_weak_types(_tree.stack(models, promote_scalars=promote_scalars))
    warn_of_equal_models(stacked, models)
    numbers = jax.tree.map(lambda x, y: _axes.is_array(x) and type(y) is float, stacked, opened[0])
    mask = _axes_mask(stacked, shared)
    stacked, rest = eqx.partition(stacked, mask)
    if shared is not None:
        unstacked = [eqx.filter(model, mask, inverse=True) for model in opened]
        rules = Rules(needs="models whose shared nodes are equal", noun="model")
        compare_trees(unstacked, rules=rules)
        check_equal_shared(unstacked)
        rest = _axes.strip_weak_types(unstacked[0])
    rest = mark_numbers(stacked, rest, numbers)
    return Ensemble(stacked, rest, _keys.member_ids(len(models) if ids is None else ids))


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
            flags += [False] * (len(jax.tree.leaves(x)) - len(jax.tree.leaves(x.stacked)))
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
