"""The members that a search went on without after a rung, in a file of its folder: the rungs after it are of others."""

import json
import os
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..methods._round_folders import has_checkpoints
from ..train._run import Run
from ._check_saved import done_before_message
from ._cut import cut_start

_NAME = "lost.json"


class LostRecord:
    """The members that were lost at a rung, where the one `after` it has begun; nothing without a folder.

    Where it has not, they are tried again.
    """

    def __init__(self, folder: Path | None, after: Path | None, *, name: str) -> None:
        self._path, self._name = None if folder is None else folder / _NAME, name
        self._has_begun = after is not None and has_checkpoints(after)
        self._before: list[int] = []
        if self._has_begun and self._path is not None and self._path.exists():
            self._before = json.loads(self._path.read_text())

    def leave_out(self, run: Run[Any]) -> Run[Any]:
        """A run without them."""
        ids = np.asarray(run.ensemble.ids)
        lost = np.isin(ids, self._before)
        return cut_start(run, np.flatnonzero(~lost)) if lost.any() else run

    def write(self, ids: np.ndarray) -> None:
        """Writes the ids of members that are lost, atomically."""
        if self._path is None or not (len(ids) or self._path.exists()):
            return
        if self._has_begun and not np.isin(ids, self._before).all():
            raise BrokenExecutor(done_before_message(self._path.parent, name=self._name))
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(ids.tolist()))
        os.replace(temporary, self._path)
