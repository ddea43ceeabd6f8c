import dataclasses
import io
import json
import os
import zipfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.export import Exported
from safetensors.numpy import save as safetensors_bytes

from .._ensemble import Ensemble
from .._pytree import PyTree
from ..checkpoint._engine import as_path, versions, write_file


def about(program: Exported, ensemble: Ensemble[Any], *, symbolic_members: bool) -> dict[str, Any]:
    """The description of a program, for JSON."""
    (*leaves, x), _ = program.in_tree.unflatten(program.in_avals)
    return {
        "members": "any number" if symbolic_members else ensemble.num_members,
        "ids": ensemble.ids.tolist(),
        "inputs": describe_arrays(x, "x"),
        "outputs": describe_arrays(program.out_tree.unflatten(program.out_avals), "out"),
        "leaves": [entry for part in leaves for entry in describe_arrays(part)],
        "platforms": list(program.platforms),
        "calling_convention_version": program.calling_convention_version,
        "versions": versions(),
    }


def describe_arrays(tree: PyTree, root: str = "") -> list[dict[str, Any]]:
    """Name, dtype and shape of every array of a tree; symbolic sizes by their names."""
    return list(_entries(tree, root))


def _entries(tree: PyTree, root: str) -> Iterator[dict[str, Any]]:
    for path, aval in jtu.tree_flatten_with_path(tree)[0]:
        inside = jtu.keystr(path, simple=True, separator=".")
        shape = [size if isinstance(size, int) else str(size) for size in aval.shape]
        yield {"name": ".".join(filter(None, (root, inside))), "dtype": str(aval.dtype), "shape": shape}


PROGRAM, LEAVES, ABOUT = "program.bin", "leaves.safetensors", "export.json"
"""The files in the archive."""


@dataclasses.dataclass(frozen=True, eq=False)
class Artefact:
    """An exported ensemble, made by [`eqx_ensemble.export`][].

    **Attributes:**

    - `program`: the `jax.export.Exported`; `program.mlir_module()` is the StableHLO as a text.
    - `leaves`: the arrays by name, which the program takes as its first argument; `None` if they are inside.
    - `about`: the description that is saved in `export.json`.
    """

    program: Exported
    leaves: dict[str, np.ndarray] | None
    about: dict[str, Any]

    def __call__(self, x: PyTree) -> PyTree:
        """Calls the program with a batch of rows `(batch, ...)`. Unlike the program itself, it also accepts none."""
        sizes = self._open_sizes()
        if sizes and all(np.shape(leaf)[:1] == (0,) for leaf in jax.tree.leaves(x)):
            out = self._call(jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), x))
            avals = self.program.out_tree.unflatten(self.program.out_avals)
            none = lambda x, aval: x[tuple(slice(0) if size in sizes else slice(None) for size in aval.shape)]
            return jax.tree.map(none, out, avals)
        return self._call(x)

    def _call(self, x: PyTree) -> PyTree:
        return self.program.call(x) if self.leaves is None else self.program.call(self.leaves, x)

    def _open_sizes(self) -> set[Any]:
        """The symbolic number of rows, if it is one."""
        (*_, x), _ = self.program.in_tree.unflatten(self.program.in_avals)
        sizes = {aval.shape[0] for aval in jax.tree.leaves(x)}
        return {size for size in sizes if not isinstance(size, int)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one zip archive: `program.bin`, `export.json` and, with `leaves="beside"`, `leaves.safetensors`.

        The file is written atomically. Each part has a checksum. Equal artefacts give equal bytes.

        **Raises:** `OSError` with the bytes needed and free, if the disk is full or cannot be written.
        """
        files = {PROGRAM: bytes(self.program.serialize())}
        if self.leaves is not None:
            files[LEAVES] = safetensors_bytes(self.leaves)
        files[ABOUT] = json.dumps(self.about, indent=1).encode()
        write_file(as_path(path), _archive(files))


def _archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)  # with a fixed date, so that equal content gives equal bytes
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()
