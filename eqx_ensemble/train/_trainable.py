from typing import Any, Generic, TypeVar

import equinox as eqx
import jax

from .._ensemble import Ensemble

T = TypeVar("T")

Trainable = Any
"""A prefix of a member's tree with booleans and functions of a leaf, as in `equinox.partition`."""


class Frozen(eqx.Module, Generic[T]):
    """A part of a member that is never trained, regardless of `trainable`.

    Its arrays have no gradient, no optimiser state and no weight decay. Calling it calls the value, with gradients
    through its inputs.

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


def trained_leaves(
    ensemble: Ensemble, trainable: Trainable = eqx.is_inexact_array, *, together: bool = False
) -> tuple[bool, ...]:
    """Whether each leaf of an ensemble is trained, `None` included; shared ones only if they are trained together.

    `trainable` is called with the leaves of one member.
    """
    if isinstance(trainable, eqx.Module) and callable(trainable) and not jax.tree.leaves(trainable):
        trainable = lambda x, test=trainable: test(x)  # a Module without leaves would be an empty tree
    is_none = lambda x: x is None
    leaves, treedef = jax.tree.flatten(ensemble.stacked, is_leaf=is_none)
    one = [x[0] if axis == 0 and eqx.is_array(x) else x for x, axis in zip(leaves, ensemble.axes, strict=True)]
    # Whether a leaf is inside a `Frozen`, by the path of nodes.
    nodes = jax.tree.leaves(ensemble.stacked, is_leaf=lambda x: x is None or _is_frozen(x))
    frozen = [_is_frozen(node) for node in nodes for _ in jax.tree.leaves(node, is_leaf=is_none)]
    chosen = jax.tree.leaves(eqx.filter(jax.tree.unflatten(treedef, one), trainable), is_leaf=is_none)
    trained = tuple(
        eqx.is_array(x) and not is_frozen and (axis == 0 or (together and eqx.is_inexact_array(x)))
        for x, is_frozen, axis in zip(chosen, frozen, ensemble.axes, strict=True)
    )
    if not any(trained):
        raise ValueError("`trainable` selects no array of the members that can be trained.")
    rows = zip(trained, ensemble.axes, strict=True)
    if together and not any(chosen and axis is None for chosen, axis in rows):
        raise ValueError(
            "`train.Together` trains floating-point arrays that members share, and this ensemble has none.\n"
            "Select them where it is made: `build(make, n, shared=lambda model: model.bounds)`."
        )
    return trained


def _is_frozen(node: Any) -> bool:
    return isinstance(node, Frozen)
