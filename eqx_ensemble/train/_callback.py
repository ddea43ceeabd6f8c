import contextlib
import dataclasses
import functools as ft
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, Int8

from .._caller import caller
from .._check import check_positive_int, kind_text
from .._ensemble import Ensemble
from ._state import TrainState
from .host._record import History

_ANSWERS = "`None` or `False` to continue, `True` to end the run, or booleans `(members,)` to stop members"


def check_callbacks(callbacks: Any) -> list["Every"]:
    """Raises unless `callbacks` are functions of one argument. Returns each with its period."""
    if callbacks is None:
        callbacks = ()
    elif callable(callbacks):
        callbacks = (callbacks,)
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise TypeError(
            f"`fit` needs a function of one argument as `callbacks`, or a list of them; got {kind_text(callbacks)}.\n"
            "For example `callbacks=lambda progress: print(progress.step)`."
        )
    for i, callback in enumerate(callbacks):
        if isinstance(callback, type) or not callable(callback):
            fix = f"Make one: `{callback.__name__}(...)`." if isinstance(callback, type) else "Pass functions."
            raise TypeError(f"`fit` needs functions as `callbacks`; at `callbacks[{i}]`: {kind_text(callback)}.\n{fix}")
        with contextlib.suppress(ValueError):  # no signature
            check_takes_one(inspect.signature(callback.callback if isinstance(callback, Every) else callback), i)
    return [callback if isinstance(callback, Every) else Every(None, callback) for callback in callbacks]


def check_takes_one(signature: inspect.Signature, index: int) -> None:
    """Raises unless a callback can be called with one argument."""
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(
            f"`fit` calls `callbacks[{index}]` with one `train.Progress`, and it takes {signature}: {error}.\n"
            "For example `callbacks=lambda progress: print(progress.step)`."
        ) from None


def check_answer(answer: Any, callback: Any, num_members: int) -> np.ndarray | bool:
    """Raises for an invalid return value of a callback. Returns whether the run ends, or which members stop."""
    if answer is None:
        return False
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    name = getattr(callback, "__name__", type(callback).__name__)
    array = np.asarray(answer) if hasattr(answer, "dtype") or isinstance(answer, list | tuple) else None
    if array is None or array.dtype != bool:
        got = kind_text(answer) if array is None else f"dtype {array.dtype}, shape {array.shape}"
        raise TypeError(f"`fit` needs a callback to return {_ANSWERS}; `{name}` returned {got}.")
    if array.shape == ():
        return bool(array)
    if array.shape != (num_members,):
        raise ValueError(
            f"`fit` needs a callback to return {_ANSWERS}; `{name}` returned booleans of shape {array.shape} for "
            f"{num_members} members."
        )
    return array


def outdated_message() -> str:
    """The message that the weights were read after the callback returned."""
    return (
        "`train.Progress` has weights only until its callback returns, because the next step reuses their memory.\n"
        "Read `progress.ensemble` or `progress.train_state` in the callback, and keep that."
    )


def other_process_message(processes: list[int]) -> str:
    """The message that a callback failed on other processes."""
    listed = ", ".join(map(str, processes))
    return f"`fit` ended because a callback raised an error on process {listed}, which shows it."


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Progress:
    """A read-only view of a run, on the host, that [`eqx_ensemble.fit`][] passes to its callbacks.

    **Attributes:**

    - `step`: the number of steps done, including earlier runs.
    - `last_step`: the step at which the run ends; `None` if unknown, as for epochs of an iterable.
    - `epoch`: the number of completed epochs of this run.
    - `seconds`: the time since `fit` was called.
    - `ids`: `(members,)`, the members' ids.
    - `status`: `(members,)`, int8, each an [`eqx_ensemble.train.Status`][].
    - `loss`: `(members,)`, each member's latest finite training loss; NaN if it has none.
    - `score`: `(members,)`, each member's latest finite validation score; `None` before the first validation.
    """

    step: int
    last_step: int | None
    epoch: int
    seconds: float
    ids: Int[np.ndarray, " members"]
    status: Int8[np.ndarray, " members"]
    loss: Float[np.ndarray, " members"]
    score: Float[np.ndarray, " members"] | None
    _curves: Callable[[], History]
    _snapshots: list[Callable[[], TrainState[Any]]]  # one element; empty once the callback has returned

    def __repr__(self) -> str:
        end = "" if self.last_step is None else f" of {self.last_step}"
        return f"Progress(step {self.step}{end}, epoch {self.epoch}, {self.seconds:.3g} s)"

    @ft.cached_property
    def history(self) -> History:
        """The curves since the previous call. Concatenated over all calls, they are the history of the run."""
        return self._curves()

    @property
    def train_state(self) -> TrainState[Any]:
        """A copy of the training state with the current weights of all members.

        The copy is made on access. With several processes, all of them must access it.

        **Raises:** `RuntimeError` once the callback has returned.
        """
        if not self._snapshots:
            raise RuntimeError(outdated_message())
        return self._snapshots[0]()

    @property
    def ensemble(self) -> Ensemble[Any]:
        """A copy of the ensemble with its current weights, from `train_state`."""
        return self.train_state.ensemble


@runtime_checkable
class Callback(Protocol):
    """A function of one [`eqx_ensemble.train.Progress`][] that [`eqx_ensemble.fit`][] calls between chunks of steps.

    It returns `None` or `False` to continue; `True` to end the run, like Ctrl-C; or booleans `(members,)` to stop these
    members.

    ```python
    def stop_at(threshold):
        return lambda progress: progress.loss < threshold  # (members,): these members stop


    callback = ee.train.every(10, stop_at(1e-6))  # fit(..., callbacks=callback)
    ```
    """

    def __call__(self, progress: Progress, /) -> Any:
        """Inspects the run. Returns whether to end it, or which members to stop."""
        ...


@final
@dataclasses.dataclass(frozen=True)
class Every:
    """A callback that is called after every `steps` steps; `None` for a call between any two chunks."""

    steps: int | None
    callback: Callable[..., Any]

    def __call__(self, progress: Progress, /) -> Any:
        """Calls the callback."""
        return self.callback(progress)


def every(steps: int, callback: Callback) -> Callback:
    """A callback that [`eqx_ensemble.fit`][] calls after every `steps` steps, which makes its decisions reproducible.

    **Arguments:**

    - `steps`: the number of steps between two calls.
    - `callback`: the [`eqx_ensemble.train.Callback`][].

    **Returns:** a callback. It sees all steps since its own last call in `progress.history`, and is also called at the
    end of the run, if there is anything new.

    ```python
    ee.train.every(100, lambda progress: print(progress.step, progress.loss))
    ```
    """
    check_positive_int(steps, "steps")
    if isinstance(callback, type | Every) or not callable(callback):
        raise TypeError(
            f"`{caller()}` needs a function of one argument, got {kind_text(callback)}.\n"
            "Several callbacks are a list, each with its period: `[train.every(50, first), train.every(200, second)]`."
        )
    return Every(steps, callback)
