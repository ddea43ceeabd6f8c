import atexit
import os
import sys


def leave_at_once_after_an_error() -> None:
    """Has a process that ends with an exception end.

    JAX would have it wait for the others, who may wait for it: nobody would notice for minutes.
    """
    atexit.register(_leave)  # comes before JAX's own, which was registered when JAX was imported


def stay_after_an_error() -> None:
    """Takes that back."""
    atexit.unregister(_leave)


def _leave() -> None:
    error = getattr(sys, "last_value", None)  # set when Python has printed an exception that nobody caught
    if error is None or hasattr(sys, "ps1"):
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed, or there is none
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
