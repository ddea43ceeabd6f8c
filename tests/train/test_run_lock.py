"""One run at a time uses a file, and what keeps a run from being saved raises before the first step."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Checkpoint
from eqx_ensemble.train.host._loop import Executor

KEY = jax.random.key(0)
SGD = optax.sgd(0.1)
DATA = np.ones((8, 2), np.float32)
LOCK = ".run.eqx.lock"


def loss(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch) - 1) ** 2)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 2, key=KEY)


def fitted(ensemble, path, *, data=DATA, steps=6, every=2):
    options = {"batch_size": 4} if data is DATA else {}
    checkpoint = Checkpoint(path, every=every)
    return ee.fit(ensemble, loss, SGD, data, steps=steps, checkpoint=checkpoint, progress=False, key=KEY, **options)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


# Another program that has the lock, written with nothing of ours.
HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / LOCK], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.communicate()


def test_another_process_has_the_file_until_it_is_killed(ensemble, holder, tmp_path):
    with pytest.raises(BlockingIOError, match="Another run uses it: '.*/run.eqx'"):
        fitted(ensemble, tmp_path / "run.eqx")
    assert names(tmp_path) == [LOCK]
    holder.kill()
    holder.wait()
    fitted(ensemble, tmp_path / "run.eqx")
    assert names(tmp_path) == ["run.eqx"]


def test_what_a_killed_process_left_is_removed(ensemble, tmp_path):
    for name in (".run.eqx.123.456", "run.eqx.123.456", ".other.eqx.123.456"):
        (tmp_path / name).write_text("half a file")
    fitted(ensemble, tmp_path / "run.eqx")
    assert names(tmp_path) == [".other.eqx.123.456", "run.eqx", "run.eqx.123.456"]


def test_two_runs_in_one_process(ensemble, tmp_path):
    met = []

    def batches():
        yield DATA
        with pytest.raises(BlockingIOError) as caught:
            fitted(ensemble, tmp_path / "link.eqx")
        met.append(str(caught.value))
        fitted(ensemble, tmp_path / "b.eqx")
        yield from [DATA] * 9

    (tmp_path / "link.eqx").symlink_to(tmp_path / "run.eqx")  # another name for the same file
    fitted(ensemble, tmp_path / "run.eqx", data=batches(), every=1)
    assert len(met) == 1


@pytest.mark.parametrize("wrong", [ValueError, KeyboardInterrupt])
def test_a_run_that_ends_with_an_error_frees_the_file(ensemble, tmp_path, wrong):
    def batches():
        yield DATA
        raise wrong("broken")

    with pytest.raises(wrong, match="broken") as caught:
        fitted(ensemble, tmp_path / "run.eqx", data=batches())
    assert caught.traceback  # whose frames live on, as in a notebook
    fitted(ensemble, tmp_path / "run.eqx", data=iter([DATA] * 9))


def unwritable(folder):
    """Files of which a run finds out before its first step that it cannot save there."""
    (folder / "file").write_text("")
    yield folder / "file" / "run.eqx", FileExistsError
    yield "/proc/self/folder/run.eqx", FileNotFoundError
    (folder / "plain").mkdir()
    (folder / "plain").chmod(0o500)
    if os.geteuid() != 0:
        yield folder / "plain" / "run.eqx", PermissionError


def test_a_file_that_cannot_be_made_is_said_before_the_first_step(ensemble, tmp_path, monkeypatch):
    monkeypatch.delattr(Executor, "call")
    for path, kind in unwritable(tmp_path):
        with pytest.raises(kind):
            fitted(ensemble, path)


def test_a_file_of_save_is_no_run(ensemble, tmp_path):
    ee.save(tmp_path / "a.eqx", ensemble)
    before = (tmp_path / "a.eqx").read_bytes()
    with pytest.raises(ValueError, match="which holds no run of `fit`"):
        fitted(ensemble, tmp_path / "a.eqx")
    assert (tmp_path / "a.eqx").read_bytes() == before
