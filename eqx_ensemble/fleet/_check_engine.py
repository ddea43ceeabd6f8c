"""Checks of executors, which need the interface of `concurrent.futures`."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any

from .._check import kind_text

_FIX = (
    "Write a subclass of `concurrent.futures.Executor` whose `submit` returns a `concurrent.futures.Future`: "
    "the recipe of other engines has some of ten lines."
)


def check_factory(executor: Any, *, name: str) -> None:
    """Raises unless `executor` is a function, being neither an executor nor a Dask client."""
    if not callable(executor):
        raise TypeError(
            f"`{name}` needs a `concurrent.futures.Executor`, a function that makes one, a Dask client, or `None` for "
            f"a local Dask cluster; got {kind_text(executor)}.\n"
            "For example `lambda: ProcessPoolExecutor(2, multiprocessing.get_context('spawn'))`. " + _FIX
        )


def check_executor(executor: Any) -> None:
    """Raises unless a factory returned an executor."""
    if not isinstance(executor, Executor):
        raise TypeError(
            "A function that makes executors must return a `concurrent.futures.Executor`, "
            f"got {kind_text(executor)}.\n{_FIX}"
        )


def check_not_forked(executor: Executor) -> None:
    """Raises for a process pool that forks: JAX is multithreaded, and a forked child has none of its threads."""
    context = getattr(executor, "_mp_context", None) if isinstance(executor, ProcessPoolExecutor) else None
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "`fleet` needs processes that are spawned, and this `ProcessPoolExecutor` forks: JAX is multithreaded, and "
            "forked processes can deadlock.\n"
            "Write `ProcessPoolExecutor(2, multiprocessing.get_context('spawn'))`, in a script below "
            "`if __name__ == '__main__':`."
        )


def check_future(future: Any, executor: Executor) -> "Future[Any]":
    """Raises unless `submit` returned a `concurrent.futures.Future`. Returns it."""
    if not isinstance(future, Future):
        raise TypeError(
            f"`{type(executor).__name__}.submit` must return a `concurrent.futures.Future`, got {kind_text(future)}."
            f"\n{_FIX}"
        )
    return future


def check_open(client: Any, *, name: str) -> None:
    """Raises if a Dask client is closed."""
    if client.status == "closed":
        raise RuntimeError(f"`{name}` needs a Dask client that is open: call it inside the `with` block.")


@contextlib.contextmanager
def explain_start(*, name: str) -> Iterator[None]:
    """Adds the likely fix to the errors of workers that do not start."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            f"`{name}` starts worker processes, which import the script: in a script, call it below "
            "`if __name__ == '__main__':`."
        )
        raise
