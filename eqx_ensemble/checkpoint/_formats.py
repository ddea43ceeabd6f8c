import functools as ft
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..distributed import is_first
from ..distributed._collectives import raise_on_all
from . import _orbax
from ._dtypes import device_numbers, host_numbers
from ._path import has_manifest
from ._snapshot import Snapshot
from ._write import write

FormatName = Literal["safetensors", "orbax"]


class Format(NamedTuple):
    """A format of checkpoints: the functions in which formats differ."""

    take: Callable[..., Any]
    """Returns the numbers of an array leaf, for a `Snapshot`."""

    begin: Callable[[Any, Snapshot], Callable[[], None]]
    """Begins a checkpoint; returns a function that completes it, in any thread."""

    stands: Callable[[Any], bool]
    """Whether there is a complete checkpoint at a path."""

    settle: Callable[[Callable[[], None]], None]
    """Runs a job that may fail. All processes that write a checkpoint together call it."""

    leads: Callable[[], bool]
    """Whether this process does the work that one process does for all."""


def _begin(path: Any, content: Snapshot) -> Callable[[], None]:
    return ft.partial(write, path, content)


def _run(job: Callable[[], None]) -> None:
    job()


def _run_together(job: Callable[[], None]) -> None:
    error = None
    try:
        job()
    except Exception as failure:
        error = failure
    raise_on_all(error)


FORMATS: dict[str, Format] = {
    "safetensors": Format(host_numbers, _begin, Path.is_dir, _run, lambda: True),
    "orbax": Format(device_numbers, _orbax.begin, has_manifest, _run_together, is_first),
}
