"""What identifies a search in its folder: arguments on which the later rungs depend, and not the first."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

_NAME = "call.json"


class CallRecord:
    """The arguments of a search, in a file of its folder; nothing without a folder.

    They are written once the first rung has ended: a call that failed before it is no call to go on with.
    """

    def __init__(self, folder: Path | None, call: dict[str, Any], *, name: str) -> None:
        self._path, self._call = None if folder is None else folder / _NAME, call
        if self._path is not None and self._path.exists():
            check_same_call(json.loads(self._path.read_text()), call, folder, name=name)

    def write(self) -> None:
        """Writes them, atomically."""
        if self._path is None or self._path.exists():
            return
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json_text(self._call))
        os.replace(temporary, self._path)


def json_text(call: dict[str, Any]) -> str:
    """Arguments as JSON, with numbers of NumPy as Python's."""
    return json.dumps(call, default=lambda x: x.item() if isinstance(x, np.generic) else float(x))


def check_same_call(found: dict[str, Any], call: dict[str, Any], folder: Any, *, name: str) -> None:
    """Raises for a folder of another call."""
    call = json.loads(json_text(call))
    differing = [
        f"  {word}: {found.get(word)} there, {call.get(word)} here"
        for word in sorted(found.keys() | call.keys())
        if found.get(word) != call.get(word)
    ]
    if differing:
        raise ValueError(
            "\n".join([f"`{name}` cannot resume: `{folder}` is of another call.", *differing, "Choose another folder."])
        )
