import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import _check


class AbstractPlan(eqx.Module):
    """How a function of one member is run for all: it changes time and memory and nothing else."""

    @abc.abstractmethod
    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """`fn` of every member's part of `arrays`, a tree of arrays only; results gain the leading `members` axis."""


class Vmap(AbstractPlan):
    """All members at once, by `jax.vmap`: the fastest where one member leaves the machine idle."""

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` over all members at once."""
        return jax.vmap(fn)(arrays)


class Chunked(AbstractPlan):
    """`size` members at a time: the memory of a chunk instead of that of all members.

    The last chunk may be smaller; nothing is padded.

    **Arguments:**

    - `size`: members per chunk.
    """

    size: int = eqx.field(static=True)

    def __check_init__(self):
        _check.positive_int(self.size, "size", name="Chunked")

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` over chunks of members, one chunk after another."""
        return jax.lax.map(fn, arrays, batch_size=self.size)


class Sequential(AbstractPlan):
    """One member after another: the least memory; on one CPU device, bit for bit each member run alone."""

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Maps `fn` over the members in a compiled loop."""
        return jax.lax.map(fn, arrays)


class Unrolled(AbstractPlan):
    """One member after another, each written out in the compiled program.

    The compiler sees every member's operations as they are alone, and loops over nothing: on a CPU this is the fastest
    for convolutions, which `jax.vmap` turns into grouped ones. Compile time grows with the number of members.
    """

    def run(self, fn: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
        """Calls `fn` for every member."""
        num_members = jax.tree.leaves(arrays)[0].shape[0]
        members = [fn(jax.tree.map(lambda x, i=i: x[i], arrays)) for i in range(num_members)]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *members)
