from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import numpy as np

from .. import tree
from .._ensemble import Ensemble, number_flags
from .._pytree import PyTree
from ._check_member import check_same_choice, check_trainable, check_trained, explain_trainable

T = TypeVar("T")


class Frozen(eqx.Module, Generic[T]):
    """A part of a member that is never trained, regardless of `trainable`.

    Its arrays have no gradient, no optimiser state and no weight decay. Calling it calls the value, with gradients
    through its inputs. It is saved, exported and indexed with its member.

    **Arguments:**

    - `value`: any PyTree, such as a pretrained Module.

    ```python
    class Model(eqx.Module):
        trunk: ee.train.Frozen
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(jax.nn.relu(self.trunk(x)))


    def make(key):
        trunk = ee.train.Frozen(eqx.nn.Linear(3, 8, key=key))  # or pretrained
        return Model(trunk, eqx.nn.Linear(8, 1, key=key))


    state = ee.train.init(ee.build(make, 4, key=key), optax.adamw(1e-3), key=key)
    state.params.trunk.value.weight, state.params.head.weight.shape  # (None, (4, 1, 8))
    ```
    """

    value: T

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value with its arrays as constants."""
        stop = lambda x: jax.lax.stop_gradient(x) if eqx.is_inexact_array(x) else x
        fn: Any = jax.tree.map(stop, self.value)
        return fn(*args, **kwargs)


def frozen_flags(tree: PyTree) -> list[bool]:
    """Whether each leaf of a tree is inside a `Frozen` node."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Frozen))
    return [isinstance(node, Frozen) for node in nodes for _ in jax.tree.leaves(node)]


Trainable = PyTree | Callable[[Any], bool]
"""A prefix of a member's tree with booleans and functions of a leaf, as in `equinox.partition`."""


def partition_trainable(ensemble: Ensemble, trainable: Trainable) -> tuple[PyTree, PyTree]:
    """Splits an ensemble's stacked leaves into trained and frozen ones. Raises if none is trained."""
    params, frozen = split_trainable(ensemble, trainable)
    check_trained(params)
    return params, frozen


def split_trainable(ensemble: Ensemble, trainable: Trainable) -> tuple[PyTree, PyTree]:
    """The same, but none needs to be trained; `trainable` is called with the leaves of one member."""
    trainable = _as_test(trainable)
    check_trainable(trainable)
    stacked = ensemble.arrays
    leaves, treedef = jax.tree.flatten(stacked)
    flags = number_flags(stacked, ensemble.shared)

    def select(own: list[Any]) -> list[bool]:
        own = [0.0 if flag else x for x, flag in zip(own, flags, strict=True)]
        member = jax.tree.unflatten(treedef, own)
        with explain_trainable():
            kept = eqx.filter(member, jax.tree.map(_of_floats, trainable), replace=_LeftOut)
        return [x is not _LeftOut for x in jax.tree.leaves(kept)]

    if trainable is eqx.is_inexact_array:  # depends on dtypes only: no member is taken
        mask = select(leaves)
    else:
        mask, last = (select(tree.take(leaves, member)) for member in (0, -1))
        check_same_choice(mask, last, stacked)
    mask = [kept and not frozen for kept, frozen in zip(mask, frozen_flags(stacked), strict=True)]
    return eqx.partition(stacked, jax.tree.unflatten(treedef, mask))


class _LeftOut:
    """Marks a leaf that is not trained."""


def _as_test(trainable: Trainable) -> Trainable:
    """A Module that is a function, and no tree of booleans and functions, as a function that is no tree."""
    is_tree = all(isinstance(leaf, bool | np.bool_) or callable(leaf) for leaf in jax.tree.leaves(trainable))
    if not isinstance(trainable, eqx.Module) or not callable(trainable) or is_tree and jax.tree.leaves(trainable):
        return trainable
    return lambda leaf: trainable(leaf)


def _of_floats(test: Any) -> Any:
    """A test of leaves that accepts Python floats, which have no shape."""
    if not callable(test):
        return test

    def ask(leaf: Any) -> bool:
        if type(leaf) is not float:
            return bool(test(leaf))
        try:
            return bool(test(leaf))
        except (AttributeError, TypeError):  # a test of arrays; its own errors show on arrays
            return False

    return ask
