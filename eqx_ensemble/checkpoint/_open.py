import errno
from typing import Any

from ._check_folders import check_finished, check_folder_exists, not_a_checkpoint_message
from ._damage import corrupt_error
from ._kind import kind_of
from ._manifest import is_orbax
from ._names import is_sealed, is_unfinished, is_written
from ._orbax import OrbaxReader
from ._path import has_manifest, is_on_disk, list_folder
from ._read import Reader, read_manifest

_ATTEMPTS = 5


def open_checkpoint(path: Any, *, name: str) -> Reader | OrbaxReader:
    """Opens a checkpoint of either format for reading.

    **Arguments:** `path`, the folder, from `as_path`; `name`, the public function, for messages.
    """
    if is_on_disk(path):
        check_folder_exists(path, name=name)
        if not (is_sealed(path) or any(map(is_written, list_folder(path)))):
            raise FileNotFoundError(errno.ENOENT, not_a_checkpoint_message(path, *kind_of(path), name=name))
    check_finished(path, finished=not is_unfinished(path) if is_on_disk(path) else has_manifest(path), name=name)
    for _ in range(_ATTEMPTS):
        manifest = read_manifest(path)
        try:
            return OrbaxReader(path, manifest) if is_orbax(manifest.file) else Reader(path, manifest)
        except FileNotFoundError:
            # If the checkpoint was overwritten in between, the new manifest names other arrays.
            if read_manifest(path) == manifest:
                first = manifest.entries[0].path if manifest.entries else None
                raise corrupt_error(path / manifest.file, "the file is missing", leaf=first) from None
    raise corrupt_error(path, "another process keeps overwriting it")
