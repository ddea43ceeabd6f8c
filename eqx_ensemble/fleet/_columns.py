"""The per-member results of a shard that a worker returns when the members are saved; the shard's file has them too."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..checkpoint._engine import check_fields, check_valid, decode_array, encode_array, is_list, is_record
from ..distributed import to_host
from ..train._engine import Mode, Run, Status, hyper_column_text, mean_of_last_epoch

_INTEGERS = ("ids", "status", "stopped_at", "best_step")


class Columns(NamedTuple):
    """Per-member arrays `(members, ...)`: numbers, and `fault` as text; hyper-parameters by name."""

    ids: np.ndarray
    status: np.ndarray
    stopped_at: np.ndarray
    fault: np.ndarray
    loss: np.ndarray
    best_step: np.ndarray | None
    best_score: np.ndarray | None
    hyper: dict[str, np.ndarray]
    mode: Mode


def count_status(status: np.ndarray) -> dict[str, int]:
    """The number of members with each status, by name."""
    return {str(one): int((status == one).sum()) for one in Status}


def columns_of(run: Run[Any]) -> Columns:
    """The columns of a run."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(run.train_state.hyper)
    return Columns(
        np.asarray(run.ensemble.ids),
        run.status,
        run.stopped_at,
        run.fault,
        mean_of_last_epoch(run.history, run.epoch),
        run.best_step,
        run.best_score,
        {hyper_column_text(path): to_host(values) for path, values in keyed},
        run.mode,
    )


def join_columns(parts: Sequence[Columns]) -> Columns:
    """Concatenates the columns of several shards; `InvalidRecordError` unless all have the same ones."""
    rows = [part._replace(mode=None) for part in parts]
    kinds = [(part.mode, jax.tree.map(lambda x: x.shape[1:], own)) for part, own in zip(parts, rows, strict=True)]
    check_valid("shards have different columns", holds=all(kind == kinds[0] for kind in kinds))
    joined = jax.tree.map(lambda *xs: np.concatenate(xs), *rows)
    # JAX sorts the keys of a dict
    return joined._replace(mode=parts[0].mode, hyper={name: joined.hyper[name] for name in parts[0].hyper})


def to_json(columns: Columns) -> dict[str, Any]:
    """The columns as JSON, bit for bit."""
    arrays = {name: value for name, value in columns._asdict().items() if isinstance(value, np.ndarray)}
    fault = arrays.pop("fault").tolist()
    hyper = {name: encode_array(values) for name, values in columns.hyper.items()}
    return {name: encode_array(values) for name, values in arrays.items()} | {
        "fault": fault,
        "hyper": hyper,
        "mode": columns.mode,
    }


def from_json(saved: Any) -> Columns:
    """Inverts `to_json`; `InvalidRecordError` for anything else."""
    is_names, is_mode = (lambda x: is_list(x, str)), (lambda x: x in ("min", "max"))
    kinds = dict.fromkeys(("ids", "status", "stopped_at", "loss", "hyper"), is_record)
    check_fields(saved, kinds | {"fault": is_names, "mode": is_mode}, "columns")
    read: Any = lambda name: decode_array(saved[name], name) if name in saved else None
    columns = Columns(
        *map(read, ("ids", "status", "stopped_at")),
        fault=np.array(saved["fault"], dtype=str),
        loss=read("loss"),
        best_step=read("best_step"),
        best_score=read("best_score"),
        hyper={name: decode_array(values, name) for name, values in saved["hyper"].items()},
        mode=saved["mode"],
    )
    single = {name: x for name, x in columns._asdict().items() if isinstance(x, np.ndarray)}
    rows = columns.ids.shape[:1]
    are_rows = all(x.shape == rows for x in single.values()) and all(
        x.shape[:1] == rows for x in columns.hyper.values()
    )
    check_valid("its columns have different numbers of members", holds=bool(rows) and are_rows)
    are_integers = all(single[name].dtype.kind == "i" for name in _INTEGERS if name in single)
    check_valid("a column is not one of integers", holds=are_integers)
    check_valid("a status is unknown", holds=bool(np.isin(columns.status, list(Status)).all()))
    check_valid(
        "a member has only one of best step and score", holds=("best_step" in single) == ("best_score" in single)
    )
    return columns
