import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..compiled._order import RowOrder

_MOST_STEPS, _MOST_ROWS = 64, 2**20


class StepRows:
    """The rows of the data that a step reads, computed on the host; the same as in a compiled step of data in memory.

    `words` are those of a [`RowOrder`][eqx_ensemble.train.compiled._order.RowOrder], `(members, 2)`, `(2,)` or `None`,
    and `rows` the members' own `(members, n)`. Orders are computed for several steps at a time.
    """

    def __init__(self, words: np.ndarray | None, rows: np.ndarray | None, *, num_rows: int, batch_size: int) -> None:
        self._words, self._rows = words, rows
        self.order = RowOrder(None, None, num_rows, batch_size)
        self._known: Any = None

    @property
    def is_own(self) -> bool:
        """Whether members see different rows."""
        return self._rows is not None or (self._words is not None and self._words.ndim == 2)

    def at(self, step: int, members: np.ndarray) -> np.ndarray:
        """The rows `(members, batch)` of some members at a step, or the rows of all members, `(batch,)`."""
        positions = self._positions(step, members)
        if self._rows is None:
            return positions
        positions = np.broadcast_to(positions, (len(members), positions.shape[-1]))
        return self._rows[members[:, None], positions]

    def _positions(self, step: int, members: np.ndarray) -> np.ndarray:
        order = self.order
        first = step % order.epoch * order.batch_size
        size = min(order.batch_size, order.num_rows - first)
        if self._words is None:
            return np.arange(first, first + size)
        words = self._words if self._words.ndim == 1 else self._words[members]
        count = max(min(_MOST_STEPS, _MOST_ROWS * 2 // (words.size * order.batch_size)), 1)
        known = (step // count, words.tobytes())
        if self._known is None or self._known[0] != known:
            steps = np.arange(count, dtype=np.int32) + np.int32(step // count * count)
            with jax.default_device(_cpu()):
                self._known = known, np.asarray(_compute(words, steps, order.num_rows, order.batch_size))
        return self._known[1][step % count][..., :size]


def _cpu() -> Any:
    """A CPU device, which does not wait for the queued steps of an accelerator."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # `jax_platforms` excludes it
        return None


@ft.partial(jax.jit, static_argnums=(2, 3))
def _compute(words: Any, steps: Int[Array, " steps"], num_rows: int, batch_size: int) -> Array:
    """Positions `(steps, members, batch)`, or `(steps, batch)` if all members share an order."""
    at = lambda words, step: RowOrder(words, None, num_rows, batch_size).batch(step, last=False)
    if words.ndim == 2:
        at = jax.vmap(at, in_axes=(0, None))
    return jax.lax.map(lambda step: at(jnp.asarray(words), step), steps)
