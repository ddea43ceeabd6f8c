"""The sources of a run's work: arrays in memory, a `RowReader`, or an iterable of batches."""

import abc
import base64
import functools as ft
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from ... import _axes
from ..._axes import check_rows_of_data
from ..._foreign import as_numpy, from_foreign_tree
from ..._pytree import PyTree
from ..._sharding import Layout, shard_data
from ...plan._engine import Cost
from .._state import put_new
from ..compiled._health import Carry
from ..compiled._order import RowOrder
from ..compiled._program import Program
from ._check import check_row_indices, cursor_not_savable_message
from ._reader import RowReader
from ._rows import Slots

# A run's position in an iterable of batches, in JSON, so that a saved file cannot name code to run.


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
        return {"": ["bytes", base64.b64encode(state).decode()]}
    if isinstance(state, np.generic) and state.dtype.kind in "biuf":
        return state.item()
    if isinstance(state, dict) and all(isinstance(key, str) and key for key in state):
        return {key: encode(item, f"{path}[{key!r}]") for key, item in state.items()}
    if isinstance(state, dict):
        return {"": ["dict", [[encode(key, path), encode(item, f"{path}[{key!r}]")] for key, item in state.items()]]}
    if isinstance(state, list | tuple):
        items = [encode(item, f"{path}[{i}]") for i, item in enumerate(state)]
        return items if isinstance(state, list) else {"": ["tuple", items]}
    kind = "tensor" if type(state).__module__ == "torch" else "array"
    if isinstance(state, np.ndarray) or kind == "tensor":
        array = np.asarray(state)
        if array.dtype.kind in "biufc":
            return {"": [kind, array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()]}
    raise TypeError(cursor_not_savable_message(state, path))


def decode(text: Any) -> Any:
    """The state from the JSON that `encode` returned."""
    if isinstance(text, list):
        return [decode(item) for item in text]
    if not isinstance(text, dict):
        return text
    match text.get(""):
        case None:
            return {key: decode(item) for key, item in text.items()}
        case ["bytes", data]:
            return base64.b64decode(data)
        case ["dict", pairs]:
            return {decode(key): decode(item) for key, item in pairs}
        case ["tuple", items]:
            return tuple(map(decode, items))
        case [kind, dtype, shape, data]:
            array = np.frombuffer(bytearray(base64.b64decode(data)), dtype).reshape(shape)
            return array if kind == "array" else sys.modules["torch"].from_numpy(array)  # imported by the iterator


def is_batches(data: Any) -> bool:
    """Whether `data` is an iterable of batches rather than a PyTree of arrays.

    A list of arrays is a PyTree; a list of anything else, such as `(x, y)` tuples, is a list of batches.
    """
    if isinstance(data, list):
        return bool(data) and not all(_axes.is_array(x) or isinstance(x, _axes.Each) for x in data)
    is_tree = _axes.is_array(data) or isinstance(data, tuple | dict | eqx.Module)
    return isinstance(data, Iterable) and not is_tree


def in_memory(data: Any) -> bool:
    """Whether `data` is a PyTree of arrays: neither an iterable of batches nor a `RowReader`."""
    return not is_batches(data) and not isinstance(data, RowReader)


def on_device(
    data: PyTree, num_members: int, *, argument: str, layout: Layout | None = None, whole: bool = False
) -> tuple[PyTree, int]:
    """A data set on the device, checked, and its number of rows.

    Arrays are `(rows, ...)`; those marked `Each` are `(members, rows, ...)`. On a mesh, rows are sharded if they divide
    evenly; they are replicated if `whole`.
    """
    data = from_foreign_tree(data, argument)
    rows = check_rows_of_data(data, num_members, argument=argument, finite=False)
    data = _axes.map_each(_axes.Each, data)
    if layout is None:
        return jax.tree.map(put_new, data), rows
    return shard_data(data, layout, whole=whole), rows


def without_marks(data: PyTree) -> PyTree:
    """The data without `Each`, in the structure that a member's loss receives."""
    return _axes.map_each(lambda value: value, data)


def as_row_indices(rows: Any, num_members: int, num_rows: int) -> np.ndarray | None:
    """The members' own rows `(members, n)` of the data, as int32 on the host."""
    if rows is None:
        return None
    rows = as_numpy(_axes.map_each(lambda value: value, rows), "rows")
    check_row_indices(rows, num_members, num_rows)
    return rows.astype(np.int32)


def member_shapes(data: PyTree, *, rows: int | None = None) -> PyTree:
    """The shapes of the data on the device as one member sees them, or of a batch of `rows` of their rows."""
    shape = lambda x, own: x.shape[own:] if rows is None else (rows, *x.shape[own + 1 :])
    of_one = lambda x, own: jax.ShapeDtypeStruct(shape(x, own), x.dtype) if eqx.is_array(x) else x
    of = lambda tree, own: jax.tree.map(lambda x: of_one(x, own), tree)
    return _axes.map_each(lambda value: of(value, 1), data, shared=lambda x: of(x, 0))


# What counts as a function among callable PyTrees.


def is_wrapper(fn: Any) -> bool:
    """Whether a callable PyTree stands for a function: a method of a Module, a partial, a transformed function."""
    is_module = isinstance(fn, eqx.Module) and (isinstance(fn, eqx.Partial) or hasattr(type(fn), "__wrapped__"))
    return callable(fn) and (is_module or isinstance(fn, ft.partial))


def is_data_function(source: Any) -> bool:
    """Whether a worker calls this to make its data; a Module with arrays is data itself, its methods are functions."""
    return callable(source) and (is_wrapper(source) or not any(map(eqx.is_array, jax.tree.leaves(source))))


class Setting(NamedTuple):
    """The run for which a source provides work.

    `step` is the number of steps done, `cursor` the position in the data, `periods` the numbers of steps between two
    checkpoints and between two calls of callbacks, `limits` the sorted steps at which members stop, `seconds` the time
    between inspections of the steps' results, and `must_end` whether to inspect them earlier. `inspect` chooses the
    plan for a step on a batch, and returns the program under it; `cost` analyses that step.
    """

    length: Length
    step: int
    cursor: Cursor
    periods: tuple[int, ...]
    limits: np.ndarray
    seconds: float
    must_end: Callable[[], bool]
    program: Program
    slots: Slots
    inspect: Callable[..., Program]
    cost: Callable[[], Cost]


class Outputs(NamedTuple):
    """The outputs of consecutive steps, `(windows, members, ...)`, and the scores `(members,)` after them.

    The `windows` of the program define which steps those are.
    """

    num_steps: int
    windows: PyTree
    scores: Any = None


class Outcome(NamedTuple):
    """The outcome of a piece of work: outputs in order, the number of steps that count, and the parts still to run."""

    outputs: Sequence[Outputs]
    num_steps: int
    rest: Sequence[Any] = ()


NOTHING = Outcome((), 0)


class AbstractWork(abc.ABC):
    """Steps that one call runs: `compiled((program, inputs, batch), carry)`.

    **Attributes:**

    - `may_raise`: whether a step calls Python, and so may raise while it runs.
    """

    compiled: Callable[..., tuple[Carry, PyTree]]
    batch: PyTree
    num_steps: int
    may_raise: bool = False

    @abc.abstractmethod
    def unpack(self, results: PyTree, carry: Carry) -> Outcome:
        """The outcome, from the call's results on the host and the carry after it."""

    def split(self, most: int) -> Sequence[Any]:
        """The work, split into parts of at most `most` steps."""
        raise NotImplementedError


class EpochEnd:
    """Returned instead of work when an epoch has ended, whose validation is a call of its own."""


class AbstractSource(abc.ABC):
    """Provides the work of a run, independent of the training loop.

    **Attributes:**

    - `data`: the data that all steps read, on the device; `None` if batches come with the work.
    - `order`: which rows of the data a step reads; `None` if batches come with the work.
    - `rows`: the rows `(members, n)` that members see; `None` if each sees all.
    - `num_steps`: the steps of the run; `None` if it follows from the data.
    - `last_step`: the step after which the run ends, if known.
    - `epoch`: the steps of an epoch; `None` if batches come from an iterable.
    - `cursor`: the position in the data after the steps that are recorded.
    - `fault`: a function that returns what in the data so far is not finite, in words.
    - `integers`: a function that returns which arrays hold integers, in words; empty if they are not in memory.
    """

    data: PyTree = None
    order: RowOrder | None = None
    rows: np.ndarray | None = None
    num_steps: int | None = None
    last_step: int | None = None
    epoch: int | None = None
    cursor: Cursor = Cursor()
    fault: Callable[[], str]
    integers: Callable[[], str] = str

    @property
    @abc.abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """Short texts that identify the data of a saved run."""

    @abc.abstractmethod
    def shapes(self) -> PyTree:
        """The shapes of a batch as one member sees it."""

    @abc.abstractmethod
    def start(self, setting: Setting) -> None:
        """Begins, or resumes at the setting's step and cursor."""

    @abc.abstractmethod
    def next(self, steps: int, slots: Slots) -> AbstractWork | EpochEnd | None:
        """Work of about `steps` steps for the members in `slots`; `None` at the end of the run."""

    @abc.abstractmethod
    def prefetch(self) -> None:
        """Prepares the next work, while the device works."""

    @abc.abstractmethod
    def advance(self, work: AbstractWork | EpochEnd, outcome: Outcome = NOTHING) -> bool:
        """Moves the cursor past the steps that are recorded; the parts still to run come next.

        Returns whether an epoch is known to have ended, so that `next` would return an `EpochEnd`.
        """

    def bookmark(self) -> Cursor:
        """The cursor as it is saved."""
        return self.cursor

    def put_back(self, parts: Sequence[Any]) -> None:
        """Puts parts of work back, to be returned by `next` before others."""
        raise NotImplementedError

    def finish(self, step: int) -> None:  # noqa: B027 (most have nothing to do)
        """Called once at the end of a run, after `step`."""
