"""A tree in one file: a safetensors file whose header describes every leaf, and which is put in place complete."""

import contextlib
import dataclasses
import enum
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from ._caller import caller
from ._check import CheckpointCorruptError, check_path
from ._ensemble import Ensemble, split_own
from ._leaves import is_key, is_member_array, is_traced, kind_text, path_text
from ._map import is_per_member
from ._pytree import PyTree
from ._version import __version__
from .distributed import is_first, raise_on_all, to_host

PathLike = str | os.PathLike[str]
_OURS = "eqx_ensemble"  # the key of our part of the header
_DIGESTS = "sha256"  # the name of the array of digests; paths of leaves begin with `.`, `[` or `<`


def shape_text(dtype: Any, shape: Sequence[int]) -> str:
    """A dtype and a shape, such as `float32[8,50,13]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


class Leaf(NamedTuple):
    """What a file says of an array. Members of an array `(members, ...)` have a digest each."""

    dtype: str
    shape: tuple[int, ...]
    generator: str | None = None  # of keys, whose data the array holds
    per_member: bool = False

    def __str__(self) -> str:
        if self.generator is None:
            return shape_text(self.dtype, self.shape)
        return shape_text(jax.random.key(0, impl=self.generator).dtype, self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """The size of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def num_digests(self) -> int:
        """The number of parts with a digest."""
        return self.shape[0] if self.per_member else 1

    @property
    def is_native(self) -> bool:
        """Whether safetensors has the dtype, and all its readers of NumPy arrays do."""
        dtype = np.dtype(self.dtype)
        return dtype.isbuiltin == 1 and dtype.kind in "biuf" and dtype.itemsize <= 8

    @property
    def entry(self) -> tuple[str, list[int]]:
        """The dtype and the shape in safetensors: bytes for a dtype that is not native."""
        if not self.is_native:
            return "U8", [self.nbytes]
        dtype = np.dtype(self.dtype)
        return "BOOL" if dtype.kind == "b" else f"{dtype.kind.upper()}{8 * dtype.itemsize}", [*self.shape]


# Writing.


def save(path: PathLike, tree: PyTree, *, meta: Any = None) -> None:
    """Saves an ensemble, a model, a state or any other PyTree in one file.

    Arrays and Python numbers are saved, with a SHA-256 for every array, and for every member of stacked ones. Functions
    and static fields are described, so that [`eqx_ensemble.load`][] detects a different model.

    **Arguments:**

    - `path`: the file, in the format of safetensors. It is put in place complete, so that a killed process or a full
        disk leaves the old file. Missing folders are made.
    - `tree`: any PyTree. With several processes, all call `save`, and the first one writes.
    - `meta`: dicts, lists, strings and numbers to keep with it, for [`eqx_ensemble.contents`][].

    **Raises:** `OSError` if it cannot be written; `FileExistsError` if `path` exists and `save` did not write it;
    `TypeError` for traced arrays, a function without arrays, and metadata that JSON cannot hold.

    ```python
    import tempfile

    path = f"{tempfile.mkdtemp()}/ensemble.eqx"
    make = lambda key: eqx.nn.MLP(13, 1, 50, 2, key=key)
    ee.save(path, ee.build(make, 8, key=key), meta={"data": "boston"})
    ensemble = ee.load(path, make)
    ```
    """
    check_path(path, "path")
    if callable(tree) and not any(map(is_member_array, jax.tree.leaves(tree))):
        raise TypeError(
            f"`{caller()}` needs an ensemble or a model to save, not its constructor; got {kind_text(tree)}."
        )
    arrays, leaves, numbers, fixed = _split(tree)
    header = {"leaves": leaves, "numbers": numbers, "fixed": fixed, "meta": meta, "versions": _versions()}
    try:
        text = json.dumps(header)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{caller()}` keeps `meta` as JSON: {error}") from None
    failed = None
    if is_first():
        try:
            _write(Path(os.path.realpath(path)), text, arrays, leaves)
        except OSError as error:
            failed = error
    raise_on_all(failed)


def _split(tree: PyTree) -> tuple[dict[str, np.ndarray], dict[str, Leaf], dict[str, Any], dict[str, str]]:
    """The arrays of a tree on the host with what is said of them, its numbers, and descriptions of all else."""
    named, fixed = named_leaves(tree), statics(tree)
    marked = marked_leaves(tree)
    count = next(iter(marked.values()), None)
    arrays, leaves, numbers = {}, {}, {}
    for name, x in named.items():
        if is_scalar(x):
            numbers[name] = [type(x).__name__, [x.real, x.imag] if isinstance(x, complex) else x]
            continue
        if is_traced(x):
            raise TypeError(f"`{caller()}` needs concrete arrays, and `{name}` is traced: call it outside `jax.jit`.")
        generator = str(jax.random.key_impl(x)) if is_key(x) else None
        array = np.asarray(to_host(x))
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
        arrays[name] = array
        leaves[name] = Leaf(array.dtype.name, array.shape, generator, count is not None and marked.get(name) == count)
    return arrays, leaves, numbers, fixed


def _write(path: Path, text: str, arrays: dict[str, np.ndarray], leaves: dict[str, Leaf]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    if path.exists() and not is_ours(path):
        raise FileExistsError(errno.EEXIST, "It was not written by `save`, and is not overwritten", str(path))
    as_bytes = lambda x: x.reshape(-1).view(np.uint8)
    with ThreadPoolExecutor() as pool:  # of large arrays, nearly all time is in `hashlib`, which frees other threads
        found = pool.map(digests_of, map(as_bytes, arrays.values()), (leaves[name].num_digests for name in arrays))
    digests = b"".join(found)
    stored = {name: x if leaves[name].is_native else as_bytes(x) for name, x in arrays.items()}
    stored[_DIGESTS] = np.frombuffer(digests, np.uint8).reshape(-1, 32)
    with replacing(path) as new:
        try:
            save_file(stored, new, {_OURS: text, _DIGESTS: hashlib.sha256(text.encode()).hexdigest()})
        except SafetensorError as error:  # such as of a full disk
            raise OSError(errno.EIO, str(error), str(path)) from None


def digests_of(data: np.ndarray, count: int) -> bytes:
    """The SHA-256 of each of so many equal parts of an array's bytes."""
    return b"".join(hashlib.sha256(part.data).digest() for part in data.reshape(count, -1))


@functools.cache
def _versions() -> dict[str, str]:
    others = {name: importlib.metadata.version(name) for name in ("jax", "equinox", "optax")}
    return {"eqx_ensemble": __version__} | others


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file that replaces `path` at the end: at all times `path` holds the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    new.touch()
    mode = (path if path.exists() else new).stat().st_mode & 0o777
    try:
        yield new
        os.chmod(new, mode)  # safetensors makes files that others cannot read
        _sync(new)
        os.replace(new, path)
        _sync(path.parent)
    finally:
        new.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Writes a file, or the names in a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which one run uses at a time; the system releases it when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, is_held = path.with_name(f".{path.name}.lock"), False
    while not is_held:
        with open(lock, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(errno.EWOULDBLOCK, "Another run uses it", str(path)) from None
            with contextlib.suppress(FileNotFoundError):  # another run may have ended, and removed what was opened here
                is_held = os.path.samestat(os.fstat(file.fileno()), os.stat(lock))
            if is_held:
                for left in path.parent.iterdir():  # by a process that was killed while it wrote
                    if re.fullmatch(rf"\.{re.escape(path.name)}\.\d+\.\d+", left.name):
                        left.unlink(missing_ok=True)
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)


# The parts of a tree by name.


def is_scalar(x: Any) -> bool:
    """Whether a leaf is a Python number, of which a file holds the value."""
    return isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic)


def is_saved(x: Any) -> bool:
    """Whether a file holds a leaf, rather than a description of it."""
    return is_member_array(x) or isinstance(x, jax.ShapeDtypeStruct) or is_scalar(x)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The arrays, shapes and numbers of a tree by their paths."""
    found: dict[str, Any] = {}
    for path, x in jtu.tree_flatten_with_path(tree)[0]:
        if is_saved(x):
            name = path_text(path)
            found[name if name not in found else f"{name} {len(found)}"] = x
    return found


def marked_leaves(tree: PyTree) -> dict[str, int]:
    """The arrays of members, in ensembles, states and inputs marked `Each`, by their paths, with their first axis."""
    found = {}
    for path, node in jtu.tree_flatten_with_path(tree, is_leaf=is_per_member)[0]:
        own = split_own(node)[0] if is_per_member(node) else None
        found |= {path_text(path + inner): x.shape[0] for inner, x in jtu.tree_flatten_with_path(own)[0]}
    return found


def statics(tree: PyTree) -> dict[str, str]:
    """Short texts of the classes and static fields of Modules, and of leaves that are neither arrays nor numbers."""
    found, left = {}, [((), tree)]
    while left:
        path, node = left.pop()
        if isinstance(node, eqx.Module):
            fields = [field.name for field in dataclasses.fields(node) if field.metadata.get("static")]
            fields = [] if isinstance(node, Ensemble) else fields  # its axes follow from the shapes
            values = ", ".join(f"{name}={_text(getattr(node, name, None))}" for name in fields)
            found[path_text(path)] = f"{type(node).__name__}({values})"
        parts = jtu.tree_flatten_with_path(node, is_leaf=lambda x, node=node: x is not node)[0]
        if [inner for inner, _ in parts] != [()]:
            left += [(path + inner, x) for inner, x in reversed(parts)]
        elif not is_saved(node):
            found[path_text(path)] = _text(node)
    return found


def _text(x: Any) -> str:
    """A text that is the same in every process: plain values as they are, functions and classes by their names."""
    if x is None or isinstance(x, bool | int | float | complex | str | bytes | np.dtype | enum.Enum):
        return repr(x)
    if isinstance(x, tuple | list):
        return f"{type(x).__name__}({', '.join(map(_text, x))})"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{_text(key)}: {_text(value)}' for key, value in x.items())}}}"
    return getattr(x, "__name__", None) or type(x).__name__


# The header of a file.


class Header(NamedTuple):
    """The header of a file: what it says of the tree, and where the bytes of each array begin."""

    leaves: dict[str, Leaf]
    numbers: dict[str, Any]
    fixed: dict[str, str]
    meta: Any
    versions: dict[str, str]
    starts: dict[str, int]
    digests: dict[str, int]  # where those of a leaf begin


def read_header(path: PathLike) -> Header:
    """Reads the header of a file, and checks it."""
    try:
        with open(path, "rb") as file:
            whole = os.fstat(file.fileno()).st_size
            size = int.from_bytes(file.read(8), "little")
            if size > whole:
                raise ValueError("it is shorter than it says")
            fields = json.loads(file.read(size))
        own = fields.pop("__metadata__")
        if hashlib.sha256(own[_OURS].encode()).hexdigest() != own[_DIGESTS]:
            raise ValueError("its header has changed")
        header = json.loads(own[_OURS])
        leaves = {name: Leaf(dtype, tuple(shape), *rest) for name, (dtype, shape, *rest) in header["leaves"].items()}
        count = sum(leaf.num_digests for leaf in leaves.values())
        starts, end = {}, 0
        for name, leaf in {**leaves, _DIGESTS: Leaf("uint8", (count, 32))}.items():
            found = fields.pop(name)
            start, stop = found["data_offsets"]
            if (found["dtype"], found["shape"]) != leaf.entry or stop - start != leaf.nbytes:
                raise ValueError(f"the description of `{name}` has changed")
            starts[name], end = 8 + size + start, max(end, 8 + size + stop)
        if fields or end != whole:
            raise ValueError("its length has changed")
        digests, at = {}, starts.pop(_DIGESTS)
        for name, leaf in leaves.items():
            digests[name], at = at, at + 32 * leaf.num_digests
        return Header(**{**header, "leaves": leaves}, starts=starts, digests=digests)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"`{path}` is damaged, or was not written by `save`: {error}", str(path)) from None


def is_ours(path: PathLike) -> bool:
    """Whether `save` wrote a file."""
    with contextlib.suppress(CheckpointCorruptError, OSError):
        read_header(path)
        return True
    return False
