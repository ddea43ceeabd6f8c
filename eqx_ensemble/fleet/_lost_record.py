"""A file with the members that a search lost at a rung, so that a resumed call leaves them out as well."""

import json
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..methods._round_folders import has_checkpoints
from ..train._run import Run
from ._check_saved import done_before_message
from ._divide import take_members
from ._text_file import read_json, write_text

_NAME = "lost.json"


class LostRecord:
    """The members lost at a rung, if the next rung, in the folder `after`, has started.

    Otherwise they are retried. Without a folder nothing is read or written.
    """

    def __init__(self, folder: Path | None, after: Path | None, *, name: str) -> None:
        self._path, self._name = None if folder is None else folder / _NAME, name
        self._next_has_started = after is not None and has_checkpoints(after)
        self._before: list[int] = []
        if self._next_has_started and self._path is not None and self._path.exists():
            self._before = read_json(self._path, list)

    def leave_out(self, run: Run[Any]) -> Run[Any]:
        """The run without the lost members."""
        ids = np.asarray(run.ensemble.ids)
        lost = np.isin(ids, self._before)
        return take_members(run, np.flatnonzero(~lost)) if lost.any() else run

    def write(self, ids: np.ndarray) -> None:
        """Writes the ids of lost members atomically."""
        if self._path is None or not (len(ids) or self._path.exists()):
            return
        if self._next_has_started and not np.isin(ids, self._before).all():
            raise BrokenExecutor(done_before_message(self._path.parent, name=self._name))
        write_text(self._path, json.dumps(ids.tolist()))
