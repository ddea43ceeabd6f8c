import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from ._check_exit import check_exit_code, check_main_thread, check_signal, is_main_thread

AGAIN = 75  # `EX_TEMPFAIL` of sysexits.h: a temporary failure, to be tried again


class _Watch:
    """Notes a signal, and exits at once unless a run that is saved holds the exit back until it has been saved."""

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
    """Within `with`, a signal has runs saved, and then ends the program with an exit code that means "again".

    Machines that may be taken away send SIGTERM some time before they end a program by SIGKILL. A run with
    `checkpoint` ends at its next boundary, about a second later, is saved, and raises `SystemExit`; so do the methods
    that take `checkpoint`. Where none is running, `SystemExit` is raised at once, and also at a second signal. A run in
    another thread is returned as after Ctrl-C, and the main thread exits at the end of the `with` block. The same
    program, started again, resumes.

    **Arguments:**

    - `number`: the signal, such as `signal.SIGUSR1`.
    - `code`: the exit code, from 1 to 255; by default 75, the `EX_TEMPFAIL` of `sysexits.h`. Have the scheduler start
        the program again where it ends with this code.

    **Raises:** `RuntimeError` outside of the main thread, which alone receives signals; `ValueError` for a signal that
    cannot be handled, and for another code.

    While JAX compiles, no signal is seen. This is for one process: on several, those that receive no signal would wait
    for the others.

    ```python
    import tempfile

    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    with ee.checkpoint.exit_on_signal():
        run = ee.fit(
            ensemble, loss, optax.sgd(0.1), data, epochs=3, checkpoint=tempfile.mkdtemp() + "/run", key=key
        )
    ```
    """
    name = "checkpoint.exit_on_signal"
    check_signal(number, name=name)
    check_exit_code(code, name=name)
    check_main_thread(name=name)
    watch = _Watch(code)
    before = signal.signal(number, watch.note)
    _active.append(watch)
    try:
        yield
    finally:
        _active.remove(watch)
        signal.signal(number, signal.SIG_DFL if before is None else before)  # `None`: a handler not of Python
    if watch.received:
        raise SystemExit(code)


@contextlib.contextmanager
def hold_exit() -> Iterator[None]:
    """Within `with`, a first signal is only noted."""
    watches = list(_active)
    for watch in watches:
        watch.held += 1
    try:
        yield
    finally:
        for watch in watches:
            watch.held -= 1


def is_exit_asked() -> bool:
    """Whether a signal has come that ends the program."""
    return any(watch.received for watch in _active)


def exit_if_asked() -> None:
    """Ends the program if a signal has come; not in other threads than the main one, where this would be no end."""
    for watch in _active:
        if watch.received and is_main_thread():
            raise SystemExit(watch.code)
