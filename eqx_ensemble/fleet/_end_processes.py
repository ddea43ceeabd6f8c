"""Ends the worker processes of an executor."""

import inspect
from concurrent.futures import Executor
from typing import Any


def end_processes(executor: Executor) -> None:
    """Ends the worker processes of an executor whose results are not needed, if it has a way to do so.

    The interpreter otherwise waits at its exit until their calls are done.
    """
    pool: Any = executor
    if callable(terminate := getattr(pool, "terminate_workers", None)):  # of the standard library, from Python 3.14
        terminate()
        return
    if "kill_workers" in inspect.signature(pool.shutdown).parameters:  # of loky
        pool.shutdown(wait=False, kill_workers=True)
        return
    processes = list((getattr(pool, "_processes", None) or {}).values())  # of the standard library, before
    for process in processes:
        process.terminate()
