"""Only one run at a time can use a checkpoint folder, and obstacles to saving raise before anything is compiled."""

import errno
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import Checkpoints, _disk
from eqx_ensemble.checkpoint._call_folder import LOCK, RunLock
from eqx_ensemble.train import NotSavedError
from eqx_ensemble.train.host._loop import Recording

from ..factories import grouped

KEY = jax.random.key(0)
SGD = optax.sgd(0.1)
DATA = np.ones((8, 2), np.float32)


def loss(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch) - 1) ** 2)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 2, key=KEY)


def fitted(ensemble, folder, *, data=DATA, steps=6, **options):
    defaults = {"progress": False, "key": KEY, "checkpoint_every": 2} | ({"batch_size": 4} if data is DATA else {})
    return ee.fit(ensemble, loss, SGD, data, steps=steps, **grouped(defaults | options | {"checkpoint": folder}))


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


# Another program that has the lock, written with nothing of ours.
HOLDER = """
import fcntl, json, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
json.dump({"host": "node7", "pid": 4321, "since": "2026-01-02 03:04:05+00:00", "token": "x"}, file)
file.flush()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    (tmp_path / "a").mkdir()
    child = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "a" / LOCK], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.communicate()


def test_another_process_has_the_folder_until_it_is_killed(ensemble, holder, tmp_path):
    message = "`.*/a` is in use: by process 4321 on `node7`, since 2026-01-02 03:04:05\\+00:00"
    with pytest.raises(BlockingIOError, match=message):
        fitted(ensemble, tmp_path / "a")
    assert names(tmp_path / "a") == [LOCK]
    holder.kill()
    holder.wait()
    assert (tmp_path / "a" / LOCK).read_text()  # what a killed run leaves does not matter
    fitted(ensemble, tmp_path / "a")
    assert names(tmp_path / "a") == [f"step-{step:012d}" for step in (2, 4, 6)]


def test_two_runs_in_one_process(ensemble, tmp_path):
    met = []

    def batches():
        yield DATA
        with pytest.raises(BlockingIOError) as caught:
            fitted(ensemble, tmp_path / "link")
        met.append(str(caught.value))
        fitted(ensemble, tmp_path / "b")
        yield from [DATA] * 9

    (tmp_path / "link").symlink_to(tmp_path / "a")  # another name for the same folder
    (tmp_path / "a").mkdir()
    fitted(ensemble, tmp_path / "a", data=batches(), checkpoint_every=1)
    assert len(met) == 1
    assert re.search(rf"by process {os.getpid()} on `{re.escape(socket.gethostname())}`, since 20[0-9-]+ ", met[0])
    assert LOCK not in names(tmp_path / "a")


@pytest.mark.parametrize("wrong", [ValueError, KeyboardInterrupt])
def test_a_run_that_ends_with_an_error_frees_the_folder(ensemble, tmp_path, wrong):
    def batches():
        yield DATA
        raise wrong("broken")

    with pytest.raises(wrong, match="broken") as caught:
        fitted(ensemble, tmp_path / "a", data=batches())
    assert caught.traceback  # whose frames live on, as in a notebook
    fitted(ensemble, tmp_path / "a", data=iter([DATA] * 9))


def test_a_folder_that_is_taken_over_is_noticed_at_the_next_save(ensemble, tmp_path, monkeypatch):
    """As on network disks without locks between machines: one run ends, and neither mixes its checkpoints in."""
    report = Recording.report

    def other(self, steps, members):
        report(self, steps, members)
        if self.record.steps >= 3:
            said = {"host": "node8", "pid": 99, "since": "now", "token": "theirs"}
            (tmp_path / "a" / LOCK).write_text(json.dumps(said))

    monkeypatch.setattr(Recording, "report", other)
    with pytest.raises(NotSavedError, match="taken over by another run: process 99 on `node8`, since now") as caught:
        fitted(ensemble, tmp_path / "a")
    assert caught.value.run.history.loss.shape[1] < 6
    assert Checkpoints(tmp_path / "a").steps == [2]
    assert json.loads((tmp_path / "a" / LOCK).read_text())["token"] == "theirs"


def test_without_locks_a_run_continues(ensemble, tmp_path, monkeypatch):
    monkeypatch.setattr(_disk, "fcntl", None)
    fitted(ensemble, tmp_path / "a")
    assert len(names(tmp_path / "a")) == 3


def test_a_lock_file_that_is_removed_is_made_again(ensemble, tmp_path, monkeypatch):
    report, seen = Recording.report, []

    def removed(self, steps, members):
        report(self, steps, members)
        seen.append((tmp_path / "a" / LOCK).exists())
        (tmp_path / "a" / LOCK).unlink()

    monkeypatch.setattr(Recording, "report", removed)
    fitted(ensemble, tmp_path / "a")
    assert len(seen) > 1
    assert all(seen)


def test_somebody_saves_between_reading_and_locking(ensemble, tmp_path, monkeypatch):
    fitted(ensemble, tmp_path / "a", steps=2)
    acquire = RunLock.acquire

    def later(self):
        monkeypatch.setattr(RunLock, "acquire", acquire)
        fitted(ensemble, tmp_path / "a", steps=4)
        acquire(self)

    monkeypatch.setattr(RunLock, "acquire", later)
    with pytest.raises(BlockingIOError, match="has saved step 4 in the checkpoint folder .* since this one read it"):
        fitted(ensemble, tmp_path / "a")
    assert LOCK not in names(tmp_path / "a")
    fitted(ensemble, tmp_path / "a")


def test_a_finished_run_comes_back_from_where_nothing_can_be_written(ensemble, tmp_path, monkeypatch):
    whole = fitted(ensemble, tmp_path / "a")

    def read_only(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(_disk, "open_or_create", read_only)
    again = fitted(ensemble, tmp_path / "a")
    np.testing.assert_array_equal(again.history.loss, whole.history.loss)
    monkeypatch.setattr(Recording, "report", None)  # no step is made
    with pytest.raises(OSError, match="cannot save in the checkpoint folder .*: Read-only file system.\nNothing is"):
        fitted(ensemble, tmp_path / "a", steps=8)


def unwritable(folder):
    """Folders of which a run finds out before anything is compiled that it cannot save there."""
    (folder / "file").write_text("")
    yield folder / "file" / "run", NotADirectoryError
    yield pathlib.Path("/proc/self/run"), FileNotFoundError
    (folder / "plain").mkdir()
    (folder / "plain").chmod(0o500)
    if os.geteuid() != 0:
        yield folder / "plain", PermissionError
        yield folder / "plain" / "run", PermissionError


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_compiled(ensemble, tmp_path):
    def untouched(model, batch, key):
        raise AssertionError("the loss was traced")

    for folder, kind in unwritable(tmp_path):
        with pytest.raises(kind, match="`fit` cannot save in the checkpoint folder .*\n?.*Nothing is trained yet"):
            ee.fit(ensemble, untouched, SGD, DATA, steps=2, checkpoint=folder, key=KEY)
    with pytest.raises(FileNotFoundError, match="must resume"):
        fitted(ensemble, tmp_path / "b", resume="must")
    assert not (tmp_path / "b").exists()


FORKS = """
import os, pathlib, signal, sys, time
import numpy as np
import eqx_ensemble as ee
from eqx_ensemble.checkpoint import Checkpoints, _disk, _write
from eqx_ensemble.checkpoint._call_folder import RunLock

folder = pathlib.Path(sys.argv[1])
ee.save(folder / "run" / "step-000000000001", {"a": np.ones(3)})
lock = RunLock(folder)
lock.acquire()
before = _write.write_manifest

def slow(*args, **named):
    before(*args, **named)
    os.write(writing, b".")
    time.sleep(1)

reading, writing = os.pipe()
_write.write_manifest = slow
checkpoints = Checkpoints(folder / "run", asynchronous=True)
checkpoints.save(1, {"a": np.zeros(3)})
os.read(reading, 1)  # the thread is overwriting, and has the lock
child = os.fork()
if child == 0:
    checkpoints.wait()  # the save is the parent's
    lock.release()
    _write.write_manifest = before
    with Checkpoints(folder / "child", asynchronous=True) as own:  # the child has a thread of its own
        own.save(1, {"a": np.ones(1)})
    print("child", lock.is_held, flush=True)
    time.sleep(600)
checkpoints.wait()
print("parent", lock.is_held, child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_forked_child_neither_waits_nor_holds_locks(tmp_path):
    """A child that lives longer than its parent, as a loader's worker may, does not block the folder."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    limit = threading.Timer(120, parent.kill)  # or it would wait for ever where its thread fails
    limit.start()
    child = None
    try:
        said = {}
        while len(said) < 2:
            name, *rest = parent.stdout.readline().split()
            said[name] = rest
        child = int(said["parent"][1])
        assert said["parent"][0] == "True"
        assert said["child"] == ["False"]
        parent.wait(60)
        os.kill(child, 0)  # it lives
        assert (tmp_path / LOCK).exists()
        started = time.monotonic()
        lock = RunLock(tmp_path)
        lock.acquire()
        lock.release()
        with _disk.hold_lock(tmp_path / "run" / "step-000000000001", wait=False) as free:
            assert free
        assert time.monotonic() - started < 0.4
    finally:
        limit.cancel()
        parent.kill()
        parent.stdout.close()
        parent.stderr.close()
        if child:
            os.kill(child, 9)
    assert Checkpoints(tmp_path / "run").restore({"a": np.ones(3)}).tree["a"].tolist() == [0] * 3


def test_a_folder_that_save_wrote_is_no_folder_of_runs(tmp_path, unhooked):
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 2, key=KEY)
    ee.save(tmp_path / "a", ensemble)
    with pytest.raises(FileExistsError, match="is a single checkpoint written by `save`"):
        ee.fit(ensemble, loss, SGD, DATA, steps=2, checkpoint=tmp_path / "a", key=KEY)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["arrays-0001.safetensors", "checkpoint.json"]
