from collections.abc import Iterable
from typing import Any

from ..._pytree import PyTree
from ...sharding._check import warn_of_uneven_rows
from ...sharding._layout import Layout
from .._check import check_no_array_options
from .._state import TrainState
from ._arrays import ArraySource
from ._batches import IterableSource
from ._check import check_batch_size
from ._data import as_row_indices, is_batches, on_device
from ._rows import Order, row_order


def make_source(
    data: PyTree | Iterable[PyTree],
    state: TrainState,
    *,
    rows: Any,
    order: Order,
    batch_size: int | None,
    scan: bool | None,
    layout: Layout | None,
    key: Any,
) -> ArraySource | IterableSource:
    """The source of a run's batches: the one place that knows which there are."""
    num_members = state.num_members
    if is_batches(data):
        check_no_array_options(batch_size=batch_size, rows=rows, order=order, scan=scan, name="fit")
        return IterableSource(data, num_members, layout)
    data, num_rows = on_device(data, num_members, argument="data", name="fit", layout=layout, whole=True)
    rows = as_row_indices(rows, num_members, num_rows, name="fit")
    per_epoch = num_rows if rows is None else rows.shape[1]
    size = min(32, per_epoch) if batch_size is None else batch_size
    check_batch_size(size, per_epoch, name="fit")
    if layout is not None:
        warn_of_uneven_rows(size, layout.row_parts)
    drawn = row_order(key, state.ids, order, num_rows=num_rows, rows=rows, batch_size=int(size), layout=layout)
    return ArraySource(data, drawn, rows=rows, kind=order, scan=scan)
