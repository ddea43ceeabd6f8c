"""Each of two processes reads the rows of its own devices, and the run is that of arrays in memory."""

import os
import pathlib
import subprocess
import sys

import pytest

from .test_initialise import SOMEONE_SAYS, free_port

HERE = pathlib.Path(__file__).parent


@pytest.mark.slow
def test_processes_read_their_own_rows():
    common = {name: value for name, value in os.environ.items() if name not in SOMEONE_SAYS}
    common |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parent.parent), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-W", "ignore", str(HERE / "rows_together.py")]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    children = [subprocess.Popen(command, env=common | {"RANK": str(i)}, **pipe) for i in range(2)]
    try:
        for child in children:
            text, _ = child.communicate(timeout=300)
            assert child.returncode == 0, text
            assert text.splitlines()[-1] == "done"
    finally:
        for child in children:
            child.kill()
