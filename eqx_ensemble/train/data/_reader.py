import functools as ft
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, final

import jax
import jax.tree_util as jtu
import numpy as np

from ..._axes import Each, check_rows_of_data
from ..._caller import caller
from ..._check import MOST_STEPS, check_positive_int, kind_text
from ..._foreign import from_foreign_tree
from ..._leaf_text import leaf_text
from ..._pytree import PyTree

# Checks of data that are read on demand.

_READ = "Return a PyTree of arrays with the rows of the argument, in its order."


def check_num_rows(num_rows: Any) -> int:
    """Raises unless `num_rows` is a valid number of rows for a function. Returns it."""
    if num_rows is None:
        raise TypeError(f"`{caller()}` needs `num_rows` with a function: how many rows it can read.")
    check_positive_int(num_rows, "num_rows")
    _check_countable(num_rows)
    return int(num_rows)


def _check_countable(num_rows: int) -> None:
    if num_rows > MOST_STEPS:
        raise ValueError(
            f"`{caller()}` needs at most {MOST_STEPS} rows, because row orders count in 32 bits; got {num_rows}.\n"
            "Let a row hold several examples."
        )


def check_stored_arrays(source: Any, num_rows: Any) -> int:
    """Raises unless the source holds arrays of one length. Returns the length."""
    fix = "Pass arrays, or a function `read(rows)` and `num_rows`."
    if isinstance(source, Iterator):
        raise TypeError(
            f"`{caller()}` needs a source that gives any rows, got {kind_text(source)}, which gives batches in its own "
            "order.\nPass batches to `fit` as they are."
        )
    sizes: dict[int, str] = {}
    for path, x in jtu.tree_leaves_with_path(source, is_leaf=lambda x: isinstance(x, Each)):
        where = f"source{jtu.keystr(path)}"
        if isinstance(x, Each):
            raise TypeError(
                f"`{caller()}` needs rows that all members share; `{where}` is an `Each`.\n"
                "Pass one source, and to `fit` the `rows` of each member."
            )
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if not isinstance(shape, tuple) or dtype is None or isinstance(x, Mapping):
            raise TypeError(f"`{caller()}` needs arrays in its source; at `{where}`: {kind_text(x)}.\n{fix}")
        if not shape:
            raise ValueError(f"`{caller()}` needs arrays with one row per example; at `{where}`: got shape ().")
        sizes.setdefault(int(shape[0]), where)
    if not sizes:
        raise TypeError(f"`{caller()}` needs at least one array in its source, got {kind_text(source)}.\n{fix}")
    if len(sizes) > 1:
        listed = ", ".join(f"{size} rows at `{where}`" for size, where in sizes.items())
        raise ValueError(f"`{caller()}` needs arrays of one length; got {listed}.")
    found = next(iter(sizes))
    if found == 0:
        raise ValueError(f"`{caller()}` needs at least one row, got none.")
    if num_rows is not None and num_rows != found:
        raise ValueError(
            f"`{caller()}` needs `num_rows` with a function only; got {num_rows} for arrays of {found} rows."
        )
    _check_countable(found)
    return found


def check_batch_read(batch: Any, count: int, like: PyTree) -> PyTree:
    """Raises unless a batch has `count` rows, in the shapes and dtypes of `like` if given. Returns the batch."""
    batch = from_foreign_tree(batch, "batch")
    batch = jax.tree.map(np.asarray, batch, is_leaf=lambda x: isinstance(x, list))
    check_rows_of_data(batch, 1, argument="batch", finite=False, least=0)
    for path, x in jtu.tree_leaves_with_path(batch):
        if x.shape[0] != count:
            raise ValueError(
                f"`{caller()}` needs one row for each row requested; at `batch{jtu.keystr(path)}`: expected "
                f"{count} rows, got {x.shape[0]}.\n{_READ}"
            )
    if like is not None:
        _check_like(batch, like)
    return batch


def _check_like(batch: PyTree, like: PyTree) -> None:
    if jax.tree.structure(batch) != jax.tree.structure(like):
        raise ValueError(
            f"`{caller()}` needs batches of one structure; expected {jax.tree.structure(like)}, got "
            f"{jax.tree.structure(batch)}."
        )
    for (path, x), first in zip(jtu.tree_leaves_with_path(batch), jax.tree.leaves(like), strict=True):
        if (x.shape[1:], x.dtype) != (first.shape[1:], first.dtype):
            raise ValueError(
                f"`{caller()}` needs rows of one shape and dtype; at `batch{jtu.keystr(path)}`: expected "
                f"{leaf_text(first[:1])}, got {leaf_text(x[:1])}.\nPad rows, or convert them."
            )


def check_no_scan(scan: Any) -> None:
    """Raises for `scan`: a step is one compiled call on a batch."""
    if scan is not None:
        raise TypeError(
            f"`{caller()}` takes `scan` only for data in arrays; with a `RowReader` each batch is a separate compiled "
            "call."
        )


def mapped_part_message(shape: tuple[int, ...]) -> str:
    """The message that a part of a memory-mapped array would be sent by value."""
    return (
        f"`train.RowReader` pickles memory-mapped arrays by file name; the array of shape {shape} is a view of part of "
        "a file, and would be pickled by value.\n"
        "Pass the complete array, and choose `rows`; or give `fleet.fit` a function that makes the reader on a worker."
    )


# Memory-mapped files are sent to other processes by name, not by value.


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


@final
class RowReader:
    """Out-of-core data: [`eqx_ensemble.fit`][] reads the rows of a step on demand.

    Members see the same rows in the same order as with arrays in memory; results agree within rounding. The next batch
    is read in a thread during the current step. On a mesh over several processes, each process reads the rows of its
    own devices.

    A step reads at most `members * batch_size` rows, each once; with `shuffle="shared"`, `batch_size` rows.

    **Arguments:**

    - `source`: a PyTree of arrays `(rows, ...)` that can be indexed by rows: `numpy.load(path, mmap_mode="r")`, Zarr
        arrays, HDF5 data sets. Or a function `read(rows)` that returns a PyTree of arrays `(len(rows), ...)`. Both
        receive the rows as a NumPy array of increasing integers without repeats.
    - `num_rows`: the number of rows that a function can read; required with a function.
    - `threads`: the number of batches that are read ahead, each in its own thread; more than one only for sources that
        support concurrent reads.

    ```python
    import numpy as np

    x, y = np.ones((100, 3), np.float32), np.zeros((100, 1), np.float32)  # or memory-mapped files
    reader = ee.train.RowReader((x, y))  # fit(ensemble, loss, optimiser, reader, ...)
    ```
    """

    def __init__(
        self, source: PyTree | Callable[[np.ndarray], PyTree], *, num_rows: int | None = None, threads: int = 1
    ) -> None:
        if callable(source):
            self.num_rows: int = check_num_rows(num_rows)
            self.read: Callable[[np.ndarray], PyTree] = source
        else:
            self.num_rows = check_stored_arrays(source, num_rows)
            self.read = ft.partial(_take, source)
        check_positive_int(threads, "threads")
        self.threads: int = int(threads)
        self._source: PyTree | Callable[[np.ndarray], PyTree] = source

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickles memory-mapped files by name."""
        return (_remake, (close_files(self._source), self.num_rows, self.threads))

    def __repr__(self) -> str:
        return f"RowReader({self.num_rows} rows)"


def _remake(source: PyTree, num_rows: int, threads: int) -> RowReader:
    return RowReader(open_files(source), num_rows=num_rows, threads=threads)


def _take(source: PyTree, rows: np.ndarray) -> PyTree:
    return jax.tree.map(lambda x: x[rows], source)
