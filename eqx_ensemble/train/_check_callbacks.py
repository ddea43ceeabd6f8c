import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._check import check_positive_int, kind_text

_ANSWERS = "`None` or `False` to continue, `True` to end the run, or booleans `(members,)` to stop members"


def check_callbacks(callbacks: Any, every: Any) -> tuple[Callable[..., Any], ...]:
    """Raises unless `callbacks` are functions, and for `every` without any. Returns them as a tuple."""
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
            check_takes_one(inspect.signature(callback), i)
    if every is not None:
        if not callbacks:
            raise TypeError("`fit` takes `callback_every` with `callbacks=`.")
        check_positive_int(every, "callback_every", name="fit")
    return tuple(callbacks)


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
