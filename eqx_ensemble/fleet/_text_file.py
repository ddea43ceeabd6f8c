"""Small text files of a search, synced to disk before a function returns."""

import contextlib
import json
from pathlib import Path
from typing import Any, TextIO

from ..checkpoint import _disk
from ..checkpoint._damage import corrupt_error


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    temporary = path.with_suffix(".new")
    with open(temporary, "w") as file:
        _write(file, text)
    _disk.replace(temporary, path)
    with contextlib.suppress(OSError):  # some file systems cannot sync folders
        _disk.sync_folder(path.parent)


def read_json(path: Path, kind: type) -> Any:
    """The JSON value in a file."""
    return parse_json(path.read_bytes(), path, kind)


def parse_json(text: bytes, path: Path, kind: type) -> Any:
    """The JSON value of a file or of one of its lines; raises `CheckpointCorruptError` unless it is of this kind."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise corrupt_error(path, "it is not JSON") from error
    if not isinstance(value, kind):
        raise corrupt_error(path, f"it does not hold a {kind.__name__}")
    return value


def _write(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()
    _disk.sync(file.fileno())
