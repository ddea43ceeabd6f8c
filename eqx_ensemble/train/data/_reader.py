import functools as ft
from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np

from ..._check import check_positive_int
from ..._pytree import PyTree
from ._check_reader import check_num_rows, check_stored_arrays
from ._mapped import close_files, open_files

_NAME = "train.RowReader"


@final
class RowReader:
    """Out-of-core data: [`eqx_ensemble.fit`][] reads the rows of a step on demand.

    Pass it to `fit` in place of arrays. With the same `rows`, `order`, `batch_size` and `key`, every member sees the
    same rows in the same order as with arrays in memory; results agree within rounding, because each batch is a
    separate compiled call. The next batch is read in a thread during the current step. The rows of a step depend only
    on its number and the key: a reader has no state, and a run is saved, resumed and continued at any step, bit for
    bit. On a mesh over several processes, each process reads the rows of its own devices.

    A step reads at most `members * batch_size` rows, each row once even if several members see it. With
    `order="shared"` all members see one batch of `batch_size` rows.

    **Arguments:**

    - `source`: a PyTree of arrays `(rows, ...)`, on disk or in host memory, that can be indexed by rows:
        `numpy.load(path, mmap_mode="r")`, Zarr arrays, HDF5 data sets. Or a function `read(rows)` that returns these
        rows as a PyTree of arrays `(len(rows), ...)`. Both receive the rows as a NumPy array of increasing integers
        without repeats.
    - `num_rows`: the number of rows that a function can read; required with a function.
    - `threads`: the number of batches that are read ahead, each in its own thread. More than one requires a source that
        supports concurrent reads.

    **Raises:** `TypeError` or `ValueError` for a source without arrays or with arrays of different lengths, and for a
    function without `num_rows`.

    ```python
    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    x, y = np.ones((100, 3), np.float32), np.zeros((100, 1), np.float32)  # or memory-mapped files
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    options = {"rows": ee.resample.bootstrap(100, 4, key=key), "epochs": 2, "key": key}
    run = ee.fit(ensemble, mse, optax.adam(1e-2), ee.train.RowReader((x, y)), **options)
    in_memory = ee.fit(ensemble, mse, optax.adam(1e-2), (x, y), **options)
    bool(jnp.allclose(run.history.loss, in_memory.history.loss))  # True
    ```
    """

    def __init__(
        self, source: PyTree | Callable[[np.ndarray], PyTree], *, num_rows: int | None = None, threads: int = 1
    ) -> None:
        if callable(source):
            self.num_rows: int = check_num_rows(num_rows, name=_NAME)
            self.read: Callable[[np.ndarray], PyTree] = source
        else:
            self.num_rows = check_stored_arrays(source, num_rows, name=_NAME)
            self.read = ft.partial(_take, source)
        check_positive_int(threads, "threads", name=_NAME)
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
