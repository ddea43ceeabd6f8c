from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .._check import check_integers_fit
from .._foreign import take_in
from .._pytree import PyTree
from ._check import check_local_rows, check_mesh, check_rows_divide
from ._layout import Layout


def local_rows(mesh: Mesh, num_rows: int) -> slice:
    """The rows of a batch that this process must load, because its devices process them.

    They depend on the sharding, not on the process index: processes whose devices hold different members need the same
    rows, and processes along the axis `data` different ones.

    **Arguments:**

    - `mesh`: the mesh, from [`eqx_ensemble.make_mesh`][].
    - `num_rows`: the number of rows of the global batch.

    **Returns:** a slice of consecutive rows.

    **Raises:** `ValueError` if rows do not divide evenly over the mesh.

    ```python
    mesh = ee.make_mesh()
    ee.sharding.local_rows(mesh, 32)  # slice(0, 32): a single process needs all of them
    ```
    """
    check_mesh(mesh, name="sharding.local_rows")
    layout = Layout(mesh)
    check_rows_divide(num_rows, layout.row_parts, name="sharding.local_rows")
    indices = _rows_of(layout, num_rows).addressable_devices_indices_map((num_rows,)).values()
    bounds = [index[0].indices(num_rows)[:2] for index in indices if index is not None]
    return slice(min(start for start, _ in bounds), max(stop for _, stop in bounds))


def batch(mesh: Mesh, rows: PyTree, num_rows: int) -> PyTree:
    """Assembles a global batch, sharded over the devices of all processes, from the rows of each process.

    For loaders that read, in every process, only the rows that [`eqx_ensemble.sharding.local_rows`][] returns, and
    pass batches to [`eqx_ensemble.fit`][] as an iterable.

    **Arguments:**

    - `mesh`: the mesh, from [`eqx_ensemble.make_mesh`][].
    - `rows`: any PyTree of this process's rows, each array `(local rows, ...)`.
    - `num_rows`: the number of rows of the global batch.

    **Returns:** the same tree of arrays `(num_rows, ...)`.

    **Raises:** `ValueError` if rows do not divide evenly over the mesh, or for another number of local rows.

    ```python
    mesh = ee.make_mesh()
    own = ee.sharding.local_rows(mesh, 32)
    x = ee.sharding.batch(mesh, np.ones((32, 3))[own], 32)  # (32, 3), over all processes
    ```
    """
    check_mesh(mesh, name="sharding.batch")
    layout = Layout(mesh)
    own = local_rows(mesh, num_rows)
    rows = take_in(rows, "rows", name="sharding.batch")
    check_local_rows(rows, own.stop - own.start, num_rows)
    check_integers_fit(rows, argument="rows", name="sharding.batch")

    def globalise(x: Any) -> jax.Array:
        x = np.asarray(x)
        sharding = _rows_of(layout, num_rows)
        return jax.make_array_from_process_local_data(sharding, x, (num_rows, *x.shape[1:]))

    return jax.tree.map(globalise, rows)


def _rows_of(layout: Layout, num_rows: int) -> Any:
    return layout.sharding(layout.row_axes(num_rows))
