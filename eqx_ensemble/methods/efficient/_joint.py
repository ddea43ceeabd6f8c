from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._keys import member_keys
from ..._map import is_per_member, view
from ..._marks import Each
from ..._pytree import PyTree
from .._layers import AbstractSubstitute, is_substitute, own_flags, with_weights
from ._layers import redraw

AXIS = "submembers"
"""The named axis over which sub-members are mapped; layers of a joint forward pass communicate over it."""


class JoinInputs(AbstractSubstitute):
    """A first layer that takes the concatenated inputs of all sub-members."""

    own: ClassVar[tuple[str, ...]] = ()
    layer: Any
    num_submembers: int = eqx.field(static=True)
    size: Any = eqx.field(static=True)

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The output, which is the same for all sub-members, so that the following layers are computed once."""
        together = jax.lax.all_gather(x, AXIS)
        return self.layer(together.reshape((-1, *x.shape[1:])))

    def dense(self, index: int) -> Any:
        """The layer for equal inputs: its weight is summed over the parts."""
        weight = self.layer.weight
        parts = weight.reshape((weight.shape[0], self.num_submembers, -1, *weight.shape[2:]))
        layer = redraw(self.layer, jax.random.key(0), in_size=self.size)
        return with_weights(layer, parts.sum(axis=1), self.layer.bias)


class SelectOutput(AbstractSubstitute):
    """A last layer whose output has one part per sub-member."""

    own: ClassVar[tuple[str, ...]] = ()
    layer: Any
    num_submembers: int = eqx.field(static=True)
    size: Any = eqx.field(static=True)

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The output of this sub-member."""
        y = self.layer(x)
        parts = y.reshape((self.num_submembers, *(() if self.size == "scalar" else (self.size,)), *y.shape[1:]))
        return parts[jax.lax.axis_index(AXIS)]

    def dense(self, index: int) -> Any:
        """The layer with the weight of this sub-member."""
        part = lambda x: x.reshape((self.num_submembers, -1, *x.shape[1:]))[index]
        layer = redraw(self.layer, jax.random.key(0), out_size=self.size)
        return with_weights(layer, part(self.layer.weight), None if self.layer.bias is None else part(self.layer.bias))


M = TypeVar("M")


class JointEnsemble(eqx.Module, Generic[M]):
    """Several sub-members that are trained jointly: ONE member of an [`eqx_ensemble.Ensemble`][].

    `stack([joint])` has one joint ensemble; `build(make, 5, key=key)` with a `make` that converts has five independent
    ones. Divergence of one sub-member affects all.

    **Attributes:** `model`, the converted model, with arrays `(submembers, ...)` and shared ones; `num_submembers`.

    ```python
    model = eqx.nn.MLP(3, 1, 16, 2, key=key)
    joint = ee.methods.efficient.batch_ensemble(model, 4, key=key)
    ee.predict(ee.stack([joint]), jnp.ones((10, 3))).shape  # (1, 10, 4, 1)
    ```
    """

    model: M
    num_submembers: int = eqx.field(static=True)

    def __call__(self, *args: Any, key: Any = None, **kwargs: Any) -> PyTree:
        """Calls every sub-member with one example: `(...)` in, `(submembers, ...)` out.

        An input marked [`eqx_ensemble.Each`][] has one value per sub-member. Each has its own key, derived from `key`,
        and state, `tree.stack([state] * joint.num_submembers)`; with `mimo` all share one.
        """
        if key is not None:
            kwargs["key"] = submember_keys(self, key)
        call: Any = lambda model, args, kwargs: model(*args, **kwargs)
        return map_submembers(call, self, args, kwargs)


def has_one_pass(joint: JointEnsemble[Any]) -> bool:
    """Whether the sub-members share one forward pass."""
    nodes = jax.tree.leaves(joint.model, is_leaf=is_substitute)
    return any(isinstance(node, JoinInputs) for node in nodes)


def submember_keys(joint: JointEnsemble[Any], key: Any) -> Any:
    """One key per sub-member, or the key itself if all share one forward pass."""
    if has_one_pass(joint) or isinstance(key, Each):
        return key
    return Each(member_keys(key, joint.num_submembers, purpose="submember"))


def map_submembers(fn: Callable[..., PyTree], joint: JointEnsemble[Any], *inputs: PyTree) -> PyTree:
    """Maps `fn(model, *inputs)` over the sub-members, with a named axis for layers that join them.

    Inputs are shared unless they are marked `Each`. States are per sub-member, or shared in a joint forward pass.
    """
    is_state = lambda x: isinstance(x, eqx.nn.State)
    has_one_state = has_one_pass(joint)
    is_mapped = lambda x: isinstance(x, Each) or (is_state(x) and not has_one_state)
    own, shared = eqx.partition(joint.model, own_flags(joint.model))
    mapped, common = eqx.partition(inputs, jax.tree.map(is_mapped, inputs, is_leaf=is_per_member))

    def one(own: PyTree, mapped: PyTree, _: Array) -> PyTree:
        args = jax.tree.map(view, eqx.combine(mapped, common), is_leaf=is_per_member)
        return fn(eqx.combine(own, shared), *args)

    # Of `mimo`, no array has an axis of sub-members; and JAX compares the sizes of arrays, but not with `axis_size`.
    out = eqx.filter_vmap(one, axis_name=AXIS)(own, mapped, jnp.arange(joint.num_submembers))
    if not has_one_state:
        return out
    first = lambda x: jax.tree.map(lambda leaf: leaf[0], x) if is_state(x) else x
    return jax.tree.map(first, out, is_leaf=is_state)
