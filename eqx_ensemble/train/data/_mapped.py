"""Memory-mapped files are sent to other processes by name, not by value."""

import mmap
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._pytree import PyTree
from ._check_reader import mapped_part_message


class MappedFile(NamedTuple):
    """The arguments that map a file again."""

    path: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    order: str


def close_files(source: PyTree) -> PyTree:
    """A source with its memory-mapped arrays replaced by the names of their files."""
    return jax.tree.map(_close, source)


def open_files(source: PyTree) -> PyTree:
    """The source with its files mapped again, in a process that can read them."""
    is_file = lambda x: isinstance(x, MappedFile)
    return jax.tree.map(lambda x: _open(x) if is_file(x) else x, source, is_leaf=is_file)


def _close(x: Any) -> Any:
    if not isinstance(x, np.memmap):
        return x
    if not isinstance(x.base, mmap.mmap) or x.filename is None:
        raise TypeError(mapped_part_message(x.shape))
    order = "C" if x.flags.c_contiguous else "F"
    return MappedFile(str(x.filename), x.dtype, x.shape, x.offset, order)


def _open(file: MappedFile) -> np.ndarray:
    order = "C" if file.order == "C" else "F"
    return np.memmap(file.path, file.dtype, "r", file.offset, file.shape, order)
