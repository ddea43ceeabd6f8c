import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, overload

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh

from .. import _axes
from .._caller import caller
from .._check import (
    MemberMismatchError,
    check_flag,
    check_integer_ids,
    check_path,
    is_key,
    is_member_array,
    kind_text,
    path_text,
)
from .._ensemble import Ensemble, M
from .._ids import open_all
from .._pytree import PyTree
from ..checkpoint._engine import (
    FORMATS,
    FormatName,
    Manifest,
    as_path,
    check_format,
    is_of_fit,
    open_checkpoint,
    restore,
    safe_text,
    snapshot,
)
from ..distributed import to_host
from ..sharding._engine import Layout, as_layout, replicate, shard_members
from ..tree._engine import check_distinct, check_index
from ._like import as_like, check_like_given, check_member_selection

PathLike = str | os.PathLike[str]
Model = TypeVar("Model", bound=eqx.Module)
Tree = TypeVar("Tree")


class LoadOptions(TypedDict, total=False):
    """The options of `load`."""

    members: Any
    cast: Literal["like"] | None
    strict: bool
    mesh: Mesh | None


class Digest(eqx.Module):
    """Stands in a file for a shared array that is not written: its SHA-256, 32 bytes."""

    sha256: Any


def save(
    path: PathLike, tree: PyTree, *, shared: bool = True, meta: Any = None, format: FormatName = "safetensors"
) -> None:
    """Saves an ensemble, a model or any other PyTree.

    Arrays (also typed keys) and Python numbers are saved with checksums; functions, strings and static fields are
    described, so that [`eqx_ensemble.load`][] detects a different model.

    **Arguments:**

    - `path`: the folder to write: a manifest in JSON, and the arrays as safetensors. Missing parents are created; an
        existing checkpoint is replaced.
    - `tree`: any PyTree.
    - `shared`: whether to write the [shared arrays](../how-it-runs.md#shared-arrays) of ensembles. With `False` only
        their SHA-256 is written: `like` of [`eqx_ensemble.load`][] must hold equal ones. For members that
        [adapt][eqx_ensemble.methods.adapters.low_rank] a large base model.
    - `meta`: dicts, lists, strings and numbers to keep with it, for [`eqx_ensemble.checkpoint.contents`][].
    - `format`: `"safetensors"`, or [`"orbax"`](#orbax) for several processes and object stores.

    **Raises:** `OSError` if it cannot be written; `FileExistsError` if `path` exists and is not a checkpoint;
    `TypeError` for traced arrays, a function without arrays, and metadata that JSON cannot hold.

    ```python
    import tempfile

    path = f"{tempfile.mkdtemp()}/ensemble"
    make = lambda key: eqx.nn.MLP(13, 1, 50, 2, key=key)
    ee.save(path, ee.build(make, 8, key=key), meta={"data": "boston"})
    ensemble = ee.load(path, make)
    ```
    """
    check_format(format, path)
    check_flag(shared, "shared")
    leaves = jax.tree.leaves(tree)
    if callable(tree) and all(callable(leaf) and not is_member_array(leaf) for leaf in leaves):
        raise TypeError(
            f"`{caller()}` got {kind_text(tree)} without any array.\nPass the ensemble or the model, not its "
            "constructor."
        )
    for ensemble in _ensembles(tree):
        check_integer_ids(ensemble.ids)
    tree = open_all(tree if shared else _put_digests(tree))
    how, marked = FORMATS[format], marks(tree)
    content = snapshot(tree, per_member=marked.per_member, ids=marked.ids, meta=meta, take=how.take)
    how.settle(how.begin(as_path(path), content))


@overload
def load(path: PathLike, like: Model, **options: Unpack[LoadOptions]) -> Model: ...
@overload
def load(
    path: PathLike, like: Callable[..., tuple[M, eqx.nn.State]], **options: Unpack[LoadOptions]
) -> tuple[Ensemble[M], eqx.nn.State]: ...
@overload
def load(path: PathLike, like: Callable[..., M], **options: Unpack[LoadOptions]) -> Ensemble[M]: ...
@overload
def load(path: PathLike, like: Tree, **options: Unpack[LoadOptions]) -> Tree: ...
def load(
    path: PathLike,
    like: Any,
    *,
    members: Any = None,
    cast: Literal["like"] | None = None,
    strict: bool = True,
    mesh: Mesh | None = None,
) -> PyTree:
    """Loads a tree that [`eqx_ensemble.save`][] saved.

    Numbers, verified, come from the file, in the dtypes that were saved; code and all other values come from `like`.

    **Arguments:**

    - `path`: the folder.
    - `like`: the function that makes one member from a key, as given to [`eqx_ensemble.build`][]; or a tree like the
        one saved, or its shapes, from `equinox.filter_eval_shape`. A tree, if the file was written with `shared=False`:
        its shared arrays are kept. Arrays are NumPy arrays, or sharded, where those of `like` are.
    - `members`: positions of the members to read, as in `ensemble[members]`; `like` may have any number. The tree must
        contain one ensemble, besides states and inputs marked `Each`.
    - `cast`: `"like"` casts numbers of one kind to the precision of `like`, if none becomes infinite or wraps around.
    - `strict`: `False` warns instead of raising when functions, strings or static fields differ. Functions are compared
        by name, other objects by type: a different `lambda` is not detected.
    - `mesh`: the devices for ensembles, from [`eqx_ensemble.make_mesh`][].

    **Returns:** a tree like the one that was saved; an ensemble, if `like` is a function that makes a member.

    **Raises:** `MemberMismatchError` with every leaf that differs; `CheckpointCorruptError` with the damaged file, leaf
    and member; `FileNotFoundError` if there is no checkpoint; `ValueError` for a checkpoint of a run of `fit`.

    ```python
    import tempfile

    path = f"{tempfile.mkdtemp()}/ensemble"
    make = lambda key: eqx.nn.MLP(13, 1, 50, 2, key=key)
    ee.save(path, ee.build(make, 8, key=key))
    ee.load(path, make, members=[0, 3])  # two members, which keep their ids
    ```
    """
    check_path(path, "path")
    check_like_given(like)
    check_flag(strict, "strict")
    layout = as_layout(mesh)
    with open_checkpoint(as_path(path)) as reader:
        if is_of_fit(reader.manifest) and not isinstance(like, dict):
            raise ValueError(
                f"`{caller()}` needs a checkpoint of an ensemble or a model, and `{reader.folder}` is one of a run of "
                "`fit`: it holds the whole training state.\nThe same call of `fit` with "
                f"`checkpoint={str(reader.folder.parent)!r}` gives the run; to load the ensemble without it, keep it "
                "with `save(path, run.ensemble)`."
            )
        omitted = _digest_paths(reader.manifest)
        like = _check_holds(like, omitted, reader.folder) if omitted else as_like(like, reader.manifest)
        rows, expected = None, like
        if members is not None:
            check_member_selection(members)
            rows = _rows(members, reader.manifest, path)
            _one_set_of_members(like, reader.manifest, path)
        if omitted:
            digest = Digest(jax.ShapeDtypeStruct((32,), np.uint8))
            expected = jtu.tree_map_with_path(lambda path, x: digest if path_text(path) in omitted else x, like)
        tree = restore(reader, expected, rows=rows, cast=cast, strict=strict)
        tree = _put_arrays(tree, like, reader.folder) if omitted else tree
    return tree if layout is None else _shard(tree, layout)


def _put_digests(tree: PyTree) -> PyTree:
    """The tree with digests for the shared arrays of its ensembles."""

    def cut(node: Any) -> Any:
        if not isinstance(node, Ensemble):
            return node
        digest = lambda x: Digest(_sha256(x)) if is_member_array(x) else x
        return eqx.tree_at(lambda x: x.shared, node, jax.tree.map(digest, node.shared))

    return jax.tree.map(cut, tree, is_leaf=lambda x: isinstance(x, Ensemble))


def _sha256(x: Any) -> np.ndarray:
    data = to_host(jax.random.key_data(x) if is_key(x) else x)
    text = f"{x.dtype} {data.shape} ".encode()
    return np.frombuffer(hashlib.sha256(text + np.ascontiguousarray(data).tobytes()).digest(), np.uint8)


def _digest_paths(manifest: Manifest) -> set[str]:
    """The paths of the arrays whose digests are in the file instead of them."""
    found = (entry.path.removesuffix(".sha256") for entry in manifest.entries if entry.path.endswith(".sha256"))
    return {path for path in found if manifest.structure.get(path) == Digest.__name__}


def _check_holds(like: Any, omitted: set[str], folder: Any) -> Any:
    """Raises unless `like` is a tree with the arrays that were not written. Returns it."""
    keyed = {path_text(path): x for path, x in jtu.tree_flatten_with_path(like)[0]}
    missing = [path for path in sorted(omitted) if not is_member_array(keyed.get(path))]
    if missing:
        raise MemberMismatchError(
            f"`{caller()}` needs the shared arrays of `{folder}`, saved with `shared=False`, in `like`.\n  at "
            f"`{safe_text(missing[0])}`: expected an array, got {kind_text(keyed.get(missing[0]))}\nPass an ensemble "
            "on the same base, made as the one that was saved: `like=methods.adapters.low_rank(base, ...)`."
        )
    return like


def _put_arrays(tree: PyTree, like: Any, folder: Any) -> PyTree:
    """The tree with the arrays of `like` for their digests. Raises unless they are those of the saved ensemble."""
    is_digest = lambda x: isinstance(x, Digest)
    arrays = {path_text(path): x for path, x in jtu.tree_flatten_with_path(like)[0]}
    keyed, treedef = jtu.tree_flatten_with_path(tree, is_leaf=is_digest)
    saved = {path_text(path): x.sha256 for path, x in keyed if is_digest(x)}
    others = [path for path in sorted(saved) if not np.array_equal(saved[path], _sha256(arrays[path]))]
    if others:
        raise MemberMismatchError(
            f"`{caller()}` needs the base model on which `{folder}` was trained in `like`; {len(others)} of "
            f"{len(saved)} shared arrays differ, such as `{safe_text(others[0])}`.\nTrained members do not fit another "
            "base."
        )
    return jtu.tree_unflatten(treedef, [arrays[path_text(path)] if is_digest(x) else x for path, x in keyed])


def _shard(tree: Any, layout: Layout) -> Any:
    """Shards the members of ensembles and states over the mesh, and replicates everything else."""

    def put(node: Any) -> Any:
        if not isinstance(node, Ensemble):
            return shard_members(node, layout) if isinstance(node, eqx.nn.State) else replicate(node, layout)
        of_node = layout.split_weights(node.stacked)
        return Ensemble(
            shard_members(node.stacked, of_node), replicate(node.shared, of_node), replicate(node.ids, of_node)
        )

    return jax.tree.map(put, tree, is_leaf=_axes.is_per_member)


def _ensembles(tree: PyTree) -> Iterator[Ensemble]:
    """The ensembles of a tree, and those nested in them."""
    for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Ensemble)):
        if isinstance(node, Ensemble):
            yield node
            yield from _ensembles((node.stacked, node.shared))


class Marks(NamedTuple):
    """Flags of the leaves that carry the members axis, and the members' ids."""

    per_member: PyTree
    ids: np.ndarray | None


def marks(tree: PyTree) -> Marks:
    """Finds the members of a tree in its ensembles, states and inputs marked `Each`.

    If a tree has several sets of members, only those of the first one have separate checksums. Files hold members
    along the leading axis only: an `Each` along another axis is saved as one array.
    """
    nodes = jax.tree.leaves(tree, is_leaf=_axes.is_per_member)
    ids = next((to_host(node.ids) for node in nodes if isinstance(node, Ensemble) and node.ids is not None), None)
    if ids is None:
        counts = [_count(node) for node in nodes if isinstance(node, _axes.Each)]
        ids = next((np.arange(count) for count in counts if count is not None), None)
    flags = [flag for node in nodes for flag in _flags(node, ids)]
    return Marks(jax.tree.unflatten(jax.tree.structure(tree), flags), ids)


def _flags(node: Any, ids: np.ndarray | None) -> Iterable[bool]:
    if isinstance(node, Ensemble):
        own = ids is not None and node.ids is not None and np.array_equal(to_host(node.ids), ids)
        stacked, shared = (len(jax.tree.leaves(part)) for part in (node.stacked, node.shared))
        its_ids = len(jax.tree.leaves(node)) - stacked - shared
        return [own] * stacked + [False] * shared + [own] * its_ids
    own = ids is not None and _axes.is_per_member(node) and _count(node) == len(ids)  # by count: they have no ids
    return [own] * len(jax.tree.leaves(node))


def _count(node: Any) -> int | None:
    """The length of the leading axis of all arrays of a node; `None` if they differ or `Each` has another axis."""
    if isinstance(node, _axes.Each) and node.axis != 0:
        return None
    shapes = {x.shape[:1] for x in jax.tree.leaves(eqx.filter(node, is_member_array))}
    return shapes.pop()[0] if len(shapes) == 1 and () not in shapes else None


def _one_set_of_members(like: Any, manifest: Manifest, path: PathLike) -> None:
    """Checks that a tree has one set of members, so that some of them can be selected."""
    kinds = {entry.path: entry.kind for entry in manifest.entries}
    keyed, _ = jtu.tree_flatten_with_path(like, is_leaf=_axes.is_per_member)
    marked = [(keys, node) for keys, node in keyed if _axes.is_per_member(node)]
    ensembles = [path_text(keys) for keys, node in marked if isinstance(node, Ensemble)]
    others = []
    for keys, node in marked:
        leaves = [kinds.get(path_text(keys + inner)) for inner, _ in jtu.tree_flatten_with_path(node)[0]]
        if not isinstance(node, Ensemble) and "shared" in leaves:
            others.append(path_text(keys))
    if len(ensembles) > 1:
        raise ValueError(
            f"`{caller()}` cannot choose members of `{path}`, which holds several ensembles: at "
            f"{', '.join(f'`{safe_text(where)}`' for where in ensembles)}.\nLoad all of it and index each ensemble, or "
            "save each at a path of its own."
        )
    if others:
        raise ValueError(
            f"`{caller()}` cannot choose members of `{path}`: what is marked at "
            f"{', '.join(f'`{safe_text(where)}`' for where in others)} was saved as a whole, because it has another "
            "number of members or holds them along another axis.\nLoad all of it, and take the members from each part."
        )


def _rows(members: Any, manifest: Manifest, path: PathLike) -> list[int]:
    ids = manifest.members
    if ids is None:
        raise ValueError(
            f"`{caller()}` cannot choose members of `{path}`: it was saved without members.\n"
            "Members are those of an `Ensemble` or an `Each` in the tree that was saved."
        )
    return _positions(members, len(ids or ()))


def _positions(members: Any, num_members: int) -> list[int]:
    rows = check_index(list(members) if isinstance(members, range) else members, num_members)
    check_member_selection(rows)  # of an array without axes
    check_distinct(rows)
    return [int(row) for row in rows]
