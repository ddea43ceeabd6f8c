import atexit
import contextlib
import copyreg
import dataclasses
import errno
import functools as ft
import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, final

from .._check import CheckpointCorruptError, check_optional_flag, check_word
from .._warnings import warn
from . import _disk
from ._call_folder import LOCK
from ._check import check_format, check_numbers
from ._disk import absolute, as_path, list_folder
from ._folders import all_damaged_message, fallback_message, foreign_content, is_unfinished
from ._formats import FORMATS, STEP, Format, FormatName, contents_of, open_checkpoint
from ._read import read_manifest
from ._restore import restore
from ._snapshot import snapshot
from ._write import clean, remove

_unseen: set[Future] = set()
"""Jobs in progress, and failed jobs whose error was not raised yet."""


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


class Worker:
    """A thread that runs one job at a time, and keeps the error of a failed job until it is raised."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._job: Future | None = None
        _workers.add(self)

    def start(self, job: Callable[[], None]) -> None:
        """Runs the job in the thread. `wait` must have been called for the one before."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eqx_ensemble.checkpoint")
        self._job = self._pool.submit(job)
        _unseen.add(self._job)
        self._job.add_done_callback(_forget_if_done)

    @property
    def has_job(self) -> bool:
        """Whether there is a job for which `wait` was not called."""
        return self._job is not None

    def finish(self) -> None:
        """Waits for the job. Its error is left to `wait`, or to the end of the program."""
        if self._job is not None:
            wait([self._job])

    def forget(self) -> None:
        """Forgets the job, in a process that does not have the thread."""
        self._pool = self._job = None

    def wait(self) -> None:
        """Waits for the job; raises its error, once."""
        job, self._job = self._job, None
        if job is not None:
            try:
                job.result()
            finally:
                _unseen.discard(job)


def _forget_if_done(job: Future) -> None:
    if job.exception() is None:
        _unseen.discard(job)


@atexit.register
def _raise_unseen() -> None:
    """Raises when all threads have ended, so that Python prints the error as it exits."""
    for job in list(_unseen):
        _unseen.discard(job)
        job.result()


def _forget_in_child() -> None:
    """Forgets the jobs of the parent, whose threads a forked child does not have."""
    _unseen.clear()
    for worker in list(_workers):
        worker.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


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


class Restored(NamedTuple):
    """What [`eqx_ensemble.checkpoint.Checkpoints.restore`][] returns.

    **Attributes:** `tree` and `step`, its step number; `score` and `meta`, as they were saved, or `None`.
    """

    tree: Any
    step: int
    score: float | None
    meta: Any


@final
@dataclasses.dataclass(eq=False)
class Checkpoints:
    """A folder of checkpoints of one run, each in a folder such as `step-000000000100`.

    After each save, old ones are removed. Leaving a `with` block waits for a save in progress.

    **Arguments:**

    - `folder`: the run's folder, created by the first save.
    - `last`: the number of newest checkpoints to keep, at least 1.
    - `best`: the number of checkpoints with the lowest scores to keep.
    - `keep_period`: also keep all checkpoints whose step is a multiple of this.
    - `asynchronous`: write in another thread; the default in [`eqx_ensemble.fit`][] only. The next `save` or `wait`
        raises the error of a save that failed.
    - `format`: as in [`eqx_ensemble.save`][]. With `"orbax"`, the default of runs on several processes, all of them
        call each method.
    - `every`: for `fit`, the number of steps between two checkpoints; by default those of about a minute. The last step
        is always saved.
    - `resume`: for `fit`: `"auto"`, if there is a checkpoint; `"must"`, or raise; `"never"`: raise if there is one.

    ```python
    import tempfile

    folder, model = tempfile.mkdtemp(), eqx.nn.Linear(3, 1, key=key)
    with ee.checkpoint.Checkpoints(folder, last=2, best=1) as checkpoints:
        for step in range(0, 500, 100):
            checkpoints.save(step, model, score=1 / (1 + step))
    checkpoints.steps  # [300, 400]
    checkpoints.restore(model).step  # 400
    ```
    """

    folder: Any
    _: dataclasses.KW_ONLY
    last: int = 3
    best: int = 0
    keep_period: int | None = None
    asynchronous: bool | None = None
    format: FormatName | None = None
    every: int | None = None
    resume: Literal["auto", "must", "never"] = "auto"

    def __post_init__(self) -> None:
        check_numbers(self.last, self.best, self.keep_period, self.every)
        kind = "safetensors" if self.format is None else self.format
        check_format(kind, self.folder)
        check_optional_flag(self.asynchronous, "asynchronous")
        check_word(self.resume, "resume", ("auto", "must", "never"))
        self.folder = absolute(as_path(self.folder))
        self._format = FORMATS[kind]
        self._run = RunFolder(self.folder, self._format, Retention(self.last, self.best, self.keep_period))
        self._worker = Worker()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.wait()

    @property
    def steps(self) -> list[int]:
        """The step numbers of the complete checkpoints, in order."""
        return self._run.steps()

    def path(self, step: int) -> Path | Any:
        """The folder of one checkpoint, which [`eqx_ensemble.load`][] also reads.

        In an object store, it is an `etils.epath.Path`.
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(
                f"`checkpoint.Checkpoints` needs an integer `step`, got {step!r}.\nWrite `int(step)` for an array."
            )
        if not 0 <= step < 10**12:
            raise ValueError(f"`checkpoint.Checkpoints` needs `step` from 0 to 10**12 - 1, got {step}.")
        return self._run.step_path(step)

    def save(
        self, step: int, tree: Any, *, per_member: Any = False, ids: Any = None, score: Any = None, meta: Any = None
    ) -> None:
        """Saves a tree as the checkpoint of a step, replacing one with the same number.

        **Arguments:**

        - `step`: the step number, a Python int.
        - `tree`, `meta`: as in [`eqx_ensemble.save`][].
        - `per_member`: flags the leaves with a leading `members` axis, so that single members can be read: a bool, or a
            PyTree of bools that is a prefix of `tree`.
        - `ids`: the members' ids, needed with `per_member`.
        - `score`: the lower, the better; NaN is never best.

        **Raises:** as `eqx_ensemble.save`; with `asynchronous`, the error of the previous save.
        """
        self.wait()
        path = self.path(step)
        copy, take = bool(self.asynchronous), self._format.take
        content = snapshot(
            tree, per_member=per_member, ids=ids, meta=meta, step=step, score=score, copy=copy, take=take
        )
        score, write = content.manifest.score, self._format.begin(path, content)
        job = ft.partial(self._run.finish, step, write, score)
        if self.asynchronous:
            self._worker.start(job)
        else:
            self._format.settle(job)

    def wait(self) -> None:
        """Waits for a save in progress. Raises the error of an asynchronous save that failed."""
        if self._worker.has_job:
            self._format.settle(self._worker.wait)

    def finish(self) -> None:
        """Waits for a save in progress, without raising its error, which `wait` does."""
        self._worker.finish()

    def restore(
        self, like: Any, *, step: int | None = None, cast: Literal["like"] | None = None, strict: bool = True
    ) -> Restored:
        """Restores the newest checkpoint that is not damaged. A warning lists newer, damaged ones.

        **Arguments:**

        - `like`: a tree like the one saved, or its shapes; or a function that makes such a tree from the checkpoint's
            [`eqx_ensemble.checkpoint.Contents`][].
        - `step`: the step to restore, instead of the newest.
        - `cast`, `strict`: as in [`eqx_ensemble.load`][].

        **Returns:** [`eqx_ensemble.checkpoint.Restored`][].

        **Raises:** as `load`; `CheckpointCorruptError` if all checkpoints, or the one of `step`, are damaged.
        """
        self.wait()
        steps = self.steps
        if step is None and not steps:
            raise FileNotFoundError(
                errno.ENOENT, f"`checkpoint.Checkpoints.restore` found no checkpoint in `{self.folder}`"
            )
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise FileNotFoundError(
                errno.ENOENT,
                f"`checkpoint.Checkpoints.restore` found no checkpoint of step {step} in `{self.folder}`; existing "
                f"steps: {there}",
            )
        bad: list[tuple[int, Exception]] = []
        for number in reversed(steps) if step is None else [step]:
            try:
                with open_checkpoint(self.path(number)) as reader:
                    expected = like(contents_of(reader)) if inspect.isroutine(like) else like
                    tree = restore(reader, expected, rows=None, cast=cast, strict=strict)
                    manifest = reader.manifest
            except (CheckpointCorruptError, OSError) as error:
                # Reading may also fail, and another process may have removed an old checkpoint meanwhile.
                if step is not None or (isinstance(error, OSError) and error.errno not in (errno.EIO, errno.ENOENT)):
                    raise
                bad.append((number, error))
            else:
                if bad:
                    warn(fallback_message(bad, number))
                return Restored(tree, number, manifest.score, manifest.meta)
        first = bad[0][1]
        file, leaf = getattr(first, "file", str(self.folder)), getattr(first, "leaf", None)
        raise CheckpointCorruptError(all_damaged_message(bad, self.folder), file, leaf)


def remove_run(folder: Path) -> None:
    """Removes the checkpoints of a run, with leftovers of killed processes, and the folder; it must hold nothing else.

    `OSError` if it does, or if something cannot be removed.
    """
    checkpoints = Checkpoints(folder)
    for step in checkpoints.steps:
        remove(checkpoints.path(step))
    clean(folder, STEP)
    with contextlib.suppress(FileNotFoundError):
        _disk.remove(folder / LOCK)
    _disk.remove_empty_folder(folder)


def _options(own: Checkpoints) -> dict[str, Any]:
    return {field.name: getattr(own, field.name) for field in dataclasses.fields(own)[1:]}


copyreg.pickle(Checkpoints, lambda own: (ft.partial(Checkpoints, own.folder, **_options(own)), ()))


def as_checkpoints(given: str | os.PathLike[str] | Checkpoints, **defaults: Any) -> Checkpoints:
    """The checkpoints of a run, which was given a path or `Checkpoints`; `defaults` are options that were not given."""
    folder, options = (given.folder, _options(given)) if isinstance(given, Checkpoints) else (given, {})
    return Checkpoints(folder, **defaults | {name: value for name, value in options.items() if value is not None})


def checkpoints_inside(given: str | os.PathLike[str] | Checkpoints, subfolder: str, **changed: Any) -> Checkpoints:
    """The checkpoints of a run that is a part of another call, with the same options, except for those `changed`."""
    whole = as_checkpoints(given)
    return Checkpoints(whole.folder / subfolder, **_options(whole) | changed)
