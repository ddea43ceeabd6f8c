"""Small text files, which are on the disk when a function returns."""

import os
from pathlib import Path
from typing import TextIO


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


def _write(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
