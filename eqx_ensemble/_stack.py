import abc
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._caller import caller
from ._check import MemberMismatchError, check_flag
from ._ensemble import Ensemble, M, join
from ._leaves import is_key
from ._pytree import PyTree
from .tree._engine import Rules, check_trees, combine_trees, compare_trees, map_columns

Where = Callable[[Any], Any]
"""Selects nodes of a model, as in `equinox.tree_at`."""


def stack(models: Iterable[M], *, shared: Where | None = None, promote_scalars: bool = False) -> Ensemble[M]:
    """Makes an ensemble of a list of models, which differ only in the values of their arrays.

    **Arguments:**

    - `models`: ordinary models, all of the same structure.
    - `shared`: selects nodes that all members share, as in `equinox.tree_at`: `lambda model: model.trunk`. They are
        equal in all models, are kept once, and are constants in training.
    - `promote_scalars`: stack Python floats that differ, such as dropout rates, into arrays `(members,)`.

    **Returns:** the ensemble.

    **Raises:** `MemberMismatchError` with leaf and member if models differ in anything else.

    ```python
    models = [eqx.nn.MLP(2, 1, 8, 1, key=key) for key in jax.random.split(key, 4)]
    ensemble = ee.stack(models)
    ensemble.stacked.layers[0].weight.shape  # (4, 8, 2)
    ```
    """
    check_flag(promote_scalars, "promote_scalars")
    models = check_trees(models, noun="model")
    if isinstance(models[0], tuple) and any(isinstance(part, eqx.nn.State) for part in models[0]):
        raise TypeError(
            "`stack` needs models without their states, got pairs of `equinox.nn.make_with_state`.\n"
            "Pass `stack([model for model, _ in pairs])`, and `tree.stack([state for _, state in pairs])`."
        )
    columns = compare_trees(models, rules=Rules(scalars="floats" if promote_scalars else "equal"))
    flags = _flags(models[0], shared)
    # Leaves that are tied in every model get one result, and stay tied.
    stacked = map_columns(_stack_column, columns)
    leaves, treedef = jtu.tree_flatten(stacked, is_leaf=lambda x: x is None)
    first = jtu.tree_leaves(models[0], is_leaf=lambda x: x is None)
    for (path, x), flag in zip(jtu.tree_flatten_with_path(stacked, is_leaf=lambda x: x is None)[0], flags, strict=True):
        if flag and eqx.is_array(x):
            value = np.asarray(jax.random.key_data(x) if is_key(x) else x)
            if not (value == value[:1]).all():
                raise MemberMismatchError(
                    f"`stack` needs shared arrays that are equal in all models; those at `{jtu.keystr(path)}` differ."
                )
    leaves = [
        jnp.asarray(y) if flag and eqx.is_array(y) else x for x, y, flag in zip(leaves, first, flags, strict=True)
    ]
    return Ensemble(jtu.tree_unflatten(treedef, leaves), _axes(leaves, flags))


def _stack_column(leaves: list) -> Any:
    if eqx.is_array(leaves[0]):
        return jnp.stack([jnp.asarray(x) for x in leaves])
    if type(leaves[0]) is float and len({repr(x) for x in leaves}) > 1:
        return jnp.asarray(leaves, float)
    return leaves[0]


def from_stacked(stacked: M, *, shared: Where | None = None) -> Ensemble[M]:
    """Makes an ensemble of a Module that is stacked already, such as `equinox.filter_vmap(make)(keys)`.

    **Arguments:**

    - `stacked`: the Module, each array `(members, ...)`.
    - `shared`: selects nodes without that axis, which all members share.

    **Raises:** `MemberMismatchError` if arrays disagree on the number of members; `TypeError` for a list of models.

    ```python
    make = lambda key: eqx.nn.MLP(2, 1, 8, 1, key=key)
    stacked = eqx.filter_vmap(make)(jax.random.split(key, 4))
    ee.from_stacked(stacked)[0]  # an eqx.nn.MLP
    ```
    """
    if isinstance(stacked, list | tuple):
        raise TypeError("`from_stacked` needs one stacked Module, got a list: `stack(models)` makes an ensemble of it.")
    return of_stacked(stacked, shared)


def of_stacked(stacked: M, shared: Where | None) -> Ensemble[M]:
    """`from_stacked` of any PyTree."""
    leaves = jax.tree.leaves(stacked, is_leaf=lambda x: x is None)
    return Ensemble(stacked, _axes(leaves, _flags(stacked, shared)))


def _flags(model: PyTree, shared: Where | None) -> list[bool]:
    """Which leaves of a model, `None` included, are shared."""
    count = len(jax.tree.leaves(model, is_leaf=lambda x: x is None))
    if shared is None:
        return [False] * count
    mark = lambda node: jax.tree.map(lambda _: _SHARED, node, is_leaf=lambda x: x is None)
    marked = eqx.tree_at(shared, model, replace_fn=mark, is_leaf=lambda x: x is None)
    return [x is _SHARED for x in jax.tree.leaves(marked, is_leaf=lambda x: x is None)]


_SHARED = object()


def _axes(leaves: list, flags: list[bool]) -> tuple[int | None, ...]:
    return tuple(0 if eqx.is_array(x) and not flag else None for x, flag in zip(leaves, flags, strict=True))


def concatenate(ensembles: Iterable[Any]) -> Any:
    """Concatenates the members of ensembles of one architecture, of training states, or of runs, in the order given.

    **Arguments:**

    - `ensembles`: ensembles, training states or runs. What their members share must be equal.

    **Returns:** the same type.

    **Raises:** `MemberMismatchError` if they do not fit together.

    ```python
    make, keys = lambda key: eqx.nn.Linear(2, 1, key=key), ee.member_keys(key, 6)
    old, new = ee.build(make, 4, key=key), ee.build(make, key=keys[4:])
    ee.concatenate([old, new])  # the same members as ee.build(make, 6, key=key)
    ```
    """
    listed = check_trees(ensembles, noun="ensemble")
    kinds = {type(x).__name__ for x in listed}
    if len(kinds) > 1 or not isinstance(listed[0], eqx.Module):
        raise TypeError(
            f"`{caller()}` needs ensembles, training states or runs, all of one kind; got {', '.join(sorted(kinds))}.\n"
            "Make an ensemble of models: `stack(models)`."
        )
    own = getattr(listed[0], "_join", join)
    return own(listed)


class AbstractAdapter(eqx.Module):
    """A layer whose weight is a product of its arrays: averaging the arrays does not average the weights."""

    @abc.abstractmethod
    def dense(self, index: int) -> Any:
        """The equivalent ordinary layer."""


def merge_adapters(model: M) -> M:
    """The model with ordinary layers for those with adapters."""
    is_adapter = lambda x: isinstance(x, AbstractAdapter)
    return jax.tree.map(lambda x: x.dense(0) if is_adapter(x) else x, model, is_leaf=is_adapter)


def average_parameters(ensemble: Ensemble[M], weights: Any = None) -> M:
    """Averages the members' weights into one model (a model soup).

    Floating-point arrays are averaged in at least float32; other arrays must be equal in all members.
    [Adapters](../api/methods/efficient.md#adapters) are merged into their layers first, whose weights are averaged.

    **Arguments:**

    - `ensemble`: the ensemble.
    - `weights`: `(members,)`, normalised by their sum; uniform if not given.

    **Returns:** one ordinary model.

    **Raises:** `ValueError` for a wrong number of weights, or weights that are not finite or sum to 0;
    `MemberMismatchError` if other arrays differ between members.

    ??? cite
        [Model soups](https://arxiv.org/abs/2203.05482), Wortsman et al., 2022.
    """
    models = [merge_adapters(model) for model in ensemble.unstack()]
    mean = combine_trees([eqx.filter(model, eqx.is_inexact_array) for model in models], weights, mean=True)
    rest = [eqx.filter(model, eqx.is_inexact_array, inverse=True) for model in models]
    value = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)
    for (path, x), *others in zip(jtu.tree_leaves_with_path(rest[0]), *map(jax.tree.leaves, rest[1:]), strict=True):
        if eqx.is_array(x) and not all(np.array_equal(value(x), value(y)) for y in others):
            raise MemberMismatchError(
                f"`average_parameters` averages floating-point arrays; the {x.dtype} array at `{jtu.keystr(path)}` "
                "differs between members, and has no mean of its dtype."
            )
    return eqx.combine(mean, rest[0])
