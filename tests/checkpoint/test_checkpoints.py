"""The checkpoints of a run: their order, retention, fallback, and saving in another thread."""

import gc
import os
import re
import subprocess
import sys
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import Checkpoints, _checkpoints, _disk, _formats


def tree(value):
    return {"x": np.full(4, value), "step": value}


def damage(checkpoints, step):
    (file,) = checkpoints.path(step).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[data.index(np.full(4, step).tobytes())] ^= 1
    file.write_bytes(data)
    return file


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "a"


def test_save_and_restore(folder):
    checkpoints = Checkpoints(folder)
    assert checkpoints.steps == []
    checkpoints.save(3, tree(3), score=jnp.float32(0.5), meta={"a": [1]})
    restored = Checkpoints(folder).restore(tree(0))
    assert (restored.step, restored.score, restored.meta) == (3, 0.5, {"a": [1]})
    np.testing.assert_array_equal(restored.tree["x"], np.full(4, 3))
    assert restored.tree["step"] == 3


def test_the_order_is_that_of_the_steps(folder):
    checkpoints = Checkpoints(folder, last=9)
    for step in (10, 9, 100, 2):
        checkpoints.save(step, tree(step))
    os.utime(checkpoints.path(2), (2e9, 2e9))
    assert checkpoints.steps == [2, 9, 10, 100]
    assert checkpoints.restore(tree(0)).step == 100
    assert checkpoints.restore(tree(0), step=9).step == 9


SCORES = {10: 5.0, 20: 1.0, 30: float("nan"), 40: 2.0, 50: 1.0, 60: None, 70: 9.0}
KEEPS = {
    "last": ({"last": 2}, [60, 70]),
    "best": ({"last": 1, "best": 2}, [20, 50, 70]),
    "one best, the later of equals": ({"last": 1, "best": 1}, [50, 70]),
    "keep_period": ({"last": 1, "keep_period": 20}, [20, 40, 60, 70]),
    "all of these": ({"last": 2, "best": 3, "keep_period": 30}, [20, 30, 40, 50, 60, 70]),
}


@pytest.mark.parametrize("again", [False, True], ids=["one process", "a process each"])
@pytest.mark.parametrize("name", KEEPS)
def test_retention(name, again, folder):
    options, kept = KEEPS[name]
    checkpoints = Checkpoints(folder, **options)
    for step, score in SCORES.items():
        checkpoints = Checkpoints(folder, **options) if again else checkpoints
        checkpoints.save(step, tree(step), score=score)
    assert checkpoints.steps == kept
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:012d}" for step in kept]


def test_the_one_just_saved_is_never_removed(folder):
    checkpoints = Checkpoints(folder, last=1)
    checkpoints.save(20, tree(20))
    checkpoints.save(10, tree(10))
    assert checkpoints.steps == [10, 20]


def test_other_things_in_the_folder_are_left_alone(folder):
    folder.mkdir(parents=True)
    for name in ("step-1", "step-00000000000a", "notes", "step-000000000007.txt", ".step-000000000009.saving-mine"):
        (folder / name).mkdir()
    (folder / "step-000000000005").write_text("a file")
    checkpoints = Checkpoints(folder, last=1)
    checkpoints.save(1, tree(1))
    checkpoints.save(2, tree(2))
    assert checkpoints.steps == [2]
    assert len(list(folder.iterdir())) == 7


def test_what_killed_processes_left_is_removed(folder):
    checkpoints = Checkpoints(folder)
    for name in (".step-000000000001.saving-0123abcd", ".step-000000000002.removing-0123abcd"):
        (folder / name).mkdir(parents=True)
    checkpoints.save(7, tree(7))
    assert [path.name for path in folder.iterdir()] == ["step-000000000007"]


def test_back_to_the_newest_that_is_not_damaged(folder):
    checkpoints = Checkpoints(folder, last=9)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, tree(step))
    file = damage(checkpoints, 4)
    (checkpoints.path(3) / "checkpoint.json").unlink()
    with pytest.warns(UserWarning, match="went back to step 2") as caught:
        restored = checkpoints.restore(tree(0))
    assert (restored.step, restored.tree["x"].tolist()) == (2, [2] * 4)
    assert str(caught[0].message) == (
        "`checkpoint.Checkpoints.restore` went back to step 2, because newer checkpoints are damaged.\n"
        f"  step 4: A checkpoint is damaged: `{file}`, at `['x']`: the checksum does not match.\n"
        f"  step 3: A checkpoint is damaged: `{checkpoints.path(3)}/checkpoint.json`: the file is missing."
    )
    with pytest.raises(ee.CheckpointCorruptError):
        checkpoints.restore(tree(0), step=4)
    for step in (1, 2):
        damage(checkpoints, step)
    with pytest.raises(ee.CheckpointCorruptError, match="All checkpoints in .* are damaged") as error:
        checkpoints.restore(tree(0))
    assert error.value.leaf == "['x']"


def test_a_disk_that_cannot_be_read_is_damage_too(folder, monkeypatch):
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree(1))
    checkpoints.save(2, tree(2))
    opened = _checkpoints.open_checkpoint

    def failing(path):
        if path.name.endswith("2"):
            raise OSError(5, "Input/output error")
        return opened(path)

    monkeypatch.setattr(_checkpoints, "open_checkpoint", failing)
    with pytest.warns(UserWarning, match="Input/output error"):
        assert checkpoints.restore(tree(0)).step == 1


def test_another_model_is_no_damage(folder):
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree(1))
    with pytest.raises(ee.MemberMismatchError, match=r"saved i64\[4\], expected i64\[5\]"):
        checkpoints.restore({"x": np.zeros(5, int), "step": 0})


def test_a_damaged_manifest_counts_for_nothing(folder):
    checkpoints = Checkpoints(folder, last=2)
    for step in (1, 2):
        checkpoints.save(step, tree(step))
    (checkpoints.path(2) / "checkpoint.json").write_text("")
    again = Checkpoints(folder, last=2)
    again.save(3, tree(3))
    assert again.steps == [1, 2, 3]


def test_nothing_to_restore(folder):
    with pytest.raises(FileNotFoundError, match="found no checkpoint in"):
        Checkpoints(folder).restore(tree(0))
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree(1))
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 2 in .*; existing steps: 1"):
        checkpoints.restore(tree(0), step=2)


def test_load_reads_the_checkpoints_of_a_run(folder):
    model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    ensemble = ee.from_stacked(jax.tree.map(lambda x: np.stack([x] * 3), model))
    checkpoints = Checkpoints(folder)
    mask = jax.tree.map(lambda _: True, ensemble)
    checkpoints.save(5, ensemble, per_member=mask, ids=ensemble.ids)
    assert ee.load(checkpoints.path(5), ensemble, members=[2]).ids.tolist() == [2]
    with pytest.raises(ee.MemberMismatchError, match=r"expected \(2, ...\), got \(3, 1, 2\)"):
        checkpoints.save(6, ensemble, per_member=True, ids=[0, 1])


def test_removal_that_fails_is_said_and_not_lost(folder, monkeypatch):
    checkpoints = Checkpoints(folder, last=1)
    checkpoints.save(1, tree(1))

    def failing(path):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(_disk, "remove_empty_folder", failing)
    with pytest.warns(UserWarning, match="Step 2 is saved, but an old checkpoint could not be removed"):
        checkpoints.save(2, tree(2))
    assert checkpoints.steps == [2]
    monkeypatch.undo()
    checkpoints.save(3, tree(3))
    assert [path.name for path in folder.iterdir()] == ["step-000000000003"]


class Gate:
    """Holds the writing thread until it is opened."""

    def __init__(self, monkeypatch):
        self.event, self.threads = threading.Event(), []
        write = _formats.write

        def waiting(path, content):
            self.threads.append(threading.current_thread())
            assert self.event.wait(30)
            write(path, content)

        monkeypatch.setattr(_formats, "write", waiting)


def test_asynchronous_saves_are_copies(folder, monkeypatch):
    gate = Gate(monkeypatch)
    checkpoints = Checkpoints(folder, asynchronous=True)
    donate = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = {"x": jnp.arange(1000.0), "key": jax.random.split(jax.random.key(0), 3)[:, None]}
    expected = np.asarray(jax.random.key_data(state["key"])).copy()
    mine = np.zeros(3)
    checkpoints.save(1, state | {"mine": mine})
    mine += 1
    after = donate({"x": state["x"]})["x"]
    for _ in range(10):  # whatever takes over the donated memory
        after = donate({"x": after})["x"]
    assert checkpoints.steps == []
    gate.event.set()
    checkpoints.wait()
    like = {"x": jnp.zeros(1000), "key": state["key"], "mine": mine}
    got = checkpoints.restore(like).tree
    np.testing.assert_array_equal(got["x"], np.arange(1000.0))
    np.testing.assert_array_equal(jax.random.key_data(got["key"]), expected)
    np.testing.assert_array_equal(got["mine"], np.zeros(3))
    assert threading.current_thread() not in gate.threads


def test_one_save_is_in_flight_at_a_time(folder, monkeypatch):
    gate = Gate(monkeypatch)
    with Checkpoints(folder, asynchronous=True) as checkpoints:
        checkpoints.save(1, tree(1))
        threading.Timer(0.05, gate.event.set).start()
        checkpoints.save(2, tree(2))
        assert 1 in checkpoints.steps
    assert checkpoints.steps == [1, 2]


def failing_once(monkeypatch):
    write = _formats.write

    def failing(path, content):
        monkeypatch.setattr(_formats, "write", write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_formats, "write", failing)


ASK = {
    "wait": lambda checkpoints: checkpoints.wait(),
    "save": lambda checkpoints: checkpoints.save(2, tree(2)),
    "restore": lambda checkpoints: checkpoints.restore(tree(0)),
    "exit": lambda checkpoints: checkpoints.__exit__(None, None, None),
}


@pytest.mark.parametrize("ask", ASK)
def test_a_failed_save_is_raised_at_the_next(ask, folder, monkeypatch):
    checkpoints = Checkpoints(folder, asynchronous=True)
    failing_once(monkeypatch)
    checkpoints.save(1, tree(1))
    with pytest.raises(OSError, match="No space left on device"):
        ASK[ask](checkpoints)
    checkpoints.wait()  # it is raised once
    checkpoints.save(2, tree(2))
    checkpoints.wait()
    assert checkpoints.steps == [2]


def test_a_failed_save_is_printed_at_exit(tmp_path):
    (tmp_path / "file").write_text("")
    code = f"""
        import gc, numpy, eqx_ensemble as ee
        def lost():
            ee.checkpoint.Checkpoints({str(tmp_path / "file" / "run")!r}, asynchronous=True).save(1, numpy.ones(2))
        lost()
        gc.collect()
        with_wait = ee.checkpoint.Checkpoints({str(tmp_path / "good")!r}, asynchronous=True)
        with_wait.save(1, numpy.ones(1000))
    """
    done = subprocess.run(
        [sys.executable, "-c", re.sub(r"^ {8}", "", code, flags=re.MULTILINE)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()},
    )
    assert "Could not write the checkpoint" in done.stderr
    assert "NotADirectoryError" in done.stderr
    assert Checkpoints(tmp_path / "good").steps == [1]


def test_no_thread_without_need(folder):
    before = {*threading.enumerate()}
    Checkpoints(folder).save(1, tree(1))
    assert {*threading.enumerate()} <= before
    checkpoints = Checkpoints(folder, asynchronous=True)
    checkpoints.save(2, tree(2))
    checkpoints.wait()
    del checkpoints
    gc.collect()


BAD = {
    "a step of a float": (lambda c: c.save(1.0, tree(1)), TypeError, "needs an integer `step`, got 1.0"),
    "a step of an array": (lambda c: c.save(np.int32(1), tree(1)), TypeError, r"Write `int\(step\)` for an array"),
    "a negative step": (lambda c: c.save(-1, tree(1)), ValueError, "needs `step` from 0 to"),
    "a step of a bool": (lambda c: c.save(True, tree(1)), TypeError, "needs an integer `step`, got True"),
    "meta of an array": (lambda c: c.save(1, tree(1), meta=[np.ones(2)]), TypeError, r"`meta\[0\]` cannot be written"),
    "meta with a number as key": (lambda c: c.save(1, tree(1), meta={1: 2}), TypeError, "`meta` has the key 1"),
    "ids missing": (lambda c: c.save(1, tree(1), per_member=True), ee.MemberMismatchError, "`ids` has one id for each"),
    "last of zero": (lambda c: Checkpoints("x", last=0), ValueError, "needs `last` of at least 1, got 0"),
    "best of a float": (lambda c: Checkpoints("x", best=1.5), TypeError, "needs an integer `best`, got 1.5"),
    "keep_period of zero": (
        lambda c: Checkpoints("x", keep_period=0),
        ValueError,
        "needs `keep_period` of at least 1, got 0",
    ),
    "cast": (lambda c: c.restore(tree(1), cast="all"), ValueError, "needs `cast` to be one of None, 'like'"),
}


@pytest.mark.parametrize("name", BAD)
def test_message(unhooked, name, folder):
    call, kind, text = BAD[name]
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree(1))
    with pytest.raises(kind, match=text):
        call(checkpoints)
    assert checkpoints.steps == [1]


def test_traced_arrays_are_refused(folder):
    with pytest.raises(TypeError, match=r"the leaf at `\['x'\]` is traced: save outside"):
        jax.jit(lambda x: Checkpoints(folder).save(1, {"x": x}))(jnp.ones(2))


def test_a_save_does_not_look_into_the_checkpoints_that_are_kept(tmp_path, monkeypatch):
    """With 40 kept, it opens and lists as much as with 4, also in the process that continues a run."""
    model, looks = {"a": np.ones(3)}, []
    for function in ("stat", "listdir", "open"):
        before = getattr(os, function)
        counted = lambda *args, before=before, **options: looks.append(1) or before(*args, **options)
        monkeypatch.setattr(os, function, counted)
    counts = []
    checkpoints = Checkpoints(tmp_path, last=1000)
    for step in range(40):
        looks.clear()
        checkpoints.save(step, model, score=1.0)
        counts.append(len(looks))
    assert counts[4] == counts[39]
    checkpoints = Checkpoints(tmp_path, last=1000)
    for step in (40, 41):
        looks.clear()
        checkpoints.save(step, model, score=1.0)
    assert len(looks) == counts[4]
    assert checkpoints.steps == list(range(42))
