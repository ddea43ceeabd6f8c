"""Arrays for workers in temporary files: those of killed callers are removed, and a full disk is named."""

import os
import resource
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from eqx_ensemble.checkpoint import _disk
from eqx_ensemble.fleet._engines import _prefix, write_arrays

HELD = """
import sys, tempfile, numpy as np
from eqx_ensemble.fleet._engines import write_arrays
tempfile.tempdir = sys.argv[1]
with write_arrays([np.arange(5)]) as files:
    print(files[0].path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_what_killed_callers_left_is_removed(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", HELD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    path = child.stdout.readline().strip()
    with write_arrays([np.arange(3)]) as files:  # while it lives
        assert os.path.exists(path)
        assert files[0].read().tolist() == [0, 1, 2]
        assert len(os.listdir(tmp_path)) == 2
    child.kill()
    child.communicate()
    own = tmp_path / f"{_prefix()}00000000" / "notes.txt"
    own.parent.mkdir()
    own.write_text("mine")
    (tmp_path / "eqx_ensemble-mine").mkdir()
    with write_arrays([np.arange(3)]):
        assert not os.path.exists(os.path.dirname(path))
    assert own.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == [own.parent.name, "eqx_ensemble-mine"]


def test_one_that_is_about_to_be_locked(tmp_path, monkeypatch):
    """A folder that another call takes for a stale one before it is locked is made again."""
    make, stolen = os.mkdir, []

    def removed(path, mode):
        make(path, mode)
        if not stolen:
            stolen.append(path)
            os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", removed)
    with write_arrays([np.arange(3)]) as files:
        assert files[0].read().tolist() == [0, 1, 2]
    assert stolen
    with _disk.hold_lock(tmp_path, wait=False) as held:
        assert held
    assert os.listdir(tmp_path) == []


def test_a_full_disk(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    text = (
        rf"\(800000 bytes\) in the temporary folder `{tmp_path}`: File too large; [0-9]+ bytes are free.\n.*set TMPDIR"
    )
    try:
        with pytest.raises(OSError, match=text), write_arrays([np.zeros(100_000)]):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []
