import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, overload

import equinox as eqx

from .._check import check_path
from .._ensemble import Ensemble, Group, M, stack
from .._ensemble._check import check_ensemble_or_group
from ..checkpoint._path import absolute, as_path, is_on_disk
from ..checkpoint._write import write_file
from ._check import check_like_given, check_member_format, check_no_typed_keys, check_paths
from ._like import evaluate_make, is_maker
from ._save_load import Model, PathLike, Tree, load
from ._single import read_equinox, read_safetensors, to_safetensors


def export_members(
    ensemble: Ensemble[Any] | Group, folder: PathLike, *, format: Literal["eqx", "safetensors"] = "eqx"
) -> list[Path]:
    """Writes each member to a separate file that other libraries can read.

    **Arguments:**

    - `ensemble`: the ensemble or the group.
    - `folder`: the folder to write to; files in it with the same names are replaced.
    - `format`: `"eqx"` for files that `equinox.tree_deserialise_leaves` reads; `"safetensors"` for the arrays by name,
        such as `layers.0.weight`, which many languages and frameworks read.

    **Returns:** the paths, `member-000003.eqx` for the member with id 3, in the order of the members.

    **Raises:** `TypeError` for arrays that the format cannot hold: typed keys in either, complex128 in safetensors.

    ```python
    import tempfile

    make = lambda key: eqx.nn.Linear(3, 1, key=key)
    ensemble = ee.build(make, 2, key=key)
    paths = ee.export_members(ensemble, tempfile.mkdtemp())
    eqx.tree_deserialise_leaves(paths[0], make(key))  # the first member
    ee.load_members(paths, make)  # the ensemble
    ```
    """
    name = "export_members"
    check_ensemble_or_group(ensemble, name=name)
    check_path(folder, "folder", name=name)
    check_member_format(format, name=name)
    paths = []
    for i, member_id in enumerate(ensemble.ids.tolist()):
        paths.append(absolute(as_path(folder)) / f"member-{member_id:06d}.{format}")
        write_file(paths[-1], _encode(ensemble[i], format, name))
    return paths


def _encode(model: Any, format: str, name: str) -> bytes:
    if format == "safetensors":
        return to_safetensors(model, name=name)
    check_no_typed_keys(model, "`equinox.tree_serialise_leaves` cannot write them", name=name)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    return file.getvalue()


@overload
def load_members(paths: Iterable[PathLike], like: Model, *, ids: Any = None) -> Ensemble[Model]: ...
@overload
def load_members(paths: Iterable[PathLike], like: Callable[..., M], *, ids: Any = None) -> Ensemble[M]: ...
@overload
def load_members(paths: Iterable[PathLike], like: Tree, *, ids: Any = None) -> Ensemble[Tree]: ...
def load_members(paths: Iterable[PathLike], like: Any, *, ids: Any = None) -> Ensemble[Any]:
    """Loads many files of one model each into one [`eqx_ensemble.Ensemble`][].

    **Arguments:**

    - `paths`: files of `equinox.tree_serialise_leaves`, files `.safetensors` with the names that
        [`eqx_ensemble.export_members`][] gives them, or folders of [`eqx_ensemble.save`][]. Only the last kind has
        checksums; in the others, a changed bit is not detected.
    - `like`: a template of the model in one file: a function that makes it from a key, a model, or its shapes.
    - `ids`: the members' ids; `0, 1, 2, ...` if not given.

    **Returns:** an ensemble with one member per path.

    **Raises:** `MemberMismatchError` with every leaf of a file that differs from `like`; `CheckpointCorruptError` for
    files that are truncated or in another format; `FileNotFoundError` for a missing file; `ValueError` if there are no
    paths.

    ```python
    import tempfile

    folder = tempfile.mkdtemp()
    make = lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key)
    for i in range(4):
        eqx.tree_serialise_leaves(f"{folder}/{i}.eqx", make(jax.random.key(i)))
    ensemble = ee.load_members([f"{folder}/{i}.eqx" for i in range(4)], make)
    ```
    """
    name = "load_members"
    paths = check_paths(paths, name=name)
    check_like_given(like, name=name)
    like = evaluate_make(like) if is_maker(like) else like
    return stack([_one(as_path(path), like, name) for path in paths], ids=ids)


def _one(path: Any, like: Any, name: str) -> Any:
    if not is_on_disk(path) or path.is_dir():
        return load(path, like)
    if path.suffix == ".safetensors":
        return read_safetensors(path, like, name=name)
    if not path.exists() and path.suffix == "":
        path = path.with_suffix(".eqx")  # as equinox does
    return read_equinox(path, like, name=name)
