"""A file with the arguments that later rungs of a search depend on; the runs of the first rung do not record them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ._text_file import read_json, write_text

_NAME = "call.json"


class CallRecord:
    """The arguments of a search, in a file of its folder. Without a folder nothing is read or written.

    The file is written after the first rung, so that a call that fails earlier can be repeated with other arguments.
    """

    def __init__(self, folder: Path | None, call: dict[str, Any], *, name: str) -> None:
        self._path, self._call = None if folder is None else folder / _NAME, call
        if self._path is not None and self._path.exists():
            check_same_call(read_json(self._path, dict), call, folder, name=name)

    def write(self) -> None:
        """Writes the arguments, atomically."""
        if self._path is not None and not self._path.exists():
            write_text(self._path, json_text(self._call))


def json_text(call: dict[str, Any]) -> str:
    """Arguments as JSON, with NumPy scalars as numbers."""
    return json.dumps(call, default=lambda x: x.item() if isinstance(x, np.generic) else float(x))


def check_same_call(found: dict[str, Any], call: dict[str, Any], folder: Any, *, name: str) -> None:
    """Raises if a folder belongs to another call."""
    call = json.loads(json_text(call))
    differing = [
        f"  {word}: saved {found.get(word)}, now {call.get(word)}"
        for word in sorted(found.keys() | call.keys())
        if found.get(word) != call.get(word)
    ]
    if differing:
        raise ValueError(
            "\n".join(
                [
                    f"`{name}` cannot resume: `{folder}` belongs to a different call.",
                    *differing,
                    "Choose another folder.",
                ]
            )
        )
