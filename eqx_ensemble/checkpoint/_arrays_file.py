import os
from pathlib import Path

from ._damage import corrupt_error
from ._layout import FileLayout
from ._path import open_file


class ArraysFile:
    """The file of arrays, open for reading; its size and header are checked against the manifest."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self._path = path
        self._file = open_file(path)
        try:
            self._check(layout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def read(self, start: int, size: int) -> bytes:
        """The bytes from `start` on, fewer at the end of the file."""
        self._file.seek(start)
        parts = []
        while size > 0 and (part := self._file.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def fill(self, view: memoryview, start: int, leaf: str) -> None:
        """Fills `view` with bytes of a leaf, from `start` on."""
        self._file.seek(start)
        while view:
            count = self._file.readinto(view)
            if not count:
                raise corrupt_error(self._path, "the file ends too early", leaf=leaf)
            view = view[count:]

    def _check(self, layout: FileLayout) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if size != layout.size:
            leaf = _first_beyond(layout, size)
            raise corrupt_error(self._path, f"it has {size} bytes, not {layout.size}", leaf=leaf)
        if self.read(0, len(layout.header)) != layout.header:
            raise corrupt_error(self._path, "its header is not the one that follows from the manifest")


def _first_beyond(layout: FileLayout, size: int) -> str | None:
    """The first leaf that does not fit a file of this size."""
    for entry in layout.order:
        start, length = layout.spans[entry.tensor]
        if start + length > size:
            return entry.path
    return None
