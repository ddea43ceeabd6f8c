from typing import Any, Generic, TypeVar

import equinox as eqx
import jax

from .._pytree import PyTree

T = TypeVar("T")


class Frozen(eqx.Module, Generic[T]):
    """A part of a member that is never trained, regardless of `trainable`.

    [`eqx_ensemble.fit`][], [`eqx_ensemble.train.init`][] and all functions that build on them exclude its arrays from
    the trained leaves: they have no gradient, no optimiser state and no weight decay. Calling it calls the value, with
    gradients through its inputs, but not through its arrays. In all other respects it is an ordinary node: saved,
    exported and indexed with its member.

    In a loop of your own, without a training state, the gradient of its arrays is zero; an optimiser that decays
    weights would still change them.

    **Arguments:**

    - `value`: any PyTree, such as a pretrained Module.

    ```python
    class Model(eqx.Module):
        trunk: ee.train.Frozen
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(jax.nn.relu(self.trunk(x)))


    def make(key):
        trunk_key, head_key = jax.random.split(key)
        trunk = ee.train.Frozen(eqx.nn.Linear(3, 8, key=trunk_key))
        return Model(trunk, eqx.nn.Linear(8, 1, key=head_key))


    ensemble = ee.build(make, 4, key=key)
    state = ee.train.init(ensemble, optax.adamw(1e-3), key=key)
    state.params.trunk.value.weight, state.params.head.weight.shape
    # (None, (4, 1, 8))
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
