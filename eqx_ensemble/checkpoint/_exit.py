import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from .._caller import caller


def check_signal(number: Any) -> None:
    """Raises unless `number` is a signal that a program can handle."""
    never = [getattr(signal, word) for word in ("SIGKILL", "SIGSTOP") if hasattr(signal, word)]
    whole = isinstance(number, int) and not isinstance(number, bool)
    if not whole or number not in signal.valid_signals() or number in never:
        raise ValueError(
            f"`{caller()}` needs a signal that a program can handle, such as `signal.SIGTERM`; got {number!r}."
        )


def is_main_thread() -> bool:
    """Whether this is the main thread."""
    return threading.current_thread() is threading.main_thread()


AGAIN = 75  # `EX_TEMPFAIL` of sysexits.h: a temporary failure, to be retried


class _Watch:
    """Records a signal, and exits at once unless a run with checkpoints defers the exit until it is saved."""

    def __init__(self, code: int) -> None:
        self.code, self.received, self.held = code, 0, 0

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        self.received += 1
        if self.held == 0 or self.received > 1:
            raise SystemExit(self.code)


_active: list[_Watch] = []


@contextlib.contextmanager
def exit_on_signal(number: int = signal.SIGTERM, *, code: int = AGAIN) -> Iterator[None]:
    """Within `with`, a signal saves runs and exits the program with a code that requests a restart.

    Preemptible machines send SIGTERM some time before they end a program. A run with `checkpoint` stops about a second
    later, is saved, and raises `SystemExit`; the same program, started again, resumes it. Without a run, and at a
    second signal, `SystemExit` is raised at once. A run in another thread returns as after Ctrl-C; the main thread
    exits at the end of the block. Signals are not handled while JAX compiles. Use it with one process only.

    **Arguments:**

    - `number`: the signal, such as `signal.SIGUSR1`.
    - `code`: the exit code, from 1 to 255, after which the scheduler should restart the program; by default 75,
        `EX_TEMPFAIL`.

    **Raises:** `RuntimeError` outside of the main thread.

    ```python
    import tempfile

    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    options = {"epochs": 3, "checkpoint": tempfile.mkdtemp() + "/run"}
    with ee.checkpoint.exit_on_signal():
        run = ee.fit(ensemble, loss, optax.sgd(0.1), jnp.ones((64, 3)), key=key, **options)
    ```
    """
    check_signal(number)
    if not isinstance(code, int) or isinstance(code, bool) or not 1 <= code <= 255:
        raise ValueError(f"`{caller()}` needs `code` to be an exit code from 1 to 255, got {code!r}.")
    if not is_main_thread():
        raise RuntimeError(f"`{caller()}` needs the main thread, which alone receives signals.")
    watch = _Watch(code)
    before = signal.signal(number, watch.note)
    _active.append(watch)
    try:
        yield
    finally:
        _active.remove(watch)
        signal.signal(number, signal.SIG_DFL if before is None else before)  # `None`: a handler not set from Python
    if watch.received:
        raise SystemExit(code)


@contextlib.contextmanager
def hold_exit() -> Iterator[None]:
    """Within `with`, a first signal is only recorded."""
    watches = list(_active)
    for watch in watches:
        watch.held += 1
    try:
        yield
    finally:
        for watch in watches:
            watch.held -= 1


def is_exit_asked() -> bool:
    """Whether a signal to exit was received."""
    return any(watch.received for watch in _active)


def exit_if_asked() -> None:
    """Exits if a signal was received; in the main thread only, as others cannot exit the program."""
    for watch in _active:
        if watch.received and is_main_thread():
            raise SystemExit(watch.code)
