import signal
import threading
from typing import Any


def check_signal(number: Any, *, name: str) -> None:
    """Raises unless `number` is a signal that a program can handle."""
    never = [getattr(signal, word) for word in ("SIGKILL", "SIGSTOP") if hasattr(signal, word)]
    whole = isinstance(number, int) and not isinstance(number, bool)
    if not whole or number not in signal.valid_signals() or number in never:
        raise ValueError(
            f"`{name}` needs a signal that a program can handle, such as `signal.SIGTERM`; got {number!r}."
        )


def check_exit_code(code: Any, *, name: str) -> None:
    """Raises unless `code` is an exit code other than success."""
    if not isinstance(code, int) or isinstance(code, bool) or not 1 <= code <= 255:
        raise ValueError(f"`{name}` needs `code` to be an exit code from 1 to 255, got {code!r}.")


def is_main_thread() -> bool:
    """Whether this is the main thread."""
    return threading.current_thread() is threading.main_thread()


def check_main_thread(*, name: str) -> None:
    """Raises outside of the main thread."""
    if not is_main_thread():
        raise RuntimeError(f"`{name}` needs the main thread, which alone receives signals.")
