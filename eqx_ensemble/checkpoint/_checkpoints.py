import atexit
import copyreg
import dataclasses
import errno
import functools as ft
import inspect
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, final

from .._check import CheckpointCorruptError, check_optional_flag, check_path, check_word, number_text
from .._warnings import warn
from ._check import check_format, check_numbers
from ._disk import absolute, as_path
from ._folders import all_damaged_message, fallback_message
from ._formats import FORMATS, FormatName, open_checkpoint
from ._manifest import Entry, Manifest, is_orbax
from ._orbax import OrbaxReader
from ._read import Reader, Wanted
from ._restore import restore
from ._run_folder import Retention, RunFolder
from ._snapshot import DTYPES, count_bytes, key_dtype, snapshot
from ._structure import shape_text


class Contents(NamedTuple):
    """The contents of a checkpoint, from its manifest.

    **Attributes:**

    - `ids`: the members' ids; `None` for a tree without members.
    - `leaves`: by path, the arrays as `f32[8,50,13]` and the Python numbers.
    - `structure`: by path, the rest of the tree: types, static fields, functions by name.
    - `meta`, `step`, `score`: as they were saved.
    - `versions`: those of Python and of the libraries that wrote it.
    - `num_bytes`: the size of its arrays.
    - `format`: `"safetensors"` or `"orbax"`.
    - `unchecked`: the paths of leaves without a checksum, in which a changed bit is not detected. Only the format
        `"orbax"` has them: leaves of which no process held all, or all of one member's part.
    """

    ids: tuple[int, ...] | None
    leaves: dict[str, str]
    structure: dict[str, str]
    meta: Any
    step: int | None
    score: float | None
    versions: dict[str, str]
    num_bytes: int
    format: str
    unchecked: tuple[str, ...]


def contents(path: str | os.PathLike[str]) -> Contents:
    """Lists the contents of a checkpoint, without reading its arrays and without the model's code.

    **Arguments:**

    - `path`: the checkpoint's folder.

    **Returns:** [`eqx_ensemble.checkpoint.Contents`][].

    **Raises:** `CheckpointCorruptError` for a damaged manifest, or a file of arrays of the wrong size;
    `FileNotFoundError` if there is no checkpoint; `ValueError` for another version of the format.

    ```python
    import tempfile

    path = f"{tempfile.mkdtemp()}/model"
    ee.save(path, eqx.nn.Linear(3, 1, key=key), meta={"note": "an example"})
    ee.checkpoint.contents(path).leaves  # {".weight": "f32[1,3]", ".bias": "f32[1]"}
    ```
    """
    check_path(path, "path")
    with open_checkpoint(as_path(path)) as reader:
        return contents_of(reader)


def verify(path: str | os.PathLike[str]) -> Contents:
    """Reads a checkpoint and verifies all of its checksums, without the model's code.

    In the format `"orbax"`, all arrays are read into host memory at once. Leaves without a checksum are not verified;
    `unchecked` lists them.

    **Arguments:**

    - `path`: the checkpoint's folder.

    **Returns:** [`eqx_ensemble.checkpoint.Contents`][].

    **Raises:** `CheckpointCorruptError` with the file, the leaf and the member, if a checksum does not match; otherwise
    as [`eqx_ensemble.checkpoint.contents`][].

    ```python
    import tempfile

    path = f"{tempfile.mkdtemp()}/model"
    ee.save(path, eqx.nn.Linear(3, 1, key=key))
    ee.checkpoint.verify(path).num_bytes  # 16
    ```
    """
    check_path(path, "path")
    with open_checkpoint(as_path(path)) as reader:
        for _ in reader.arrays([Wanted(entry, None) for entry in _tensors(reader.manifest)]):
            pass
        return contents_of(reader)


def _tensors(manifest: Manifest) -> list[Entry]:
    """The arrays, each once."""
    return [entry for entry in manifest.entries if entry.tensor == entry.path]


def contents_of(reader: Reader | OrbaxReader) -> Contents:
    """The contents of an open checkpoint."""
    manifest = reader.manifest
    leaves = {entry.path: _text(entry) for entry in manifest.entries}
    leaves |= {number.path: number_text(number.value) for number in manifest.numbers}
    num_bytes = sum(count_bytes(entry.shape, DTYPES[entry.dtype].itemsize) for entry in _tensors(manifest))
    return Contents(
        manifest.members,
        leaves,
        manifest.structure,
        manifest.meta,
        manifest.step,
        manifest.score,
        manifest.versions,
        num_bytes,
        "orbax" if is_orbax(manifest.file) else "safetensors",
        tuple(entry.path for entry in manifest.entries if entry.checksum == ""),
    )


def _text(entry: Entry) -> str:
    if entry.key is not None:
        return shape_text(entry.shape[:-1], key_dtype(entry.key))
    return shape_text(entry.shape, DTYPES[entry.dtype])


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


class Restored(NamedTuple):
    """A restored checkpoint, as [`eqx_ensemble.checkpoint.Checkpoints.restore`][] returns it.

    **Attributes:**

    - `tree`: the tree that was saved.
    - `step`: its step number.
    - `score`: the score saved with it, or `None`.
    - `meta`: the metadata saved with it, or `None`.
    """

    tree: Any
    step: int
    score: float | None
    meta: Any


@final
@dataclasses.dataclass(init=False, eq=False)
class Checkpoints:
    """A folder of checkpoints of one run, numbered by step.

    Each checkpoint is a folder `step-000000000100`, written atomically: a kill or a power cut leaves it complete or
    absent. Checkpoints are ordered by step. After each save, old ones are removed, except for the `last` newest, the
    `best` by score, and every multiple of `keep_period`. One that contains other files is kept too, with a warning.

    In a `with` statement, leaving the block waits for a save that is in progress.

    **Arguments:**

    - `folder`: the run's folder, created by the first save.
    - `last`: the number of newest checkpoints to keep, at least 1.
    - `best`: the number of best checkpoints to keep: those with the lowest scores.
    - `keep_period`: also keep all checkpoints whose step is a multiple of this.
    - `asynchronous`: copy the tree to host memory, and write it in another thread. One save runs at a time; the next
        one waits for it. If a save fails, the next `save` or `wait` raises its error; without either, it is printed
        when Python exits. By default, only runs of [`eqx_ensemble.fit`][] are saved so.
    - `format`: as in [`eqx_ensemble.save`][]. With `"orbax"`, the default of runs on several processes, arrays may be
        sharded over these, and `folder` may be in an object store. All processes then call each method, with equal
        arguments apart from their own parts of the arrays. A checkpoint that is damaged for one of them is skipped by
        all.
    - `every`: for [`eqx_ensemble.fit`][], the number of steps between two checkpoints; by default those of about a
        minute. The last step is always saved.
    - `resume`: for [`eqx_ensemble.fit`][]. `"auto"`: resume if there is a checkpoint; `"must"`: raise if there is none;
        `"never"`: raise if there is one.

    ```python
    import tempfile

    model = eqx.nn.Linear(3, 1, key=key)
    with ee.checkpoint.Checkpoints(
        tempfile.mkdtemp(), last=2, best=1, asynchronous=True
    ) as checkpoints:
        for step in range(0, 500, 100):
            checkpoints.save(step, model, score=1 / (1 + step), meta={"note": "an example"})
    checkpoints.steps  # [300, 400]
    restored = checkpoints.restore(model)
    restored.tree, restored.step, restored.meta
    ```
    """

    folder: Any
    retention: Retention
    asynchronous: bool
    every: int | None
    resume: Literal["auto", "must", "never"]

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        last: int = 3,
        best: int = 0,
        keep_period: int | None = None,
        asynchronous: bool | None = None,
        format: FormatName | None = None,
        every: int | None = None,
        resume: Literal["auto", "must", "never"] = "auto",
    ) -> None:
        check_numbers(last, best, keep_period, every)
        kind = "safetensors" if format is None else format
        check_format(kind, folder)
        check_optional_flag(asynchronous, "asynchronous")
        check_word(resume, "resume", ("auto", "must", "never"))
        self.folder = absolute(as_path(folder))
        self.retention = Retention(last, best, keep_period)
        self.asynchronous = bool(asynchronous)
        self.every, self.resume = every, resume
        self._given = {
            "last": last, "best": best, "keep_period": keep_period, "asynchronous": asynchronous, "format": format,
            "every": every, "resume": resume,
        }  # fmt: skip
        self._format = FORMATS[kind]
        self._run = RunFolder(self.folder, self._format, self.retention)
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
        """The folder of one checkpoint, which [`eqx_ensemble.load`][] reads too.

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
        - `tree`: any PyTree. Its arrays and Python numbers are saved; everything else is described.
        - `per_member`: flags the leaves that carry the leading `members` axis, so that single members can be read: a
            bool, or a PyTree of bools that is a prefix of `tree`.
        - `ids`: the members' ids, needed with `per_member`.
        - `score`: the lower, the better; NaN is never best.
        - `meta`: dicts, lists, strings and numbers to keep with it, as JSON.

        **Raises:** `OSError` with the bytes needed and free, if the disk is full or cannot be written; earlier
        checkpoints stay usable. `TypeError` for leaves and `meta` that cannot be saved. With `asynchronous`, the error
        of the previous save.
        """
        self.wait()
        path = self.path(step)
        copy, take = self.asynchronous, self._format.take
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
        """Waits for a save that is in progress. Raises the error of an asynchronous save that failed."""
        if self._worker.has_job:
            self._format.settle(self._worker.wait)

    def finish(self) -> None:
        """Waits for a save in progress in this process, without raising its error, which `wait` does."""
        self._worker.finish()

    def restore(
        self, like: Any, *, step: int | None = None, cast: Literal["like"] | None = None, strict: bool = True
    ) -> Restored:
        """Restores the newest checkpoint that is not damaged. A warning lists newer, damaged ones.

        **Arguments:**

        - `like`: a tree like the one that was saved, of arrays or of shapes from `equinox.filter_eval_shape`; or a
            function that makes such a tree from the checkpoint's [`eqx_ensemble.checkpoint.Contents`][].
        - `step`: the step to restore, instead of the newest.
        - `cast`, `strict`: as in [`eqx_ensemble.load`][].

        **Returns:** [`eqx_ensemble.checkpoint.Restored`][].

        **Raises:** `CheckpointCorruptError` if all checkpoints, or the one of `step`, are damaged;
        `FileNotFoundError` if there is none; `MemberMismatchError` with all leaves in which `like` differs.
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


copyreg.pickle(Checkpoints, lambda own: (ft.partial(Checkpoints, own.folder, **own._given), ()))


def as_checkpoints(given: str | os.PathLike[str] | Checkpoints, **defaults: Any) -> Checkpoints:
    """The checkpoints of a run, which was given a path or `Checkpoints`; `defaults` are options that were not given."""
    folder, options = (given.folder, given._given) if isinstance(given, Checkpoints) else (given, {})
    return Checkpoints(folder, **defaults | {name: value for name, value in options.items() if value is not None})


def checkpoints_inside(given: str | os.PathLike[str] | Checkpoints, subfolder: str, **changed: Any) -> Checkpoints:
    """The checkpoints of a run that is a part of another call, with the same options, except for those `changed`."""
    whole = as_checkpoints(given)
    return Checkpoints(whole.folder / subfolder, **whole._given | changed)
