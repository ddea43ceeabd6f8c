"""Workers that wait to be killed: they run up to a checkpoint, say who they are, and go on where nobody kills them."""

import contextlib
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np


def make_held_loss(folder, steps):
    """A loss that, while `folder / "hold"` exists, stops a process which has evaluated it so many times."""
    folder = str(folder)

    def wait(value):
        import os  # here: this function travels by value
        import pathlib
        import time

        place = pathlib.Path(folder)
        count = os.environ["EVALUATIONS"] = str(int(os.environ.get("EVALUATIONS", "0")) + 1)
        if int(count) >= steps and (place / "hold").exists():
            (place / "waiting" / str(os.getpid())).touch()
            while (place / "hold").exists():
                time.sleep(0.05)
        return value

    def loss(model, batch, key):
        x, y = batch
        value = jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)
        held = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), jax.lax.stop_gradient(value))
        return value + 0 * held

    return loss


@contextlib.contextmanager
def kill_waiting(folder, times, ready=lambda: True):
    """Kills processes that wait while `ready()`, so many of them, one after another; then lets all others go on."""
    (folder / "waiting").mkdir()
    (folder / "hold").touch()
    stop, killed = threading.Event(), []

    def kill():
        while len(killed) < times and not stop.wait(0.05):
            for path in sorted((folder / "waiting").iterdir())[: ready()]:
                path.unlink()
                os.kill(int(path.name), signal.SIGKILL)
                killed.append(int(path.name))
        (folder / "hold").unlink()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()
