from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _axes
from .._check import is_typed_key
from .._pytree import PyTree
from ..distributed import to_host
from ._check import check_member_ids


class Placement(NamedTuple):
    """The placement of members on devices; prints as a table.

    **Attributes:**

    - `members`: for each device, the ids of the members of which it holds a part.
    - `bytes`: for each device, the bytes that it holds of members and of what they share.
    - `copies`: the number of devices that hold the same part of a member; 1 where nothing is replicated.
    """

    members: dict[Any, list[int]]
    bytes: dict[Any, int]
    copies: int

    def __str__(self) -> str:
        rows = [("device", "process", "members", "MiB")]
        for device, ids in self.members.items():
            shown = _ranges(ids) or "none"
            rows.append((str(device), str(device.process_index), shown, f"{self.bytes[device] / 2**20:.3g}"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return table + ("" if self.copies == 1 else f"\neach part of a member is on {self.copies} devices")


def describe(tree: PyTree) -> Placement:
    """Describes which members each device holds, and how many bytes.

    [`eqx_ensemble.sharding.collectives`][] lists the communication between devices.

    **Arguments:**

    - `tree`: an ensemble, a training state, a run, or any PyTree that holds one.

    **Returns:** [`eqx_ensemble.sharding.Placement`][].

    **Raises:** `TypeError` where there are no members.

    ```python
    ensemble = ee.build(
        lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 8, mesh=ee.make_mesh(), key=key
    )
    print(ee.sharding.describe(ensemble))
    ```
    """
    ids = check_member_ids(tree, name="sharding.describe")
    names = to_host(ids)
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    held: dict[Any, int] = {}
    rows: dict[Any, set[int]] = {}
    for x in arrays:
        x = jax.random.key_data(x) if is_typed_key(x) else x
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            sizes = [len(range(*part.indices(size))) for part, size in zip(index or (), x.shape, strict=False)]
            held[device] = held.get(device, 0) + int(np.prod(sizes, dtype=np.int64)) * x.dtype.itemsize
    splits = [x for x in arrays if x.ndim and x.shape[0] == len(names)]
    for x in sorted(splits, key=lambda x: -x.size)[:1]:
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            rows.setdefault(device, set()).update(range(*index[0].indices(len(names))) if index else [])
    ordered = sorted(held, key=lambda device: (device.process_index, device.id))
    members = {device: [int(names[i]) for i in sorted(rows.get(device, ()))] for device in ordered}
    return Placement(members, {device: held[device] for device in ordered}, _copies(splits))


def _copies(splits: list[jax.Array]) -> int:
    """The number of devices that hold each part of the largest array."""
    if not splits:
        return 1
    largest = max(splits, key=lambda x: x.size)
    indices = largest.sharding.devices_indices_map(largest.shape).values()
    distinct = {tuple((part.start, part.stop) for part in index or ()) for index in indices}
    return len(list(indices)) // len(distinct)


def visualise(tree: PyTree) -> None:
    """Prints which device holds which members, by `jax.debug.visualize_array_sharding`.

    Without `rich`, which draws, it prints the table of [`eqx_ensemble.sharding.describe`][].

    **Arguments:**

    - `tree`: an array `(members, ...)`, an ensemble, or any PyTree that holds one. The largest array of its members is
        drawn, with all axes but the first flattened.

    ```python
    ensemble = ee.build(
        lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 8, mesh=ee.make_mesh(), key=key
    )
    ee.sharding.visualise(ensemble)
    ```
    """
    if _axes.is_array(tree):
        largest = tree
    else:
        ids = check_member_ids(tree, name="sharding.visualise")
        splits = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and x.shape[:1] == ids.shape]
        largest = max((x for x in splits if not is_typed_key(x)), key=lambda x: x.size)
    try:
        import rich  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError:
        print(getattr(tree, "sharding", None) or describe(tree))
        return
    jax.debug.visualize_array_sharding(largest.reshape(largest.shape[0], -1) if largest.ndim > 2 else largest)


def _ranges(ids: list[int]) -> str:
    """`0-3, 7` for `[0, 1, 2, 3, 7]`."""
    parts: list[list[int]] = []
    for i in ids:
        if parts and parts[-1][-1] == i - 1:
            parts[-1].append(i)
        else:
            parts.append([i])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
