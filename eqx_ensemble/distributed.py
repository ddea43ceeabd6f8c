"""Arrays and decisions that are the same in all processes. With one process, nothing is sent."""

import errno
from typing import Any

import jax
import numpy as np

from ._leaves import is_key, kind_text
from ._pytree import PyTree

__all__ = ["broadcast_from_first", "is_first", "to_host"]


def is_first() -> bool:
    """Whether this is process 0, which prints, shows progress and writes small files.

    Call it after `jax.distributed.initialize`. All processes must run the same computations; only the use of their
    results may depend on this.

    **Returns:** `True` in process 0, and in a single process.

    ```python
    loss = ee.distributed.to_host(jnp.ones(4))
    if ee.distributed.is_first():
        print(loss.mean())
    ```
    """
    return jax.process_index() == 0


def to_host(tree: PyTree) -> PyTree:
    """Copies the arrays of a tree to NumPy arrays in every process, also those that are sharded over processes.

    All processes must call it, with the same arrays in the same order: those sharded over processes are gathered by
    `jax.experimental.multihost_utils.process_allgather`.

    **Arguments:**

    - `tree`: any PyTree. Leaves that are not arrays are returned unchanged.

    **Returns:** the tree with NumPy arrays. Typed keys become their data, `jax.random.key_data`.

    ```python
    run = {"loss": jnp.zeros((8, 100)), "name": "a"}
    ee.distributed.to_host(run)["loss"].mean()  # NumPy, in all processes
    ```
    """
    return jax.tree.map(_to_host, tree)


def _to_host(x: Any) -> Any:
    x = jax.random.key_data(x) if is_key(x) else x
    if not isinstance(x, jax.Array):
        return x
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)


def broadcast_from_first(value: Any) -> bool | int | float:
    """Broadcasts a number of process 0 to all processes.

    Clocks, files and signals differ between processes. A decision that depends on them and changes the computation must
    be the same in all processes, or they deadlock. All processes must call this function with a number of the same
    type, of which that of process 0 counts.

    **Arguments:**

    - `value`: a bool, an int of at most 64 bits or a float. For arrays, see
        `jax.experimental.multihost_utils.broadcast_one_to_all`.

    **Returns:** a Python bool, int or float.

    **Raises:** `TypeError` for any other value.

    ```python
    import time

    start = time.monotonic()
    while ee.distributed.broadcast_from_first(time.monotonic() - start < 0.01):
        pass  # a step of training
    ```
    """
    number = np.asarray(value)
    if number.ndim > 0 or number.dtype.kind not in "biuf":
        raise TypeError(
            "`distributed.broadcast_from_first` needs a bool, an int of at most 64 bits or a float, got "
            f"{kind_text(value)}.\nEncode it as a number."
        )
    return all_gather(number)[0].item()


def all_gather(values: np.ndarray | np.generic) -> np.ndarray:
    """The arrays of all processes, in order, stacked along a new leading axis. All processes must call it."""
    values = np.asarray(values)
    if jax.process_count() == 1 or values.size == 0:
        return values[None]
    from jax.experimental import multihost_utils

    sent = np.ascontiguousarray(values).reshape(-1).view(np.uint8)  # JAX may have no 64-bit types
    gathered = np.ascontiguousarray(multihost_utils.process_allgather(sent))
    return gathered.view(values.dtype).reshape(-1, *values.shape)


def raise_on_all(error: Exception | None) -> None:
    """Raises in all processes if one failed. All processes must call it."""
    failed = np.flatnonzero(all_gather(np.array(error is not None)))
    if error is not None:
        raise error
    if failed.size:
        listed = ", ".join(map(str, failed.tolist()))
        raise OSError(errno.EIO, f"It failed in process {listed}; see its log")
