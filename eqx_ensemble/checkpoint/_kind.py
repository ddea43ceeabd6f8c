"""Recognises folders that are not checkpoints."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from .._check import CheckpointCorruptError
from ._manifest import Manifest
from ._names import is_sealed
from ._path import list_folder
from ._read import read_manifest

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
    inside = [entry.name for entry in entries if entry.is_dir() and is_sealed(entry)]
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
