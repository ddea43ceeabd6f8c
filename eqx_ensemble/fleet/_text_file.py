"""Small text files of a search, which are on the disk when a function returns."""

import json
import os
from pathlib import Path
from typing import Any, TextIO

from ..checkpoint._damage import corrupt_error


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    temporary = path.with_suffix(".new")
    with open(temporary, "w") as file:
        _write(file, text)
    os.replace(temporary, path)


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file."""
    with open(path, "a") as file:
        _write(file, line + "\n")


def read_json(path: Path, kind: type) -> Any:
    """The value in a file."""
    return parse_json(path.read_bytes(), path, kind)


def parse_json(text: bytes, path: Path, kind: type) -> Any:
    """The value in a file, or in one line of it; raises `CheckpointCorruptError` for another kind, or for no JSON."""
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
    os.fsync(file.fileno())
