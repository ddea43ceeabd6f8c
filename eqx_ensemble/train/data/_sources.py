from collections.abc import Iterable
from typing import Any

from jaxtyping import PyTree

from ...sharding._check import warn_of_uneven_rows
from ...sharding._layout import Layout
from .._check import check_no_array_options
from .._state import TrainState
from ._arrays import ArraySource
from ._batches import IterableSource
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
    source = ArraySource(data, row_order(key, state.ids, order, num_rows, rows), batch_size=batch_size, scan=scan)
    if layout is not None:
        warn_of_uneven_rows(source.batch_size, layout.row_parts)
    return source
