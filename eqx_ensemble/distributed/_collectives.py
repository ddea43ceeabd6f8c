"""Collectives between processes. With one process, nothing is sent."""

import errno

import jax
import numpy as np

from ._check import failure_message


def all_gather(values: np.ndarray) -> np.ndarray:
    """The arrays of all processes, in order, stacked along a new leading axis. All processes must call it."""
    if jax.process_count() == 1 or values.size == 0:
        return values[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(values))


def largest(value: int) -> int:
    """The maximum of an integer over all processes. All processes must call it."""
    packets = all_gather(np.array([value], np.int64).view(np.uint8))  # JAX may have no 64-bit types
    return int(np.ascontiguousarray(packets).view(np.int64).max())


def raise_on_all(error: Exception | None) -> None:
    """Raises in all processes if one failed. All processes must call it."""
    failed = np.flatnonzero(all_gather(np.array([error is not None])))
    if error is not None:
        raise error
    if failed.size:
        raise OSError(errno.EIO, failure_message([int(process) for process in failed]))


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
