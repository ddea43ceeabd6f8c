"""The steps whose outputs a run records: all, every n-th, or only the last."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ... import _axes
from ..._pytree import PyTree

# The lengths of chunks follow from measured times. Windows that began with a chunk would therefore make the history
# depend on the speed of the machine, and on where a run was interrupted.
#
# A piece puts a fixed number of windows, of which only the first few may be its own: the next piece overwrites the
# others, so pieces are put in their order. The room at the end takes the outputs of pieces that are reverted. Without
# it, `dynamic_update_slice` would move a slice that exceeds the array back, onto windows that are recorded already.


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of `every` consecutive steps, of which the history keeps each member's last outputs.

    They are counted from the first step of all runs, so that they do not depend on how a run is split into chunks. If
    `every` is `None`, all steps are one window; windows of one step record everything.
    """

    every: int | None = 1

    @property
    def name(self) -> str | int:
        """The `history` of `fit`."""
        if self.every is None:
            return "last"
        return "all" if self.every == 1 else self.every

    def most(self, num_steps: int) -> int:
        """The largest number of windows in which `num_steps` consecutive steps may be."""
        return 1 if self.every is None else -(-(num_steps - 1) // self.every) + 1

    def index(self, first: Any, step: Any) -> Any:
        """The window of the step after `step`, counted from that of the step after `first`."""
        return step - step if self.every is None else step // self.every - first // self.every

    def continues(self, step: Any) -> Any:
        """Whether the step after `step` is in the window of the one before it."""
        return step > -1 if self.every is None else step % self.every > 0

    def part(self, first: int, step: int, num_steps: int) -> slice:
        """The windows of `num_steps` steps after `step`, counted from that of the step after `first`."""
        return slice(self.index(first, step), self.index(first, step + max(num_steps, 1) - 1) + 1)

    def ends(self, step: int, num_steps: int) -> np.ndarray:
        """The last steps so far of the windows of `num_steps` steps after `step`."""
        last = step + num_steps
        if self.every is None:
            return np.array([last])
        closed = np.arange(step // self.every + 1, -(-last // self.every) + 1) * self.every
        return np.minimum(closed, last)


def no_outputs(windows: Windows, num_steps: int, outputs: PyTree, *, exact: bool) -> PyTree:
    """Blank outputs `(members, windows + room, ...)` of `num_steps` steps, for those `(members, room, ...)` of a piece.

    Outputs that are not to be recorded are put into the last `room`. Windows of one step need none if all pieces fill
    theirs (`exact`): outputs that are put there are overwritten, or not read.
    """

    def blank(x: Any) -> Array:
        fill = jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
        count = windows.most(num_steps) + (0 if exact and windows.every == 1 else x.shape[1])
        return jnp.full((x.shape[0], count, *x.shape[2:]), fill, x.dtype)

    return jax.tree.map(blank, outputs)


def put_outputs(
    recorded: PyTree, new: PyTree, windows: Windows, *, begun: Int[Array, ""], step: Int[Array, ""], skip: Any
) -> PyTree:
    """Puts the outputs `(members, room, ...)` of a piece after `step` at its windows in a chunk after `begun`.

    If the first continues a window, members without a finite loss, which stopped earlier or diverged, keep their
    outputs there. The windows after the last one of the piece are still blank, so that it may write there.
    """
    at = windows.index(begun, step)
    if windows.every != 1:
        losses, count = jax.tree.leaves(new)[0], jax.tree.leaves(recorded)[0].shape[1]
        at = jnp.where(skip, count - losses.shape[1], at)
        here = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at, axis=1, keepdims=False), recorded)
        chosen = ~jnp.asarray(windows.continues(step)) | jnp.isfinite(losses[:, 0])
        first = latest_outputs(jax.tree.map(lambda x: x[:, 0], new), here, chosen=chosen)
        new = jax.tree.map(lambda x, first: jnp.concatenate([first[:, None], x[:, 1:]], axis=1), new, first)
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, at, axis=1), recorded, new)


def latest_outputs(new: PyTree, old: PyTree, *, chosen: Bool[Array, " members"]) -> PyTree:
    """The new outputs `(members, ...)` of the members `chosen`, and the old ones of the others."""
    return jax.tree.map(lambda x, y: _axes.where_members(chosen, x, y), new, old)


@jax.jit
def merge_outputs(new: PyTree, old: PyTree) -> PyTree:
    """The new outputs `(members, ...)` of members whose loss is finite, and the old ones of the others."""
    return latest_outputs(new, old, chosen=jnp.isfinite(jax.tree.leaves(new)[0]))
