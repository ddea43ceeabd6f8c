"""The order in which jobs of a search ended, in a file of its folder: with it, a search can be repeated."""

import json
import os
from collections import deque
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..train.resume._check import check_checkpoint_options
from ._call_record import check_same_call, json_text
from ._check_saved import check_begun, done_before_message
from ._ladder import Job
from ._shard import Finished

_NAME, _GIVEN_UP = "order.jsonl", "given up"


class Turn(NamedTuple):
    """A job whose end is next.

    **Attributes:**

    - `run`: what it came to; `None` if it was given up.
    - `is_late`: whether it was given up before: its worker has gone on to another job since.
    """

    job: Job
    run: Any
    is_late: bool


class Order:
    """The jobs that ended, one a line, after a line with the call's own arguments; only in memory without a folder.

    Whether a job was done or given up decides what follows. So a call that goes on takes both from the file, and jobs
    that were given up then, and are done now, when all of the file is repeated.
    """

    def __init__(self, folder: Path | None, call: dict[str, Any], *, name: str) -> None:
        self._path, self._name = None if folder is None else folder / _NAME, name
        self._before: deque[tuple[Job, bool]] = deque()
        self._ended: dict[Job, Any] = {}
        self._given_up: set[Job] = set()
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_bytes().split(b"\n")[:-1] if self._path.exists() else []  # without one that was cut
        if lines:
            check_same_call(json.loads(lines[0]), call, folder, name=name)
        for members, rung, *more in map(json.loads, lines[1:]):
            self._before.append((Job(tuple(members), rung), not more))
        kept = [json_text(call), *(_line(job, is_done=is_done) for job, is_done in self._before)]
        temporary = self._path.with_suffix(".new")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, self._path)

    def end(self, job: Job, run: Any) -> None:
        """Notes what a job came to, `None` if it was given up."""
        if run is not None and run.interrupted:  # its worker was, and it is not done
            raise KeyboardInterrupt
        if run is None and job in self._given_up:
            return
        if run is None and (job, True) in self._before:
            raise BrokenExecutor(done_before_message(self._path, name=self._name))
        self._ended[job] = run

    def next(self) -> Turn | None:
        """The job whose end is next; `None` if it has not ended."""
        if self._before:
            job, is_done = self._before[0]
            if is_done and job not in self._ended:
                return None
            self._before.popleft()
        elif self._ended:
            job = next(iter(self._ended))
            is_done = self._ended[job] is not None
            if self._path is not None:
                with open(self._path, "a") as file:
                    file.write(_line(job, is_done=is_done) + "\n")
        else:
            return None
        is_late = job in self._given_up
        if is_done:
            self._given_up.discard(job)
            return Turn(job, self._ended.pop(job), is_late)
        self._given_up.add(job)
        if job in self._ended and self._ended[job] is None:
            del self._ended[job]
        return Turn(job, None, is_late)

    def check_repeated(self, finished: Finished) -> None:
        """Raises if a search ended before all that its file lists was repeated."""
        if (self._before or self._ended) and not finished.interrupted and not finished.lost:
            raise ValueError(
                f"`{self._name}` cannot repeat what `{self._path}` lists: its shards come to other results now.\n"
                "Choose another folder."
            )


def _line(job: Job, *, is_done: bool) -> str:
    return json.dumps([*job] if is_done else [*job, _GIVEN_UP])


def check_resume(options: dict[str, Any], folder: Path | None, *, name: str) -> None:
    """Takes `resume` out of the options, which is about the call, and not about its shards."""
    resume = options.pop("resume", "auto")
    check_checkpoint_options(folder, options.get("checkpoint_every"), resume, name=name)
    if folder is not None:
        check_begun(folder, resume, begun=(folder / _NAME).exists(), name=name)
