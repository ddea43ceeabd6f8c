"""The log of an asynchronous search: a file with the order in which its jobs ended, which a resumed call replays."""

import json
from collections import deque
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint._damage import corrupt_error
from ..train.resume._check import check_checkpoint_options
from ._call_record import check_same_call, json_text
from ._check_saved import check_begun, done_before_message
from ._ladder import Job
from ._shard import Finished
from ._text_file import append_line, parse_json, write_text

_NAME, _ABANDONED = "order.jsonl", "abandoned"


class LogEntry(NamedTuple):
    """An entry of the log, and its result.

    **Attributes:**

    - `run`: the run of the job; `None` if it failed after all retries.
    - `is_late`: whether an earlier entry records it as failed, so that its worker already has another job.
    """

    job: Job
    run: Any
    is_late: bool


class JobLog:
    """A log with the arguments of the call in its first line, and one line per ended job.

    The next jobs of a search depend on the order of the entries and on which jobs failed. A resumed call replays the
    log, then appends the jobs that failed before and have finished since. Without a folder the log is kept in memory.
    """

    def __init__(self, folder: Path | None, call: dict[str, Any], *, name: str) -> None:
        self._path, self._name = None if folder is None else folder / _NAME, name
        self._before: deque[tuple[Job, bool]] = deque()
        self._ended: dict[Job, Any] = {}
        self._abandoned: set[Job] = set()
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_bytes().split(b"\n")[:-1] if self._path.exists() else []  # without a truncated line
        if lines:
            check_same_call(parse_json(lines[0], self._path, dict), call, folder, name=name)
        for line in lines[1:]:
            self._before.append(_parse(line, self._path))
        kept = [json_text(call), *(_line(job, is_done=is_done) for job, is_done in self._before)]
        write_text(self._path, "".join(line + "\n" for line in kept))

    def end(self, job: Job, run: Any) -> None:
        """Stores the result of a job, `None` if it failed after all retries."""
        if run is not None and run.interrupted:  # Ctrl-C reached the worker
            raise KeyboardInterrupt
        if run is None and job in self._abandoned:
            return
        if run is None and (job, True) in self._before:
            raise BrokenExecutor(done_before_message(self._path, name=self._name))
        self._ended[job] = run

    def next(self) -> LogEntry | None:
        """The next entry; `None` if its job is still running."""
        if self._before:
            job, is_done = self._before[0]
            if is_done and job not in self._ended:
                return None
            self._before.popleft()
        elif self._ended:
            job = next(iter(self._ended))
            is_done = self._ended[job] is not None
            if self._path is not None:
                append_line(self._path, _line(job, is_done=is_done))
        else:
            return None
        is_late = job in self._abandoned
        if is_done:
            self._abandoned.discard(job)
            return LogEntry(job, self._ended.pop(job), is_late)
        self._abandoned.add(job)
        if job in self._ended and self._ended[job] is None:
            del self._ended[job]
        return LogEntry(job, None, is_late)

    def check_replay(self, finished: Finished) -> None:
        """Raises if a search ended before the whole log was replayed."""
        if (self._before or self._ended) and not finished.interrupted and not finished.lost:
            raise ValueError(
                f"`{self._name}` cannot replay the log `{self._path}`: shards now give different results.\n"
                "Choose another folder."
            )


def _line(job: Job, *, is_done: bool) -> str:
    return json.dumps([*job] if is_done else [*job, _ABANDONED])


def _parse(line: bytes, path: Path) -> tuple[Job, bool]:
    """The job of a line, and whether it was completed."""
    match parse_json(line, path, list):
        case [list(members), int(rung), *more] if members and more in ([], [_ABANDONED]):
            return Job(tuple(members), rung), not more
    raise corrupt_error(path, "a line of it is not a job")


def check_resume(options: dict[str, Any], folder: Path | None, *, name: str) -> None:
    """Removes `resume`, which applies to the call as a whole, from the options of shards, and checks it."""
    resume = options.pop("resume", "auto")
    check_checkpoint_options(folder, options.get("checkpoint_every"), resume, name=name)
    if folder is not None:
        check_begun(folder, resume, begun=(folder / _NAME).exists(), name=name)
