import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import _check
from .._cores import num_cores
from .._pytree import PyTree
from .._sharding import FREE, Layout, constrain_members, pad_members

# With fewer members at once, compilers order sums differently, which changes the others' last bits.
FEWEST = 4


class Work(NamedTuple):
    """The work to run under a plan, as far as the choice of the plan depends on it.

    **Attributes:**

    - `fn`, `args`: one step is `fn(plan, *args)`.
    - `num_members`: the number of members on each device.
    - `steps_inside`: whether each member does several steps in a row. If members take turns, their weights then stay in
        the cache, while single steps must fetch them.
    - `scan`: whether these steps are one compiled loop; `None` if not given.
    - `steps`: the number of steps between two looks at their results, at least; 0 if members cannot be divided.
    - `copied`: the bytes that a call with some of the members copies.
    - `stops`: whether members may stop before others.
    """

    fn: Callable[..., Any]
    args: tuple[PyTree, ...]
    num_members: int
    steps_inside: bool = False
    scan: bool | None = None
    steps: int = 0
    copied: int = 0
    stops: bool = False


class Blocks(NamedTuple):
    """Blocks of members, all of the same size, each of which runs under `plan`; `cores` may run at the same time."""

    plan: "AbstractPlan"
    members: list[slice]
    cores: int


def _as_scan(value: Any) -> bool | None:
    _check.check_optional_flag(value, "scan")
    return value


class AbstractPlan(eqx.Module):
    """Defines how a function of one member is run for all members. It affects only time and memory.

    **Arguments:** of every plan, by name.

    - `scan`: for [`eqx_ensemble.fit`][] with data in arrays: whether many steps run in one compiled loop (`True`), or
        each step as its own compiled call (`False`). By default a loop, except for convolutions on a CPU, which XLA
        runs many times slower inside one.

    A plan of your own defines `run`, and `width` if it runs fewer than all members at a time ([an
    example](../guide/extending.md#a-plan)); and the class attribute `one_by_one = True` if `fit`, outside compiled
    loops, is to call a program of one member for each in turn.
    """

    one_by_one: ClassVar[bool] = False
    scan: bool | None = eqx.field(default=None, static=True, kw_only=True, converter=_as_scan)

    @abc.abstractmethod
    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Applies `fn` to every member's part of `arrays`, a tree of arrays; results gain a leading `members` axis."""

    def width(self, num_members: int) -> int:
        """The number of members, of `num_members`, that run at a time; memory grows with it."""
        return num_members

    def smaller(self, num_members: int) -> "AbstractPlan | None":
        """The plan to try after this one ran out of memory: half as many members at a time; `None` below one."""
        half = min(self.width(num_members), num_members) // 2
        if half < 1:
            return None
        return Sequential(scan=self.scan) if half == 1 else Chunked(half, scan=self.scan)

    @property
    def compiles(self) -> bool:
        """Whether `run` compiles even outside `jax.jit`, as `jax.lax.map` does; `map_members` then caches the
        program.
        """
        return True

    def blocks(self, num_members: int) -> Blocks:
        """How [`eqx_ensemble.fit`][] divides members into blocks, which run at the same time; by default not at all."""
        return Blocks(self, [slice(0, num_members)], num_cores())

    def begin(self, work: Work) -> "AbstractPlan":
        """The plan under which `work` runs: by default this one."""
        return self

    def __repr__(self) -> str:
        """The plan as code."""
        fields = sorted(dataclasses.fields(self), key=lambda f: f.kw_only is True)
        fields = [f for f in fields if f.repr and getattr(self, f.name) != f.default]
        shown = [f"{'' if f.kw_only is False else f'{f.name}='}{getattr(self, f.name)!r}" for f in fields]
        return f"{type(self).__name__}({', '.join(shown)})"


# The names of the mapped axes, for means over members.
_MEMBERS, _DEVICES = "eqx_ensemble.members", "eqx_ensemble.devices"


def axes_of(layout: Layout | None) -> tuple[str, ...]:
    """The names of the mapped axes under `NamedVmap`."""
    return (_MEMBERS,) if layout is None else (_DEVICES, _MEMBERS)


class Vmap(AbstractPlan):
    """All members at once, by `jax.vmap`: the fastest plan if one member does not saturate the machine."""

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` over all members at once."""
        return jax.vmap(fn)(arrays)

    @property
    def compiles(self) -> bool:
        """False: `jax.vmap` compiles nothing."""
        return False


class NamedVmap(Vmap):
    """`Vmap` of an axis with a name. Functions traced under it are traced again elsewhere."""

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` over all members at once."""
        return jax.vmap(fn, axis_name=_MEMBERS)(arrays)


class Chunked(AbstractPlan):
    """`size` members at a time: needs the memory of one chunk. The last chunk may be smaller.

    **Arguments:**

    - `size`: members per chunk.
    """

    size: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        _check.check_positive_int(self.size, "size")

    def width(self, num_members: int) -> int:
        """The members of a chunk."""
        return min(self.size, num_members)

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` over chunks of members, one chunk after another."""
        # `jax.lax.map(..., batch_size=)` does the same, but fails on arrays of size zero.
        num_members = jax.tree.leaves(arrays)[0].shape[0]
        whole = num_members // self.size * self.size
        parts = []
        if whole:
            chunked = lambda x: x[:whole].reshape(whole // self.size, self.size, *x.shape[1:])
            chunks = jax.lax.map(jax.vmap(fn), jax.tree.map(chunked, arrays))
            parts.append(jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), chunks))
        if whole < num_members:
            parts.append(jax.vmap(fn)(jax.tree.map(lambda x: x[whole:], arrays)))
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


class Sequential(AbstractPlan):
    """One member after another: the least memory; on one CPU device, the same bits as each member run alone.

    In [`eqx_ensemble.fit`][] each member does many steps before the next one starts: on a CPU this is the fastest plan
    for all but small models. An ensemble of a single member may have other last bits, except with
    `Sequential(scan=False)`.
    """

    one_by_one: ClassVar[bool] = True

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` over the members in a compiled loop."""
        return jax.lax.map(fn, arrays)

    def width(self, num_members: int) -> int:
        """One."""
        return 1


class Unrolled(AbstractPlan):
    """One member after another, each written out in the compiled program.

    On a CPU this is the fastest plan for convolutions in a single call, as in [`eqx_ensemble.predict`][], because
    `jax.vmap` turns them into grouped convolutions. Compile time grows with the number of members.
    """

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Calls `fn` for every member."""
        num_members = jax.tree.leaves(arrays)[0].shape[0]
        arrays = jax.tree.map(jnp.asarray, arrays)  # whose rows, unlike those of NumPy, are arrays of the same dtype
        members = [fn(jax.tree.map(lambda x, i=i: x[i], arrays)) for i in range(num_members)]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *members)

    @property
    def compiles(self) -> bool:
        """False: `fn` is called directly."""
        return False


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
        out = jax.vmap(lambda some: self.inner.run(fn, some), axis_name=_DEVICES, spmd_axis_name="members")(own)
        out = constrain_members(jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), out), layout)
        if layout.width(count) == count:
            return out
        # Without padding they do not divide evenly, and a mesh cannot express how the compiler may split them.
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
