import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..._pytree import PyTree
from ._permute import permute


class RowOrder(eqx.Module):
    """The rows of the data that a member sees at each step: every epoch is a fresh permutation, never stored.

    **Attributes:**

    - `words`: two words of the key of each member's stream, marked `Each`, or of the shared one; `None` for the order
        of the data.
    - `rows`: the members' own rows `(members, num_rows)` of the data, marked `Each`; `None` if they see all.
    - `num_rows`: the rows of an epoch.
    - `batch_size`: the rows of a step; the last step of an epoch may have fewer.
    """

    words: PyTree
    rows: PyTree
    num_rows: int = eqx.field(static=True)
    batch_size: int = eqx.field(static=True)

    @property
    def remainder(self) -> int:
        """The rows of an epoch's last, smaller batch; 0 if there is none."""
        return self.num_rows % self.batch_size

    @property
    def epoch(self) -> int:
        """The steps of an epoch."""
        return -(-self.num_rows // self.batch_size)

    def batch(self, step: Int[Array, ""], *, last: bool) -> Int[Array, " batch"]:
        """The rows that one member sees at a step; `last` if the step is the smaller last one of an epoch.

        Positions beyond the epoch are clipped; the caller discards them.
        """
        size = self.remainder if last else self.batch_size
        first = step % self.epoch * self.batch_size
        positions = jnp.minimum(first + jnp.arange(size, dtype=jnp.int32), self.num_rows - 1)
        if self.words is not None:
            positions = permute(self.words, step // self.epoch, positions, self.num_rows)
        return positions if self.rows is None else self.rows.at[positions].get(mode="promise_in_bounds")
