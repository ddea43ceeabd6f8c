import errno
import functools as ft
import inspect
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

from .._check import CheckpointCorruptError, check_flag
from ._check import check_format, check_retention, check_step
from ._check_folders import all_damaged_message, check_step_exists, fallback_message
from ._contents import contents_of
from ._formats import FORMATS, FormatName
from ._kind import STEP
from ._names import is_unfinished
from ._open import open_checkpoint
from ._path import absolute, as_path, list_folder
from ._read import read_manifest
from ._restore import restore
from ._snapshot import snapshot
from ._worker import Worker
from ._write import clean, remove

_NAME = "Checkpoints.restore"


class Restored(NamedTuple):
    """What [`eqx_ensemble.checkpoint.Checkpoints.restore`][] gives back.

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


class Checkpoints:
    """A folder of checkpoints of one run, numbered by step.

    Each is a folder `step-000000000100` that is complete or absent, whatever happens to the process or the machine.
    Their order is that of the step numbers. After each save, old ones go: what stays are the `last` newest, the `best`
    ones by score, and those whose step is a multiple of `keep_period`. One in whose folder you put something of your
    own stays as well, and a warning says so.

    ```python
    import tempfile

    model = eqx.nn.Linear(3, 1, key=key)
    with ee.checkpoint.Checkpoints(tempfile.mkdtemp(), last=2, best=1, asynchronous=True) as checkpoints:
        for step in range(0, 500, 100):
            checkpoints.save(step, model, score=1 / (1 + step), meta={"note": "an example"})
    checkpoints.steps  # [300, 400]
    restored = checkpoints.restore(model)
    restored.tree, restored.step, restored.meta
    ```

    Used in a `with` statement, it waits at the end for a save that is still being written.

    **Arguments:**

    - `folder`: the run's folder, made with the first save.
    - `last`: how many of the newest to keep, at least 1.
    - `best`: how many of the best to keep: those with the lowest scores.
    - `keep_period`: keep those whose step is a multiple of this, for good.
    - `asynchronous`: copy the tree to host memory, and write it in another thread. One save is in flight at a time:
        the next one waits for it. If it fails, the error is raised by the next `save` or by `wait`, and where neither
        comes, printed when Python exits.
    - `format`: as in [`eqx_ensemble.save`][]. With `"orbax"`, arrays may lie on the devices of several processes, and
        `folder` in an object store. All processes then call each method, with equal arguments but for what they hold of
        the arrays; what is damaged for one of them is passed over by all.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        last: int = 3,
        best: int = 0,
        keep_period: int | None = None,
        asynchronous: bool = False,
        format: FormatName = "safetensors",
    ):
        check_retention(last, best, keep_period)
        check_format(format, folder, name="Checkpoints")
        check_flag(asynchronous, "asynchronous", name="Checkpoints")
        self._format = FORMATS[format]
        self._folder = absolute(as_path(folder))
        self._keep = last, best, keep_period
        self._asynchronous = asynchronous
        self._worker = Worker()
        self._scores: dict[int, float | None] = {}
        self._stay: set[int] = set()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.wait()

    def __repr__(self) -> str:
        last, best, keep_period = self._keep
        return (
            f"Checkpoints({str(self._folder)!r}, {last=}, {best=}, {keep_period=}, asynchronous={self._asynchronous})"
        )

    @property
    def steps(self) -> list[int]:
        """The step numbers of the complete checkpoints, in order."""
        return sorted(step for step, entry in self._folders() if self._format.stands(entry))

    def path(self, step: int) -> Path | Any:
        """The folder of one checkpoint, which [`eqx_ensemble.load`][] reads too.

        In an object store, an `etils.epath.Path`.
        """
        check_step(step)
        return self._folder / f"step-{step:012d}"

    def save(
        self, step: int, tree: Any, *, per_member: Any = False, ids: Any = None, score: Any = None, meta: Any = None
    ) -> None:
        """Saves a tree under a step number; one that is there under this number is replaced.

        **Arguments:**

        - `step`: the number, a Python int.
        - `tree`: any PyTree. Its arrays and Python numbers are saved; everything else is described.
        - `per_member`: which leaves carry the leading members axis, so that single members can be read: a bool, or a
            PyTree of bools that is a prefix of `tree`.
        - `ids`: the members' ids, needed with `per_member`.
        - `score`: the lower, the better; NaN is never best.
        - `meta`: dicts, lists, strings and numbers to keep with it, as JSON.

        **Raises:** OSError that says how many bytes are needed and free, when the disk is full or cannot be written;
        what was there stays usable. With `asynchronous`, the error of the save before.
        """
        self.wait()
        path = self.path(step)
        copy, take = self._asynchronous, self._format.take
        content = snapshot(
            tree, per_member=per_member, ids=ids, meta=meta, step=step, score=score, copy=copy, take=take
        )
        score, write = content.manifest.score, self._format.begin(path, content)
        job = ft.partial(self._finish, step, write, score)
        if self._asynchronous:
            self._worker.start(job)
        else:
            self._format.settle(job)

    def wait(self) -> None:
        """Returns when nothing is being written. Raises the error of an asynchronous save that failed."""
        if self._worker.has_job:
            self._format.settle(self._worker.wait)

    def finish(self) -> None:
        """Returns when nothing is being written in this process. The error of a save that failed stays for `wait`."""
        self._worker.finish()

    def restore(
        self, like: Any, *, step: int | None = None, cast: Literal["like"] | None = None, strict: bool = True
    ) -> Restored:
        """The newest checkpoint that is not damaged. If it is not the newest of all, a warning names what is damaged.

        **Arguments:**

        - `like`: a tree like the one that was saved, of arrays or of shapes from `equinox.filter_eval_shape`; or a
            function that makes one from what a checkpoint says of itself, [`eqx_ensemble.checkpoint.Contents`][].
        - `step`: the number of the one checkpoint to read, instead of the newest.
        - `cast`, `strict`: as in [`eqx_ensemble.load`][].

        **Raises:** `CheckpointCorruptError` when no checkpoint is whole, or the one asked for is not; FileNotFoundError
        when there is none; `MemberMismatchError` that lists all leaves in which `like` differs.
        """
        self.wait()
        steps = self.steps
        check_step_exists(self._folder, step, steps)
        bad: list[tuple[int, Exception]] = []
        for number in reversed(steps) if step is None else [step]:
            try:
                with open_checkpoint(self.path(number), name=_NAME) as reader:
                    expected = like(contents_of(reader)) if inspect.isroutine(like) else like
                    tree = restore(reader, expected, rows=None, cast=cast, strict=strict, name=_NAME)
                    manifest = reader.manifest
            except (CheckpointCorruptError, OSError) as error:
                # A disk may also refuse to read; and another process may have removed an old checkpoint meanwhile.
                if step is not None or (isinstance(error, OSError) and error.errno not in (errno.EIO, errno.ENOENT)):
                    raise
                bad.append((number, error))
            else:
                if bad:
                    warnings.warn(fallback_message(bad, number), stacklevel=2)
                return Restored(tree, number, manifest.score, manifest.meta)
        first = bad[0][1]
        file, leaf = getattr(first, "file", str(self._folder)), getattr(first, "leaf", None)
        raise CheckpointCorruptError(all_damaged_message(bad, self._folder), file, leaf)

    def _folders(self) -> list[tuple[int, Any]]:
        """The folders of checkpoints, also of those that were never finished, with their steps."""
        matches = [(STEP.fullmatch(entry.name), entry) for entry in list_folder(self._folder) if entry.is_dir()]
        return [(int(match[1]), entry) for match, entry in matches if match]

    def _finish(self, step: int, write: Callable[[], None], score: float | None) -> None:
        write()
        self._scores[step] = score
        if not self._format.leads():
            return
        try:
            self._clean()
            for old in self._superfluous(step):
                self._remove(old)
        except OSError as error:
            warnings.warn(f"Step {step} is saved, but an old checkpoint could not be removed: {error}", stacklevel=2)

    def _remove(self, step: int) -> None:
        """Removes an old checkpoint, but for one in which there are other things: of these a warning says once."""
        try:
            remove(self.path(step))
        except FileExistsError as error:
            if step not in self._stay:
                self._stay.add(step)
                warnings.warn(f"An old checkpoint is kept: {error}", stacklevel=2)

    def _clean(self) -> None:
        """Removes what processes that were killed left."""
        clean(self._folder, STEP)
        for _, entry in self._folders():
            if is_unfinished(entry):
                remove(entry)

    def _superfluous(self, newest: int) -> list[int]:
        """The steps to remove. One whose manifest cannot be read counts for nothing, and is left where it is."""
        last, best, keep_period = self._keep
        scores = {step: score for step in self.steps for score in self._score(step)}
        kept = {newest, *sorted(scores)[-last:]}
        scored = [(score, -step) for step, score in scores.items() if score is not None]
        kept |= {-step for _, step in sorted(scored)[:best]}
        return [step for step in scores if step not in kept and not (keep_period and step % keep_period == 0)]

    def _score(self, step: int) -> list[float | None]:
        """The score of a step as a list of one, empty if its manifest cannot be read."""
        if step not in self._scores:
            try:
                self._scores[step] = read_manifest(self.path(step)).score
            except (ValueError, OSError):
                return []
        return [self._scores[step]]
