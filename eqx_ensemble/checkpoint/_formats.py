import errno
import functools as ft
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .._caller import caller
from .._check import CheckpointCorruptError
from ..distributed import is_first
from ..distributed._engine import raise_on_all
from . import _orbax
from ._damage import corrupt_error
from ._disk import has_manifest, is_on_disk, list_folder
from ._folders import (
    has_our_manifest,
    is_unfinished,
    is_written,
    not_a_checkpoint_message,
)
from ._manifest import Manifest, is_orbax
from ._orbax import OrbaxReader
from ._read import Reader, read_manifest
from ._snapshot import Snapshot, device_numbers, host_numbers
from ._write import write

# Recognises folders that are not checkpoints.

STEP = re.compile(r"step-([0-9]{12})")
_MEMBER = re.compile(r"member-[0-9]{6}\.(eqx|safetensors)")
_SHARD = re.compile(r"shard-[0-9]{6,}")
_ORBAX = {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "ocdbt.process_0", "orbax.checkpoint"}
_SINGLE = (".eqx", ".safetensors")


class Kind(NamedTuple):
    """The kind of a folder, as `not_a_checkpoint_message` names it, and the names in the folder that show it."""

    name: str
    found: list[str]


def kind_of(folder: Path) -> Kind:
    """The kind of a folder, from the names in it."""
    entries = sorted(list_folder(folder), key=lambda entry: entry.name)
    steps = [entry for entry in entries if STEP.fullmatch(entry.name) and entry.is_dir()]
    if steps:
        return Kind("fit" if any(map(_is_of_fit, steps)) else "run", [entry.name for entry in steps])
    found = [entry.name for entry in entries]
    members = [name for name in found if _MEMBER.fullmatch(name)]
    if members:
        return Kind("members", members)
    if _ORBAX & {*found}:
        return Kind("orbax", found)
    inside = [entry.name for entry in entries if entry.is_dir() and has_our_manifest(entry)]
    if "call" in inside and any(map(_SHARD.fullmatch, inside)):
        return Kind("shards", [name for name in inside if name != "call"])
    if inside:
        return Kind("checkpoints", inside)
    single = [name for name in found if name.endswith(_SINGLE)]
    if single:
        return Kind("files", single)
    return Kind("other" if found else "empty", found)


def _is_of_fit(step: Path) -> bool:
    try:
        return is_of_fit(read_manifest(step))
    except (CheckpointCorruptError, ValueError, OSError):
        return False


def is_of_fit(manifest: Manifest) -> bool:
    """Whether `fit` wrote a checkpoint."""
    meta: Any = manifest.meta
    return isinstance(meta, dict) and isinstance(meta.get("fit"), dict) and "identity" in meta["fit"]


_ATTEMPTS = 5


def open_checkpoint(path: Any) -> Reader | OrbaxReader:
    """Opens a checkpoint of either format for reading.

    **Arguments:** `path`, the folder, from `as_path`; `name`, the public function, for messages.
    """
    if is_on_disk(path):
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, f"`{caller()}` found no checkpoint at `{path}`")
        if not os.path.isdir(path):
            raise NotADirectoryError(
                errno.ENOTDIR,
                f"`{caller()}` needs the folder that `save` wrote, and `{path}` is a file.\nFiles of "
                "`equinox.tree_serialise_leaves` and safetensors files are read by `load_members`",
            )
        if not (has_our_manifest(path) or any(map(is_written, list_folder(path)))):
            raise FileNotFoundError(errno.ENOENT, not_a_checkpoint_message(path, *kind_of(path)))
    if not (not is_unfinished(path) if is_on_disk(path) else has_manifest(path)):
        raise FileNotFoundError(errno.ENOENT, f"`{caller()}` found no finished checkpoint at `{path}`")
    for _ in range(_ATTEMPTS):
        manifest = read_manifest(path)
        try:
            return OrbaxReader(path, manifest) if is_orbax(manifest.file) else Reader(path, manifest)
        except FileNotFoundError:
            # If the checkpoint was overwritten in between, the new manifest names other arrays.
            if read_manifest(path) == manifest:
                first = manifest.entries[0].path if manifest.entries else None
                raise corrupt_error(path / manifest.file, "the file is missing", leaf=first) from None
    raise corrupt_error(path, "another process keeps overwriting it")


FormatName = Literal["safetensors", "orbax"]


class Format(NamedTuple):
    """A format of checkpoints: the functions in which formats differ."""

    take: Callable[..., Any]
    """Returns the numbers of an array leaf, for a `Snapshot`."""

    begin: Callable[[Any, Snapshot], Callable[[], None]]
    """Begins a checkpoint; returns a function that completes it, in any thread."""

    stands: Callable[[Any], bool]
    """Whether there is a complete checkpoint at a path."""

    settle: Callable[[Callable[[], None]], None]
    """Runs a job that may fail. All processes that write a checkpoint together call it."""

    leads: Callable[[], bool]
    """Whether this process does the work that one process does for all."""


def _begin(path: Any, content: Snapshot) -> Callable[[], None]:
    return ft.partial(write, path, content)


def _run(job: Callable[[], None]) -> None:
    job()


def _run_together(job: Callable[[], None]) -> None:
    error = None
    try:
        job()
    except Exception as failure:
        error = failure
    raise_on_all(error)


FORMATS: dict[str, Format] = {
    "safetensors": Format(host_numbers, _begin, Path.is_dir, _run, lambda: True),
    "orbax": Format(device_numbers, _orbax.begin, has_manifest, _run_together, is_first),
}
