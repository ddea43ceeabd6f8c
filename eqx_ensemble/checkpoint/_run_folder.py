"""The folder of a run: its checkpoints, and their retention."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._warnings import warn
from ._formats import Format
from ._kind import STEP
from ._names import foreign_content, is_unfinished
from ._path import list_folder
from ._read import read_manifest
from ._write import clean, remove


class Retention(NamedTuple):
    """Which checkpoints are kept: the `last` newest, the `best` by score, and every multiple of `keep_period`."""

    last: int
    best: int
    keep_period: int | None

    def superfluous(self, scores: Mapping[int, float | None], newest: int) -> list[int]:
        """The steps that are not kept, given the scores of all; `newest`, the one just saved, always is."""
        kept = {newest, *sorted(scores)[-self.last :]}
        scored = [(score, -step) for step, score in scores.items() if score is not None]
        kept |= {-step for _, step in sorted(scored)[: self.best]}
        return [step for step in scores if step not in kept and not (self.keep_period and step % self.keep_period == 0)]


class RunFolder:
    """Checkpoints in one folder, numbered by step; old ones are removed after each save."""

    def __init__(self, path: Any, format: Format, retention: Retention) -> None:
        self._path, self._format, self._retention = path, format, retention
        self._scores: dict[int, float | None] = {}
        self._warned: set[int] = set()

    def step_path(self, step: int) -> Any:
        """The folder of one checkpoint."""
        return self._path / f"step-{step:012d}"

    def steps(self) -> list[int]:
        """The step numbers of the complete checkpoints, in order."""
        return sorted(step for step, entry in self._entries() if self._format.stands(entry))

    def finish(self, step: int, write: Callable[[], None], score: float | None) -> None:
        """Writes a checkpoint, then removes those that are not kept."""
        write()
        self._scores[step] = score
        if not self._format.leads():
            return
        try:
            clean(self._path, STEP)
            for old in self._retention.superfluous(self._kept_scores(), step):
                self._remove(old)
        except OSError as error:
            warn(f"Step {step} is saved, but an old checkpoint could not be removed: {error}")

    def _entries(self) -> list[tuple[int, Any]]:
        """The folders of checkpoints, also of those that were never finished, with their steps."""
        matches = [(STEP.fullmatch(entry.name), entry) for entry in list_folder(self._path)]
        found = [(int(match[1]), entry) for match, entry in matches if match]
        return [(step, entry) for step, entry in found if step in self._scores or entry.is_dir()]

    def _kept_scores(self) -> dict[int, float | None]:
        """The scores of the complete checkpoints. Those that a killed process did not finish are removed.

        One whose manifest cannot be read has no score: it is neither counted nor removed. Each is read once.
        """
        entries = self._entries()
        for step, entry in entries:
            if step in self._scores:
                continue
            if is_unfinished(entry) and not foreign_content(entry):
                remove(entry)
            elif self._format.stands(entry):
                with contextlib.suppress(ValueError, OSError):
                    self._scores[step] = read_manifest(entry).score
        return {step: self._scores[step] for step, _ in entries if step in self._scores}

    def _remove(self, step: int) -> None:
        """Removes an old checkpoint; one that contains other files is kept, with one warning."""
        try:
            remove(self.step_path(step))
            del self._scores[step]
        except FileExistsError as error:
            if step not in self._warned:
                self._warned.add(step)
                warn(f"An old checkpoint is kept: {error}")
