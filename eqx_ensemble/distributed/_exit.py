import atexit
import os
import sys


def exit_after_error() -> None:
    """Makes the process exit at once after an uncaught exception.

    With JAX alone it would wait minutes for the others, which may be waiting for it.
    """
    atexit.register(_exit_at_once)  # runs before that of JAX, which was registered earlier


def wait_after_error() -> None:
    """Reverts `exit_after_error`."""
    atexit.unregister(_exit_at_once)


def _exit_at_once() -> None:
    error = getattr(sys, "last_value", None)  # set when Python has printed an uncaught exception
    if error is None or hasattr(sys, "ps1"):
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed, or there is none
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
