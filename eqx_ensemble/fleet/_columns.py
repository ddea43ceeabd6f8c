"""The per-member results of a shard that a worker returns when the members are saved; the shard's file has them too."""

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..distributed import to_host
from ..train._check_member import hyper_column_text
from ..train._run import Run
from ..train._status import Status
from ..train.compiled._selection import Mode
from ..train.host._record import last_finite


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
        last_finite(run.history.loss),
        run.best_step,
        run.best_score,
        {hyper_column_text(path): to_host(values) for path, values in keyed},
        run.mode,
    )


def join_columns(parts: Sequence[Columns]) -> Columns:
    """Concatenates the columns of several shards."""
    of_all = lambda name: np.concatenate([getattr(part, name) for part in parts])
    optional = lambda name: None if getattr(parts[0], name) is None else of_all(name)
    return Columns(
        *map(of_all, ("ids", "status", "stopped_at", "fault", "loss")),
        best_step=optional("best_step"),
        best_score=optional("best_score"),
        hyper={name: np.concatenate([part.hyper[name] for part in parts]) for name in parts[0].hyper},
        mode=parts[0].mode,
    )


def to_json(columns: Columns) -> dict[str, Any]:
    """The columns as JSON, bit for bit."""
    arrays = {name: value for name, value in columns._asdict().items() if isinstance(value, np.ndarray)}
    fault = arrays.pop("fault").tolist()
    hyper = {name: _encode(values) for name, values in columns.hyper.items()}
    return {name: _encode(values) for name, values in arrays.items()} | {
        "fault": fault,
        "hyper": hyper,
        "mode": columns.mode,
    }


def from_json(saved: dict[str, Any]) -> Columns:
    """Inverts `to_json`."""
    optional = lambda name: _decode(saved[name]) if name in saved else None
    return Columns(
        ids=_decode(saved["ids"]),
        status=_decode(saved["status"]),
        stopped_at=_decode(saved["stopped_at"]),
        fault=np.array(saved["fault"], dtype=str),
        loss=_decode(saved["loss"]),
        best_step=optional("best_step"),
        best_score=optional("best_score"),
        hyper={name: _decode(values) for name, values in saved["hyper"].items()},
        mode=saved["mode"],
    )


def _encode(values: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
    return {"dtype": values.dtype.name, "shape": list(values.shape), "base64": data}


def _decode(saved: dict[str, Any]) -> np.ndarray:
    data = base64.b64decode(saved["base64"])
    return np.frombuffer(data, jnp.dtype(saved["dtype"])).reshape(saved["shape"]).copy()
