from collections.abc import Callable

import equinox as eqx
import jax

from .._pytree import PyTree
from ..sharding._layout import FREE, Layout, constrain_members
from ..sharding._shard import pad_members
from ._plans import AbstractPlan


class ShardedPlan(AbstractPlan):
    """Members sharded over the devices of a mesh; each device runs its own under the inner plan.

    Members that do not divide evenly are padded with copies of the last one, whose results are dropped: otherwise
    every device would compute all of them.
    """

    inner: AbstractPlan
    layout: Layout = eqx.field(static=True)

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` over the members of all devices at once."""
        layout = self.layout
        count = jax.tree.leaves(arrays)[0].shape[0]
        arrays = constrain_members(pad_members(arrays, layout), layout)
        own = constrain_members(
            jax.tree.map(lambda x: x.reshape(layout.members, x.shape[0] // layout.members, *x.shape[1:]), arrays),
            layout,
        )
        # The axis name keeps constraints on one member's layout valid inside.
        out = jax.vmap(lambda some: self.inner.run(fn, some), spmd_axis_name="members")(own)
        out = constrain_members(jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), out), layout)
        if layout.width(count) == count:
            return out
        # Without padding they do not divide evenly. If the compiler still splits them, like members whose weights are
        # split over several devices, this mesh cannot express the sharding of the result.
        whole = lambda x: jax.lax.with_sharding_constraint(x, layout.sharding(None, *[FREE] * (x.ndim - 1)))
        return jax.tree.map(lambda x: whole(x[:count]), out)

    def width(self, num_members: int) -> int:
        """The members that all devices run at a time."""
        devices = self.layout.members
        return min(devices * self.inner.width(-(-num_members // devices)), num_members)

    @property
    def compiles(self) -> bool:
        """Whether the inner plan compiles."""
        return self.inner.compiles


def sharded_plan(plan: AbstractPlan, layout: Layout | None) -> AbstractPlan:
    """The plan on the devices of a layout, if there is one."""
    return plan if layout is None else ShardedPlan(plan, layout)
