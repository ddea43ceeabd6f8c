from collections.abc import Iterable
from typing import Any

import numpy as np

from ..._pytree import PyTree
from ...distributed import to_host
from ...sharding._check import warn_of_uneven_rows
from ...sharding._layout import Layout
from ...sharding._shard import check_same_in_processes
from .._check import check_no_array_options
from .._state import TrainState
from ._arrays import ArraySource
from ._batches import IterableSource
from ._check import check_batch_size
from ._data import as_row_indices, is_batches, on_device
from ._reader import RowReader, check_no_scan
from ._reader_source import ReaderSource, Reading, StepRows
from ._rows import Order, order_words, row_order


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
) -> ArraySource | IterableSource | ReaderSource:
    """The source of a run's batches, by the kind of the data."""
    num_members = state.num_members
    if is_batches(data):
        check_no_array_options(batch_size=batch_size, rows=rows, order=order, scan=scan, name="fit")
        return IterableSource(data, num_members, layout)
    if isinstance(data, RowReader):
        check_no_scan(scan, name="fit")
        return _reader_source(data, state, rows=rows, order=order, batch_size=batch_size, layout=layout, key=key)
    data, num_rows = on_device(data, num_members, argument="data", name="fit", layout=layout, whole=True)
    rows = as_row_indices(rows, num_members, num_rows, name="fit")
    size = _batch_size(batch_size, num_rows if rows is None else rows.shape[1], layout)
    drawn = row_order(key, state.ids, order, num_rows=num_rows, rows=rows, batch_size=size, layout=layout)
    return ArraySource(data, drawn, rows=rows, kind=order, scan=scan)


def _reader_source(
    reader: RowReader,
    state: TrainState,
    *,
    rows: Any,
    order: Order,
    batch_size: int | None,
    layout: Layout | None,
    key: Any,
) -> ReaderSource:
    own = as_row_indices(rows, state.num_members, reader.num_rows, name="fit")
    check_same_in_processes([np.zeros(0, np.int32) if own is None else own])
    per_epoch = reader.num_rows if own is None else own.shape[1]
    size = _batch_size(batch_size, per_epoch, layout)
    words = order_words(key, to_host(state.ids), order)
    step_rows = StepRows(None if words is None else np.asarray(words), own, num_rows=per_epoch, batch_size=size)
    reading = Reading(reader, step_rows, layout)
    return ReaderSource(reading, step_rows, own=own, kind=order, num_rows=reader.num_rows, threads=reader.threads)


def _batch_size(batch_size: int | None, per_epoch: int, layout: Layout | None) -> int:
    size = check_batch_size(batch_size, per_epoch, name="fit")
    if layout is not None:
        warn_of_uneven_rows(size, layout.row_parts)
    return size
