"""Checks of what runs shards: executors with the interface of `concurrent.futures`."""

from concurrent.futures import Executor, Future
from typing import Any

from .._check import kind_text

_FIX = (
    "Write a subclass of `concurrent.futures.Executor` whose `submit` returns a `concurrent.futures.Future`: "
    "the recipe of other engines has some of ten lines."
)


def check_factory(executor: Any, *, name: str) -> None:
    """What is neither an executor nor a client of Dask: a function that makes executors."""
    if not callable(executor):
        raise TypeError(
            f"`{name}` needs an executor as of `concurrent.futures`, a function that makes one, a client of Dask, or "
            f"`None` for Dask on this machine; got {kind_text(executor)}.\n"
            "For example `lambda: ProcessPoolExecutor(2, multiprocessing.get_context('spawn'))`. " + _FIX
        )


def check_executor(executor: Any) -> None:
    """What a function that makes executors returned."""
    if not isinstance(executor, Executor):
        raise TypeError(
            "A function that makes executors has to return a `concurrent.futures.Executor`, "
            f"got {kind_text(executor)}.\n{_FIX}"
        )


def check_future(future: Any, executor: Executor) -> "Future[Any]":
    """What an executor's `submit` returned. Returns it."""
    if not isinstance(future, Future):
        raise TypeError(
            f"`{type(executor).__name__}.submit` has to return a `concurrent.futures.Future`, got {kind_text(future)}."
            f"\n{_FIX}"
        )
    return future
