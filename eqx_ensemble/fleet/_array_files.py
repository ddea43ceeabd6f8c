"""Large arrays in temporary files, which the processes of a machine map into shared memory."""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..checkpoint import _disk
from ..checkpoint._dtypes import raw
from ._worker import ArrayFile


@contextlib.contextmanager
def write_arrays(arrays: Sequence[np.ndarray]) -> Iterator[list[ArrayFile]]:
    """Yields the files of arrays, in a folder that is removed at the end.

    The folder is locked while its process lives: later calls remove folders whose lock is free, of killed processes.
    """
    with _explain_temporary(sum(array.nbytes for array in arrays)):
        parent = Path(tempfile.gettempdir()).absolute()
        _remove_stale(parent)
    with contextlib.ExitStack() as stack:
        with _explain_temporary(sum(array.nbytes for array in arrays)):
            folder = stack.enter_context(_locked_folder(parent))
            files = [_write(folder / str(number), array) for number, array in enumerate(arrays)]
        yield files


def _write(path: Path, array: np.ndarray) -> ArrayFile:
    with open(path, "xb") as file:
        file.write(raw(np.ascontiguousarray(array)))
    return ArrayFile(str(path), array.shape, array.dtype.name)


@contextlib.contextmanager
def _locked_folder(parent: Path) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        while True:
            folder = parent / f"{_prefix()}{_disk.token()}"
            os.mkdir(folder, 0o700)
            # Before the lock is held, another process may take the folder for a stale one and remove it.
            with contextlib.suppress(FileNotFoundError):
                stack.enter_context(_disk.hold_lock(folder))
                if folder.exists():
                    break
        try:
            yield folder
        finally:
            _remove(folder)


def _prefix() -> str:
    """The beginning of the folders of this machine: locks may not reach others that share the disk."""
    return f"eqx_ensemble-{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]}-"


def _remove_stale(parent: Path) -> None:
    name = re.compile(rf"{_prefix()}[0-9a-f]{{8}}")
    for left in [Path(entry.path) for entry in os.scandir(parent) if name.fullmatch(entry.name)]:
        with _disk.hold_lock(left, wait=False) as is_stale:
            if is_stale and not left.is_symlink():
                _remove(left)


def _remove(folder: Path) -> None:
    """Removes our files, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            if file.name.isdecimal():
                file.unlink()
        folder.rmdir()


@contextlib.contextmanager
def _explain_temporary(size: int) -> Iterator[None]:
    """Adds the folder, its free bytes and TMPDIR to errors of the operating system."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        try:
            free = f"{shutil.disk_usage(folder).free} bytes are free"
        except OSError:
            free = "free space is unknown"
        raise OSError(
            error.errno or errno.EIO,
            f"`fleet` could not write the arrays for the workers ({size} bytes) in the temporary folder `{folder}`: "
            f"{error.strerror or error}; {free}.\nFree some space, or set TMPDIR to a folder with more",
        ) from error
