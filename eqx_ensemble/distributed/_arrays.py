import errno
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._check import is_key, is_traced, kind_text, path_text
from .._pytree import PyTree

# Checks of arrays over several processes, and error messages.


def check_addressable(leaf: Any, path: tuple) -> None:
    """Checks that a leaf is not traced and that every process holds a part of it."""
    if is_traced(leaf):
        raise TypeError(
            f"`distributed.to_host` copies arrays to the host, and the leaf at `{path_text(path)}` is traced: call it "
            "outside `jax.jit` and other transformations."
        )
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return
    holders = {device.process_index for device in leaf.sharding.device_set}
    without = sorted(set(range(jax.process_count())) - holders)
    if without:
        raise ValueError(
            f"`distributed.to_host` needs arrays of which every process holds a part, and process {without[0]} of "
            f"{jax.process_count()} holds none of the leaf at `{path_text(path)}`.\n"
            "Shard it over devices of all processes first."
        )


# Collectives between processes. With one process, nothing is sent.


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
        listed = ", ".join(map(str, failed.tolist()))
        raise OSError(
            errno.EIO, f"The checkpoint was not written, because it failed in another process ({listed}); check its log"
        )


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


_AT_ONCE = 2**26  # bytes that one program gathers on each device


def to_host(tree: PyTree) -> PyTree:
    """Copies the arrays of a tree to NumPy arrays in every process, also those that are sharded over processes.

    All processes must call it, with the same arrays in the same order. Arrays sharded over processes are first
    replicated on the devices, about 64 MiB or one array at a time.

    **Arguments:**

    - `tree`: any PyTree. Leaves that are not arrays are returned unchanged.

    **Returns:** the tree with NumPy arrays. Typed keys become their data, `jax.random.key_data`.

    **Raises:** `TypeError` for traced arrays; `ValueError` for an array of which some process holds no part.

    ```python
    run = {"loss": jnp.zeros((8, 100)), "name": "a"}
    ee.distributed.to_host(run)["loss"].mean()  # NumPy, in all processes
    ```
    """
    found, structure = jtu.tree_flatten_with_path(tree)
    for path, leaf in found:
        if not isinstance(leaf, np.ndarray):
            check_addressable(leaf, path)
    leaves = [jax.random.key_data(leaf) if is_key(leaf) else leaf for _, leaf in found]
    remote = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and not _is_at_hand(leaf)]
    for indices in _programs(leaves, remote):
        for index, whole in zip(indices, _gather([leaves[i] for i in indices]), strict=True):
            leaves[index] = whole
    return structure.unflatten([np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves])


def _is_at_hand(array: jax.Array) -> bool:
    return array.is_fully_addressable or array.is_fully_replicated


def _programs(leaves: Sequence[Any], indices: Sequence[int]) -> Iterator[list[int]]:
    """Groups of indices, in order; one program gathers the arrays of a group."""
    group: list[int] = []
    size = 0
    for index in indices:
        if group and (
            _replication(leaves[index]) != _replication(leaves[group[0]]) or size + leaves[index].nbytes > _AT_ONCE
        ):
            yield group
            group, size = [], 0
        group.append(index)
        size += leaves[index].nbytes
    if group:
        yield group


def _replication(array: jax.Array) -> NamedSharding:
    """The sharding that replicates an array over its devices."""
    if isinstance(array.sharding, NamedSharding):
        return NamedSharding(array.sharding.mesh, PartitionSpec())
    devices = list(array.sharding.devices_indices_map(array.shape))
    return NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())


def _gather(arrays: list[jax.Array]) -> list[np.ndarray]:
    """The complete arrays, in every process, of which all processes hold parts."""
    copies = jax.jit(_same, out_shardings=_replication(arrays[0]))(arrays)
    return [np.asarray(copy.addressable_data(0)) for copy in copies]


def _same(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


def broadcast_from_first(value: Any) -> bool | int | float:
    """Broadcasts a value of process 0 to all processes.

    Clocks, files and signals differ between processes. A decision that depends on them and changes the computation must
    be the same in all processes, or they deadlock. All processes must call this function; the values of the others are
    ignored.

    **Arguments:**

    - `value`: a bool, an int of at most 64 bits or a float.

    **Returns:** a Python bool, int or float.

    **Raises:** `TypeError`, in all processes, for any other value in process 0.

    ```python
    import time

    start = time.monotonic()
    while ee.distributed.broadcast_from_first(time.monotonic() - start < 0.01):
        pass  # a step of training
    ```
    """
    packet = _pack(value) if jax.process_count() == 1 or jax.process_index() == 0 else b""
    if jax.process_count() > 1:
        packet = _receive_from_first(packet)
    kind, number = packet[:1].decode(), packet[1:9]
    if kind == " ":
        raise TypeError(
            "`distributed.broadcast_from_first` needs a bool, an int of at most 64 bits or a float in process 0, got "
            f"{packet[9:].rstrip(bytes(1)).decode()}.\nEncode it as a number."
        )
    return struct.unpack(f"<{kind}", number[: struct.calcsize(f"<{kind}")])[0]


_LENGTH = 64  # bytes of a packet, the same in all processes


def _pack(value: Any) -> bytes:
    """A number as bytes, after its kind; for anything else, the name of its type."""
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0:
        value = value.item()
    kind = {bool: "?", int: "q", float: "d"}.get(type(value), " ")
    if kind == "q" and not -(2**63) <= value < 2**63:
        kind = " "
    if kind == " ":
        return b" " + bytes(8) + kind_text(value).encode()[: _LENGTH - 9]
    return kind.encode() + struct.pack(f"<{kind}", value)


def _receive_from_first(packet: bytes) -> bytes:
    """The packet of process 0, in all processes: bytes, because JAX may have no 64-bit types."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[number] for number in sorted(firsts)]), ("processes",))
    mine = np.frombuffer(packet.ljust(_LENGTH, b"\0"), np.uint8)[None]
    sharding = NamedSharding(mesh, PartitionSpec("processes"))
    (gathered,) = _gather([jax.make_array_from_process_local_data(sharding, mine, (len(firsts), _LENGTH))])
    return gathered[0].tobytes()
