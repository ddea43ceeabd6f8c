"""The format of Orbax: the checkpoints of a run, several processes, object stores, and messages."""

import io
import pathlib
import re
import sys
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import Checkpoints, _disk, _orbax
from eqx_ensemble.checkpoint import _disk as _path

from ..children import finish_together
from ..factories import mlp
from ..test_files import assert_same as assert_same_model
from ..test_files import built
from .orbax_tools import mesh, replaced, save, spread, tree, version_at
from .test_checkpoints import KEEPS, SCORES

ocp = pytest.importorskip("orbax.checkpoint.experimental.v1", reason="needs orbax-checkpoint (extra `orbax`)")

# Coroutines that Orbax leaves behind when it fails, which only the garbage collector sees.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

KEY = jax.random.key(5)
HERE = pathlib.Path(__file__).parent


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """What power cuts do is tested elsewhere."""
    monkeypatch.setattr(_disk, "sync", lambda file: None)
    monkeypatch.setattr(_disk, "sync_folder", lambda path: None)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "a"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
@pytest.mark.parametrize("name", KEEPS)
def test_retention(name, asynchronous, folder):
    options, kept = KEEPS[name]
    with Checkpoints(folder, format="orbax", asynchronous=asynchronous, **options) as checkpoints:
        assert checkpoints.steps == []
        for step, score in SCORES.items():
            checkpoints.save(step, tree(step), score=score, meta=[step])
    assert checkpoints.steps == kept
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:012d}" for step in kept]
    restored = Checkpoints(folder, format="orbax").restore(tree(0))
    assert (restored.step, restored.meta, restored.tree["step"]) == (kept[-1], [kept[-1]], kept[-1])
    assert ee.load(checkpoints.path(kept[0]), tree(0))["step"] == kept[0]


def test_no_step_is_skipped(folder):
    """Saving faster than Orbax writes: each save waits for the one before it, and none is left out."""
    big = lambda step: {"x": np.random.default_rng(step).normal(size=500_000)}
    with Checkpoints(folder, last=9, format="orbax", asynchronous=True) as checkpoints:
        for step in range(6):
            checkpoints.save(step, big(step))
    assert checkpoints.steps == list(range(6))
    np.testing.assert_array_equal(checkpoints.restore(big(9), step=2).tree["x"], big(2)["x"])


def test_asynchronous_saves_are_copies(folder):
    checkpoints = Checkpoints(folder, format="orbax", asynchronous=True)
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = spread(jnp.arange(1_000_000.0), mesh(4))
    mine, key = np.zeros(100_000), jax.random.split(KEY, 3)
    checkpoints.save(1, {"x": x, "mine": mine, "key": key})
    mine += 1
    for _ in range(10):
        x = donate(x)
    checkpoints.wait()
    got = checkpoints.restore(
        {"x": np.zeros(1_000_000, np.float32), "mine": mine, "key": jax.random.split(KEY, 3)}
    ).tree
    np.testing.assert_array_equal(got["x"], np.arange(1_000_000, dtype=np.float32))
    np.testing.assert_array_equal(got["mine"], np.zeros(100_000))
    np.testing.assert_array_equal(jax.random.key_data(got["key"]), jax.random.key_data(key))


def test_steps_that_were_never_finished(folder):
    checkpoints = Checkpoints(folder, format="orbax")
    checkpoints.save(1, tree(1))
    unfinished = folder / "step-000000000002" / "orbax-0001.orbax-checkpoint-tmp"
    unfinished.mkdir(parents=True)
    (folder / "step-000000000003").mkdir()
    (folder / "step-000000000003" / "note.txt").write_text("mine")
    assert checkpoints.steps == [1]
    assert checkpoints.restore(tree(0)).step == 1
    with pytest.raises(FileNotFoundError, match="found no finished checkpoint at .*"):
        ee.load(folder / "step-000000000002", tree(0))
    checkpoints.save(4, tree(4))
    assert sorted(entry.name[-1] for entry in folder.iterdir()) == ["1", "3", "4"]


def test_a_step_is_replaced(folder):
    checkpoints = Checkpoints(folder, format="orbax")
    checkpoints.save(1, tree(1))
    checkpoints.save(1, tree(7))
    assert checkpoints.restore(tree(0)).tree["step"] == 7
    assert len(list(checkpoints.path(1).iterdir())) == 2


def test_back_to_the_newest_that_is_not_damaged(folder):
    checkpoints = Checkpoints(folder, last=9, format="orbax")
    for step in (1, 2, 3):
        checkpoints.save(step, tree(step))
    replaced(checkpoints.path(3), {"['x']": np.full(4, 9)})
    (checkpoints.path(2) / "orbax-0001" / "state" / "_METADATA").write_text("{")
    with pytest.warns(UserWarning, match="went back to step 1") as caught:
        assert checkpoints.restore(tree(0)).step == 1
    assert "step 3: A checkpoint is damaged" in str(caught[0].message)
    assert "step 2: A checkpoint is damaged" in str(caught[0].message)
    assert "Orbax cannot read it" in str(caught[0].message)
    with pytest.raises(ee.CheckpointCorruptError):
        checkpoints.restore(tree(0), step=2)
    with pytest.raises(ee.MemberMismatchError, match=r"saved i64\[4\], expected i64\[5\]"):
        checkpoints.restore({"x": np.zeros(5, int), "step": 0}, step=1)


@pytest.mark.parametrize("ask", ["wait", "save"])
def test_a_failed_save_is_raised_at_the_next(ask, folder, monkeypatch):
    checkpoints = Checkpoints(folder, format="orbax", asynchronous=True)
    with monkeypatch.context() as patch:
        patch.setattr(_orbax, "_commit", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        checkpoints.save(1, tree(1))
        with pytest.raises(OSError, match="No space left on device.*bytes are free"):
            checkpoints.wait() if ask == "wait" else checkpoints.save(2, tree(2))
    checkpoints.wait()
    assert list(folder.iterdir()) == []
    checkpoints.save(2, tree(2))
    checkpoints.wait()
    assert checkpoints.steps == [2]


def test_restored_onto_a_mesh(folder):
    made = built("mlp")
    checkpoints = Checkpoints(folder, format="orbax")
    flags = jax.tree.map(eqx.is_array, made)
    checkpoints.save(5, spread(made, mesh(3)), per_member=flags, ids=made.ids)
    like = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh(2), PartitionSpec())), eqx.filter(made, flags))
    got = checkpoints.restore(eqx.combine(like, made)).tree
    assert_same_model(got, made)
    assert got.stacked.layers[0].weight.sharding.num_devices == 2
    assert_same_model(ee.load(checkpoints.path(5), mlp, members=[2]), made[[2]])


def test_other_threads_do_not_matter(folder):
    """The job that waits for Orbax runs in a thread, where the context of the caller is not."""
    threads, wait = [], _orbax._commit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_orbax, "_commit", lambda *args: (threads.append(threading.current_thread()), wait(*args)))
        with Checkpoints(folder, format="orbax", asynchronous=True) as checkpoints:
            checkpoints.save(1, tree(1))
    assert threads != [threading.current_thread()]
    assert checkpoints.steps == [1]


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Each prints what it found; `processes.py` describes it."""
    finish_together(HERE / "processes.py", tmp_path)


class Bucket:
    """A path in an object store that is a dict: there are objects, and no folders without them."""

    objects: dict[str, bytes]

    def __init__(self, text):
        self.text = text.rstrip("/")
        self.name = self.text.rpartition("/")[2]

    def __str__(self):
        return self.text

    def __fspath__(self):
        return self.text

    def __truediv__(self, name):
        return type(self)(f"{self.text}/{name}")

    def inside(self):
        return [key for key in self.objects if key.startswith(f"{self.text}/")]

    def exists(self):
        return self.text in self.objects or self.is_dir()

    def is_dir(self):
        return bool(self.inside())

    def iterdir(self):
        names = {key[len(self.text) + 1 :].partition("/")[0] for key in self.inside()}
        if not names:
            raise FileNotFoundError(self.text)
        return iter([self / name for name in sorted(names)])

    def write_bytes(self, data):
        self.objects[self.text] = data

    def open(self, mode):
        if self.text not in self.objects:
            raise FileNotFoundError(self.text)
        return io.BytesIO(self.objects[self.text])

    def unlink(self):
        if self.objects.pop(self.text, None) is None:
            raise FileNotFoundError(self.text)

    def rmtree(self):
        for key in self.inside():
            del self.objects[key]


class Pretended:
    """In the place of Orbax: keeps arrays in the same dict, and all paths that it is given."""

    Context = ocp.Context

    def __init__(self, bucket):
        self.bucket, self.paths, self.arrays = bucket, [], {}

    def save_async(self, path, arrays):
        self.paths.append(path)
        self.arrays[path] = {name: np.array(value) for name, value in arrays.items()}
        self.bucket.objects[f"{path}/state/manifest.ocdbt"] = b""
        return self

    def result(self):
        pass

    def load(self, path, like):
        self.paths.append(path)
        return self.arrays[path]


@pytest.fixture
def store(monkeypatch):
    from etils import epath

    bucket = type("Bucket", (Bucket,), {"objects": {}})
    pretended = Pretended(bucket)
    monkeypatch.setattr(epath, "Path", bucket)
    monkeypatch.setattr(_orbax, "_orbax", lambda: pretended)
    return pretended


def test_models_from_an_object_store(store):
    model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    save("gs://bucket/0", model)
    assert_same_model(ee.load("gs://bucket/0", model), model)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_object_stores(scheme, store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = f"{scheme}://bucket/run"
    save(path, tree(1))
    save(path, tree(2), meta=[2])
    assert version_at(path) == 2
    assert store.paths == [f"{path}/orbax-0001", f"{path}/orbax-0002", f"{path}/orbax-0002"]
    assert ee.checkpoint.verify(path).meta == [2]
    assert set(store.bucket.objects) == {f"{path}/checkpoint.json", f"{path}/orbax-0002/state/manifest.ocdbt"}
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_in_an_object_store(store, unhooked):
    with Checkpoints("gs://bucket/run", last=2, format="orbax", asynchronous=True) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, tree(step))
    assert checkpoints.steps == [2, 3]
    assert str(checkpoints.path(3)) == "gs://bucket/run/step-000000000003"
    assert not any("step-000000000001" in key for key in store.bucket.objects)
    store.bucket.objects["gs://bucket/run/step-000000000009/orbax-0001/state/d/0"] = b"never finished"
    assert checkpoints.restore(tree(0)).step == 3
    checkpoints.save(4, tree(4))
    checkpoints.wait()
    assert checkpoints.steps == [3, 4]
    assert not any("step-000000000009" in key for key in store.bucket.objects)
    assert ee.load(checkpoints.path(4), tree(0))["step"] == 4


def test_real_paths_of_object_stores():
    path = _path.absolute(_path.as_path("gs://bucket/run"))
    assert str(path / "orbax-0001") == "gs://bucket/run/orbax-0001"
    assert not isinstance(path, pathlib.Path)


BAD = {
    "another format": (
        lambda path: ee.save(path, 1, format="zarr"),
        ValueError,
        "one of 'safetensors', 'orbax', got 'zarr'",
    ),
    "a run in another format": (
        lambda path: Checkpoints(path, format="x"),
        ValueError,
        "`checkpoint.Checkpoints` needs `format` to be",
    ),
    "safetensors in a bucket": (
        lambda path: ee.save("gs://bucket/x", 1),
        ValueError,
        "writes safetensors to disks only, and `gs://bucket/x` is in an object store.\nPass `format='orbax'`",
    ),
    "a run in a bucket": (
        lambda path: Checkpoints("s3://b/x"),
        ValueError,
        "`checkpoint.Checkpoints` writes safetensors to disks",
    ),
    "an unknown store": (
        lambda path: ee.load("memory://x", 1),
        ValueError,
        "`memory://x` is in an object store that is not supported.\nThe path starts with `gs://` or `s3://`",
    ),
    "nothing there": (lambda path: ee.load(path, 1), FileNotFoundError, "`load` found no checkpoint at"),
    "a cast to anything": (
        lambda path: ee.load(_saved(path), 1, cast="all"),
        ValueError,
        "needs `cast` to be one of None, 'like'",
    ),
    "members of none": (lambda path: ee.load(_saved(path), 1, members=[0]), ValueError, "it was saved without members"),
}


def _saved(path):
    save(path, 1)
    return path


@pytest.mark.parametrize("name", BAD)
def test_message(unhooked, name, tmp_path):
    call, kind, text = BAD[name]
    with pytest.raises(kind, match=text):
        call(tmp_path / "x")


def test_without_orbax(tmp_path, monkeypatch):
    save(tmp_path / "x", tree(1))
    monkeypatch.setitem(sys.modules, "orbax.checkpoint.experimental", None)
    monkeypatch.setitem(sys.modules, "etils", None)
    assert ee.checkpoint.contents(tmp_path / "x").format == "orbax"
    calls = {
        'format="orbax"': [lambda: save(tmp_path / "y", tree(1)), lambda: ee.load(tmp_path / "x", tree(1))],
        "gs://bucket/x": [lambda: ee.load("gs://bucket/x", tree(1)), lambda: save("gs://bucket/x", tree(1))],
    }
    for what, these in calls.items():
        for call in these:
            with pytest.raises(ImportError, match=re.escape(f"`{what}` needs orbax-checkpoint.\nInstall it")):
                call()
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
