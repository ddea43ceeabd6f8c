from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .. import _axes
from .._check import is_key
from .._pytree import PyTree
from ..distributed import to_host
from ._check import check_member_ids

HOST = "host"
_PARTS = {"opt_state": "optimiser", "selection": "best weights", "history": "history"}  # by the names of fields


class Placement(NamedTuple):
    """The placement of members on devices; prints as a table.

    **Attributes:**

    - `members`: for each device, the ids of the members of which it holds a part.
    - `bytes`: for each device, the bytes of members and shared leaves that it holds.
    - `copies`: the number of devices that hold the same part of a member; 1 if nothing is replicated.
    - `parts`: the bytes on each device by part: `"optimiser"` states, `"best weights"`, `"history"`, and `"members"`
        for everything else. NumPy arrays are on the device `"host"`, which `bytes` does not include.
    """

    members: dict[Any, list[int]]
    bytes: dict[Any, int]
    copies: int
    parts: dict[str, dict[Any, int]]

    def __str__(self) -> str:
        shown = self.parts if len(self.parts) > 1 else {}
        mebibytes = lambda count: f"{count / 2**20:.3g}"
        own = lambda place: [mebibytes(held.get(place, 0)) for held in shown.values()]
        rows = [["device", "process", "members", "MiB", *shown]]
        for device, ids in self.members.items():
            whole = mebibytes(self.bytes[device])
            name = f"{device.platform}:{device.id}"  # `str(device)` depends on the release of JAX
            rows.append([name, str(device.process_index), _ranges(ids) or "none", whole, *own(device)])
        on_host = sum(held.get(HOST, 0) for held in self.parts.values())
        if on_host:
            rows.append([HOST, "each", "", mebibytes(on_host), *own(HOST)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return table + ("" if self.copies == 1 else f"\neach part of a member is on {self.copies} devices")


def describe(tree: PyTree) -> Placement:
    """Describes which members each device holds, and how many bytes.

    An array that occurs several times in the tree counts once.

    **Arguments:**

    - `tree`: an ensemble, a training state, a run, or any PyTree that holds one.

    **Returns:** [`eqx_ensemble.sharding.Placement`][].

    **Raises:** `TypeError` if the tree has no members.

    ```python
    ensemble = ee.build(
        lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 8, mesh=ee.make_mesh(), key=key
    )
    print(ee.sharding.describe(ensemble))
    ```
    """
    ids = check_member_ids(tree)
    names = to_host(ids)
    leaves = {id(x): (path, x) for path, x in reversed(jtu.tree_leaves_with_path(tree)) if _axes.is_array(x)}
    arrays = [x for _, x in leaves.values() if isinstance(x, jax.Array)]
    rows: dict[Any, set[int]] = {}
    parts: dict[str, dict[Any, int]] = {}
    for path, x in leaves.values():
        of_part = parts.setdefault(_part(path), {})
        for place, count in _bytes_by_place(x):
            of_part[place] = of_part.get(place, 0) + count
    held: dict[Any, int] = {}
    for place, count in (item for of_part in parts.values() for item in of_part.items()):
        held[place] = held.get(place, 0) + count
    held.pop(HOST, None)
    splits = [x for x in arrays if x.ndim and x.shape[0] == len(names)]
    for x in sorted(splits, key=lambda x: -x.size)[:1]:
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            rows.setdefault(device, set()).update(range(*index[0].indices(len(names))) if index else [])
    ordered = sorted(held, key=lambda device: (device.process_index, device.id))
    members = {device: [int(names[i]) for i in sorted(rows.get(device, ()))] for device in ordered}
    return Placement(members, {device: held[device] for device in ordered}, _copies(splits), parts)


def _part(path: tuple[Any, ...]) -> str:
    """The part of a run or a training state in which a leaf is."""
    fields = [key.name for key in path if isinstance(key, jtu.GetAttrKey)]
    return next((_PARTS[field] for field in fields if field in _PARTS), "members")


def _bytes_by_place(x: Any) -> list[tuple[Any, int]]:
    """The bytes of an array on each device; NumPy arrays are on the host."""
    if not isinstance(x, jax.Array):
        return [(HOST, x.nbytes)]
    data = jax.random.key_data(x) if is_key(x) else x
    found, indices = [], data.sharding.devices_indices_map(data.shape)
    for device, index in indices.items():
        sizes = [len(range(*part.indices(size))) for part, size in zip(index or (), data.shape, strict=False)]
        found.append((device, int(np.prod(sizes, dtype=np.int64)) * data.dtype.itemsize))
    return found


def _copies(splits: list[jax.Array]) -> int:
    """The number of devices that hold each part of the largest array."""
    if not splits:
        return 1
    largest = max(splits, key=lambda x: x.size)
    indices = largest.sharding.devices_indices_map(largest.shape).values()
    distinct = {tuple((part.start, part.stop) for part in index or ()) for index in indices}
    return len(list(indices)) // len(distinct)


def visualise(tree: PyTree) -> None:
    """Prints which device holds which members, by `jax.debug.visualize_array_sharding`; without the package `rich`, a
    table.

    **Arguments:**

    - `tree`: an array `(members, ...)`, an ensemble, or any PyTree that holds one, whose largest array is drawn.

    **Raises:** `TypeError` if the tree has no members.
    """
    if _axes.is_array(tree):
        arrays = [tree]
    else:
        ids = check_member_ids(tree)
        arrays = [x for x in jax.tree.leaves(tree) if np.shape(x)[:1] == ids.shape and not is_key(x)]
    largest = max((x for x in arrays if isinstance(x, jax.Array)), key=lambda x: x.size, default=None)
    if largest is None:
        raise TypeError("`sharding.visualise` needs arrays of JAX; those of NumPy are on the host.")
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
