"""Processes that a test starts, and what they print."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent


class Child:
    """A process that prints into files: one that prints much never waits for the test, or for its sibling, to read."""

    def __init__(self, command, env, *, text=None):
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as typed:
            typed.write((text or "").encode())
            typed.seek(0)
            own = {} if text is None else {"stdin": typed}
            self.process = subprocess.Popen(command, env=env, stdout=self._out, stderr=self._err, **own)

    def finish(self, timeout):
        """Its exit code and the texts of both streams, once it has ended."""
        code = self.process.wait(timeout)
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return code, *texts

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def together(script, *arguments, count=2, **variables):
    """Processes that run one script, which calls `jax.distributed.initialize` with `COUNT` and `RANK`."""
    address = f"127.0.0.1:{free_port()}"
    common = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "COUNT": str(count)} | variables
    common |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_COORDINATOR_BIND_ADDRESS": address}
    command = [sys.executable, str(script), *map(str, arguments)]
    children = [Child(command, common | {"RANK": str(rank)}) for rank in range(count)]
    try:
        yield children
    finally:
        for child in children:
            child.kill()


def finish_together(*arguments, timeout=300, **options):
    """Runs such processes to their end, which is to print `done`."""
    with together(*arguments, **options) as children:
        for child in children:
            code, out, err = child.finish(timeout)
            assert code == 0, out + err[-5000:]
            assert out.split()[-1] == "done"
