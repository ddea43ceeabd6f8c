import contextlib
import contextvars
import enum
from collections.abc import Iterator
from pickle import PicklingError, dumps
from typing import Any

import numpy as np
from jaxtyping import Array, Int8, Shaped


class DivergedError(ArithmeticError):
    """Raised by [`eqx_ensemble.fit`][] with `on_diverge="raise"` when members diverge; `run` is the run so far.

    In another process `run` is `None` if it cannot be pickled; a note says why.
    """

    def __init__(self, message: str, run: Any) -> None:
        super().__init__(message)
        self.run = run

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), _state_of(self)


class NotSavedError(OSError):
    """Raised by [`eqx_ensemble.fit`][] when a checkpoint cannot be written; `run` is the run so far.

    In another process `run` is `None` if it cannot be pickled; a note says why.
    """

    def __init__(self, error: OSError, run: Any) -> None:
        text = f"`fit` ended after {int(run.train_state.step)} steps, because the run could not be saved: "
        text += f"{error.strerror or error}\nThis error's `run` is the run so far; the same call resumes from the last "
        super().__init__(error.errno, f"{text}checkpoint.")
        self.run = run

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), _state_of(self)


def _again(kind: type[Exception], arguments: tuple) -> Exception:
    """The error with its message, without the constructors above, which also need a run."""
    error = kind.__new__(kind)
    if isinstance(error, OSError):
        OSError.__init__(error, *arguments)
    else:
        Exception.__init__(error, *arguments)
    return error


def _state_of(error: DivergedError | NotSavedError) -> dict[str, Any]:
    """The error's attributes; `run` becomes `None` if it cannot be pickled, for example because of a lambda."""
    try:
        dumps(error.run)
    except (PicklingError, AttributeError, TypeError) as problem:
        note = f"`run` is `None` here, because it cannot be pickled: {problem}"
        return vars(error) | {"run": None, "__notes__": [*getattr(error, "__notes__", ()), note]}
    return vars(error)


class Status(enum.IntEnum):
    """The status of a member. Arrays of statuses are int8.

    - `OK`: the member is training, or trained to the end.
    - `STOPPED`: `patience`, `stop`, a callback or [`eqx_ensemble.methods.population.stop`][] stopped it.
    - `DIVERGED`: its loss or weights were not finite. It keeps its last finite weights.

    ```python
    status = jnp.array([0, 2, 1], jnp.int8)  # such as `metrics.status`
    status == ee.train.Status.OK  # [True, False, False]
    str(ee.train.Status(status[1]))  # "diverged"
    ```
    """

    OK = 0
    STOPPED = 1
    DIVERGED = 2

    def __str__(self) -> str:
        return self.name.lower()


def status_names(status: Int8[Array | np.ndarray, " members"]) -> Shaped[np.ndarray, " members"]:
    """The names of statuses."""
    return np.array([str(one) for one in Status])[np.asarray(status)]


# Calls of `fit` for a part of an ensemble, of which no member may be left to train.

_may_be_idle: contextvars.ContextVar[bool] = contextvars.ContextVar("may_be_idle", default=False)


@contextlib.contextmanager
def allow_idle() -> Iterator[None]:
    """Within it, `fit` accepts members of which none trains: a part of an ensemble in which others do."""
    token = _may_be_idle.set(True)
    try:
        yield
    finally:
        _may_be_idle.reset(token)


def may_be_idle() -> bool:
    """Whether the current call of `fit` accepts members of which none trains."""
    return _may_be_idle.get()


# Calls of `fit` that read a run from its checkpoint, and train nothing.


class UnfinishedError(Exception):
    """Raised within `only_read` by a call of `fit` that has steps left to train."""


_only_reads: contextvars.ContextVar[bool] = contextvars.ContextVar("only_reads", default=False)


@contextlib.contextmanager
def only_read() -> Iterator[None]:
    """Within it, `fit` returns a run whose checkpoint is complete, and raises `UnfinishedError` for any other."""
    token = _only_reads.set(True)
    try:
        yield
    finally:
        _only_reads.reset(token)


def check_may_train() -> None:
    """Raises if the current call of `fit` is only to read."""
    if _only_reads.get():
        raise UnfinishedError
