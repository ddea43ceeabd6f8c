"""The order in which jobs of a search were done, in a file of its folder: with it, a search can be repeated."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..train.resume._check import check_checkpoint_options
from ._call_record import check_same_call
from ._check_saved import check_begun
from ._ladder import Job

_NAME = "order.jsonl"


class Order:
    """The jobs that were done, one a line, after a line with the call's own arguments; nothing without a folder."""

    def __init__(self, folder: Path | None, call: dict[str, Any], *, name: str) -> None:
        self._path = None if folder is None else folder / _NAME
        self._before: list[Job] = []
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_bytes().split(b"\n")[:-1] if self._path.exists() else []  # without one that was cut
        if lines:
            check_same_call(json.loads(lines[0]), call, folder, name=name)
        self._before = [Job(tuple(members), rung) for members, rung in map(json.loads, lines[1:])]
        kept = [json.dumps(call), *(json.dumps(job) for job in self._before)]
        temporary = self._path.with_suffix(".new")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, self._path)
        self._before.reverse()

    def next(self, waiting: Iterable[Job]) -> Job | None:
        """Which of the jobs that are done is the next one; `None` if it is not among them."""
        waiting = list(waiting)
        if self._before:
            return self._before.pop() if self._before[-1] in waiting else None
        if not waiting:
            return None
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(json.dumps(waiting[0]) + "\n")
        return waiting[0]

    def drop(self, job: Job) -> None:
        """A job that was done before, and is not any more."""
        self._before = [other for other in self._before if other != job]


def check_resume(options: dict[str, Any], folder: Path | None, *, name: str) -> None:
    """Takes `resume` out of the options, which is about the call, and not about its shards."""
    resume = options.pop("resume", "auto")
    check_checkpoint_options(folder, options.get("checkpoint_every"), resume, name=name)
    if folder is not None:
        check_begun(folder, resume, begun=(folder / _NAME).exists(), name=name)
