"""A run's position in an iterable of batches, in JSON, so that a saved file cannot name code to run."""

import base64
from typing import Any, NamedTuple

import numpy as np

from ._check import cursor_not_savable_message


class Length(NamedTuple):
    """The length of a run: a number of epochs or steps after the `begun` steps that were done before it."""

    begun: int
    epochs: int | None
    steps: int | None


class Cursor(NamedTuple):
    """A run's position in an iterable of batches.

    `epochs` counts those that ended since the run began, `batches` those taken in the current one. `state` is the
    iterator's state after the last batch, if it supports checkpointing; else `digest` identifies that batch.
    """

    epochs: int = 0
    batches: int = 0
    state: Any = None
    digest: str | None = None


def encode(state: Any, path: str = "") -> Any:
    """An iterator's state as JSON: values that JSON lacks are written as `{"": [kind, ...]}`."""
    if state is None or type(state) in (bool, int, float, str):
        return state
    if isinstance(state, bytes):
        return {"": ["bytes", _text(state)]}
    if isinstance(state, np.generic) and state.dtype.kind in "biuf":
        return encode(state.item(), path)
    if isinstance(state, dict) and all(isinstance(key, str) and key for key in state):
        return {key: encode(item, f"{path}[{key!r}]") for key, item in state.items()}
    if isinstance(state, dict):
        pairs = [[encode(key, path), encode(item, f"{path}[{key!r}]")] for key, item in state.items()]
        return {"": ["dict", pairs]}
    if isinstance(state, list | tuple):
        items = [encode(item, f"{path}[{i}]") for i, item in enumerate(state)]
        return items if isinstance(state, list) else {"": ["tuple", items]}
    kind = "tensor" if type(state).__module__ == "torch" else "array"
    if isinstance(state, np.ndarray) or kind == "tensor":
        array = np.asarray(state)
        if array.dtype.kind in "biufc":
            return {"": [kind, array.dtype.str, list(array.shape), _text(array.tobytes())]}
    raise TypeError(cursor_not_savable_message(state, path))


def decode(text: Any) -> Any:
    """The state from the JSON that `encode` returned."""
    if isinstance(text, list):
        return [decode(item) for item in text]
    if not isinstance(text, dict):
        return text
    if "" not in text:
        return {key: decode(item) for key, item in text.items()}
    kind, *parts = text[""]
    if kind == "bytes":
        return base64.b64decode(parts[0])
    if kind == "dict":
        return {decode(key): decode(item) for key, item in parts[0]}
    if kind == "tuple":
        return tuple(decode(item) for item in parts[0])
    dtype, shape, data = parts
    array = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
    if kind == "array":
        return array
    import torch  # pyright: ignore[reportMissingImports] (the iterator's own: its state held a tensor)

    return torch.from_numpy(array)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
