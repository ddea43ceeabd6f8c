import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import _check


class AbstractPlan(eqx.Module):
    """How a function of one member is run for all: it changes time and memory and nothing else.

    **Attributes:**

    - `scan`: whether [`eqx_ensemble.fit`][] runs many steps in one compiled loop (`True`), each step as a compiled call
        of its own (`False`), or as the step suggests (`None`): XLA's convolutions are many times slower inside a
        compiled loop on a CPU, everything else is faster there. Under [`eqx_ensemble.plan.Sequential`][] a step outside
        a loop is one compiled call for each member. Nothing but `fit` has steps.
    """

    scan: eqx.AbstractVar[bool | None]

    def __check_init__(self):
        _check.check_optional_flag(self.scan, "scan", name=type(self).__name__)

    @property
    def compiles(self) -> bool:
        """Whether `run` compiles outside `jax.jit` too, as `jax.lax.map` does at every call.

        [`eqx_ensemble.map_members`][] keeps the program then.
        """
        return True

    @abc.abstractmethod
    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """`fn` of every member's part of `arrays`, a tree of arrays only; results gain the leading `members` axis."""


class Vmap(AbstractPlan):
    """All members at once, by `jax.vmap`: the fastest where one member leaves the machine idle."""

    scan: bool | None = eqx.field(static=True, default=None, kw_only=True)

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` over all members at once."""
        return jax.vmap(fn)(arrays)

    @property
    def compiles(self) -> bool:
        """Whether `run` compiles: what `fn` calls is called as it is."""
        return False


class Chunked(AbstractPlan):
    """`size` members at a time: the memory of a chunk instead of that of all members.

    The last chunk may be smaller; nothing is padded.

    **Arguments:**

    - `size`: members per chunk.
    """

    size: int = eqx.field(static=True)
    scan: bool | None = eqx.field(static=True, default=None, kw_only=True)

    def __check_init__(self):
        _check.check_positive_int(self.size, "size", name="Chunked")

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
    """One member after another: the least memory; on one CPU device, bit for bit each member run alone.

    An ensemble of one member is a loop that the compiler unrolls: its last bit may be another one than in company, as
    with `optax.MultiSteps` around Adam. `Sequential(scan=False)` knows no such loop.

    In [`eqx_ensemble.fit`][] each member does many steps before the next one's turn, with its weights in the
    processor's cache, or, for convolutions on a CPU, has a compiled call of its own for every step: on a CPU this is
    the fastest for all but small models.
    """

    scan: bool | None = eqx.field(static=True, default=None, kw_only=True)

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` over the members in a compiled loop."""
        return jax.lax.map(fn, arrays)


class Unrolled(AbstractPlan):
    """One member after another, each written out in the compiled program.

    The compiler sees every member's operations as they are alone, and loops over nothing: on a CPU this is the fastest
    way for convolutions in a single call, as in [`eqx_ensemble.predict`][]; `jax.vmap` turns them into grouped ones.
    Compile time grows with the number of members.
    """

    scan: bool | None = eqx.field(static=True, default=None, kw_only=True)

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Calls `fn` for every member."""
        num_members = jax.tree.leaves(arrays)[0].shape[0]
        members = [fn(jax.tree.map(lambda x, i=i: x[i], arrays)) for i in range(num_members)]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *members)

    @property
    def compiles(self) -> bool:
        """Whether `run` compiles: `fn` is called as it is."""
        return False


def in_words(plan: AbstractPlan) -> str:
    """A plan as it is written."""
    options = [str(plan.size)] if isinstance(plan, Chunked) else []
    options += [] if plan.scan is None else [f"scan={plan.scan}"]
    return f"{type(plan).__name__}({', '.join(options)})"
