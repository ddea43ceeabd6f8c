"""The sources of a run's work: arrays in memory, a `RowReader`, or an iterable of batches."""

import abc
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from ..._pytree import PyTree
from ...plan._memory import Cost
from ..compiled._carry import Carry
from ..compiled._order import RowOrder
from ..compiled._program import Program
from ._cursor import Cursor, Length
from ._rows import Slots

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
    """

    data: PyTree = None
    order: RowOrder | None = None
    rows: np.ndarray | None = None
    num_steps: int | None = None
    last_step: int | None = None
    epoch: int | None = None
    cursor: Cursor = Cursor()
    fault: Callable[[], str]

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
