"""What holds of the formats that checkpoints are written in, and of the processes that write one together."""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ._disks import explained_writing
from ._files import plain
from ._options import check_path, check_word

_STORES = ("gs", "s3")
_NOT_IN_ORBAX = {"uint2", "uint4", "float8_e4m3"}


def checkpoint_format(format: Any, path: Any, *, name: str) -> None:
    """A format that is known, and that can be written at such a path."""
    check_path(path, "path", name=name)
    check_word(format, "format", ("safetensors", "orbax"), name=name)
    if format == "safetensors" and "://" in os.fspath(path):
        raise ValueError(
            f"`{name}` writes safetensors to disks only, and `{path}` is in an object store.\nPass `format='orbax'`."
        )


def object_store(path: str) -> None:
    """An object store of a kind that Orbax's paths know: any other would be a folder with a strange name."""
    if path.partition("://")[0] not in _STORES:
        known = " or ".join(f"`{store}://`" for store in _STORES)
        raise ValueError(f"`{path}` is in no object store that is known here.\nThe path starts with {known}.")


def orbax_dtype(dtype: Any, path: str) -> None:
    """A dtype that Orbax has a place for."""
    if dtype.name in _NOT_IN_ORBAX:
        raise TypeError(
            f"The leaf at `{path}` is of dtype {dtype.name}, which Orbax cannot save.\n"
            "Cast it, or use `format='safetensors'`."
        )


@contextlib.contextmanager
def explained_orbax(path: Any) -> Iterator[None]:
    """Makes an OSError with path and free bytes of what Orbax raises when it cannot write."""
    with explained_writing(path):
        try:
            yield
        except (ValueError, RuntimeError) as error:
            text = str(error)
            known = [number for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) if os.strerror(number) in text]
            raise OSError(known[0] if known else errno.EIO, f"Orbax says: {plain(text)}") from error


def finished(path: Any, finished: bool, *, name: str) -> None:  # noqa: FBT001
    """What stands at the path has a manifest, which is written last."""
    if not finished:
        raise FileNotFoundError(errno.ENOENT, f"`{name}` found no checkpoint at `{path}` that was finished")


def same_in_all_processes(same: bool, path: str) -> None:  # noqa: FBT001
    """A leaf, or the members that several processes hold, is the same for all."""
    if not same:
        raise ValueError(
            f"The leaf at `{path}` is not the same in all processes, and only one of them can be saved.\n"
            "Make it equal, or an array that is spread over the processes, as "
            "`jax.make_array_from_process_local_data` does."
        )


def failed_elsewhere(processes: Sequence[int]) -> OSError:
    """The error for processes in which nothing failed, when something did in others."""
    listed = ", ".join(map(str, processes))
    return OSError(
        errno.EIO, f"The checkpoint was given up, because it failed in another process ({listed}), which says why"
    )


def sharding_fits(sharding: Any, shape: tuple[int, ...], path: str) -> None:
    """An array of this shape can lie as `like` says."""
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise ValueError(f"The leaf at `{plain(path)}` cannot lie as `like` says: {error}") from None
