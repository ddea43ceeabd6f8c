"""The format of Orbax: damage is found, and a checkpoint is complete or absent."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import Checkpoints, _disk, _orbax
from eqx_ensemble.checkpoint import _formats as _open
from eqx_ensemble.checkpoint._formats import FORMATS
from eqx_ensemble.checkpoint._manifest import encode
from eqx_ensemble.checkpoint._read import read_manifest
from eqx_ensemble.checkpoint._snapshot import snapshot

from . import faults
from .orbax_tools import mesh, replaced, save, spread, tree, version_at
from .test_roundtrip import assert_same

ocp = pytest.importorskip("orbax.checkpoint.experimental.v1", reason="needs orbax-checkpoint (extra `orbax`)")

# Coroutines that Orbax leaves behind when it fails, which only the garbage collector sees.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

HERE = pathlib.Path(__file__).parent


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """What power cuts do is tested elsewhere."""
    monkeypatch.setattr(_disk, "sync", lambda file: None)
    monkeypatch.setattr(_disk, "sync_folder", lambda path: None)


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)


def flipped(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def test_no_flipped_bit_is_silent(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 20_000)).astype(np.float32)
    made = {"e": ee.Each(values), "s": np.arange(5.0), "n": 3}
    save(tmp_path / "x", made)
    data = {".value": values, "s": made["s"]}
    ocp.save(tmp_path / "control", data)
    silent = {"x": 0, "control": 0}
    noticed = []
    for name, flips in (("x", 60), ("control", 20)):
        files, rng = files_of(tmp_path / name), np.random.default_rng(1)
        sizes = np.array([file.stat().st_size for file in files])
        for _ in range(flips):
            file = files[rng.choice(len(files), p=sizes / sizes.sum())]
            before = file.read_bytes()
            file.write_bytes(flipped(file, rng.integers(8 * len(before))))
            try:
                if name == "x":
                    assert_same(ee.load(tmp_path / "x", made), made)
                else:
                    got = ocp.load(tmp_path / name, dict.fromkeys(data, np.ndarray))
                    silent[name] += not all(np.array_equal(got[key], data[key]) for key in data)
            except ee.CheckpointCorruptError as error:
                noticed.append(error)
            except AssertionError:
                silent["x"] += 1
            except Exception:
                assert name == "control"
            finally:
                file.write_bytes(before)
    assert silent["x"] == 0
    assert silent["control"] > 5
    assert len(noticed) > 30
    named = [error for error in noticed if error.leaf == "['e'].value" and error.member in range(4)]
    assert len(named) > 10
    assert all(str(tmp_path / "x") in error.file for error in noticed)


def test_every_bit_of_the_manifest(tmp_path):
    save(tmp_path / "x", tree(1))
    file = tmp_path / "x" / "checkpoint.json"
    before = file.read_bytes()
    for bit in range(0, 8 * len(before), 31):
        file.write_bytes(flipped(file, bit))
        with pytest.raises(ee.CheckpointCorruptError, match=r"checkpoint\.json"):
            ee.checkpoint.contents(tmp_path / "x")
        file.write_bytes(before)


DAMAGE = {
    "another number": (lambda x: x + 1, r"at `\['e'\].value`, member 0: the checksum does not match"),
    "another member": (lambda x: x * np.array([[1], [1], [2]], x.dtype), "member 2: the checksum does not match"),
    "another shape": (lambda x: x[:, :1], r"at `\['e'\].value`: it has i16\[3,1\]"),
    "another dtype": (lambda x: x.astype(np.int32), r"at `\['e'\].value`: it has i32\[3,2\]"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_other_numbers(name, tmp_path):
    change, message = DAMAGE[name]
    made = {"e": ee.Each(np.arange(6, dtype=np.int16).reshape(3, 2)), "s": np.array([1.5])}
    save(tmp_path / "x", made)
    replaced(tmp_path / "x", {})
    assert_same(ee.load(tmp_path / "x", made), made)
    replaced(tmp_path / "x", {"['e'].value": change(made["e"].value)})
    for read in (lambda: ee.load(tmp_path / "x", made), lambda: ee.checkpoint.verify(tmp_path / "x")):
        with pytest.raises(ee.CheckpointCorruptError, match=message):
            read()
    assert ee.checkpoint.contents(tmp_path / "x").leaves == {"['e'].value": "i16[3,2]", "['s']": "f64[1]"}


def test_other_checksums(tmp_path):
    made = {"e": ee.Each(np.arange(6).reshape(3, 2))}
    save(tmp_path / "x", made)
    replaced(tmp_path / "x", {"<checksums>": np.zeros((3, 32), np.uint8)})
    with pytest.raises(ee.CheckpointCorruptError, match="its checksums have changed"):
        ee.load(tmp_path / "x", made)


def test_a_damaged_array_on_several_devices(tmp_path):
    made = ee.Each(spread(jnp.arange(32.0).reshape(8, 4), mesh(4)))
    save(tmp_path / "x", made)
    wrong = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    wrong[5, 1] = 0
    replaced(tmp_path / "x", {".value": wrong})
    columns = jax.device_put(made.value, NamedSharding(mesh(2, 2), PartitionSpec("data", "members")))
    for like in (made, ee.Each(columns)):
        with pytest.raises(ee.CheckpointCorruptError) as error:
            ee.load(tmp_path / "x", like)
        assert (error.value.leaf, error.value.member) == (".value", 5)


def test_parts_that_are_missing(tmp_path):
    save(tmp_path / "x", tree(1))
    noticed = []
    for file in files_of(tmp_path / "x" / "orbax-0001"):
        before = file.read_bytes()
        for change in (file.unlink, lambda file=file: file.write_bytes(b"")):
            change()
            found = None
            try:
                found = version_at(tmp_path / "x")
            except ee.CheckpointCorruptError as error:
                noticed.append(error.file)
            assert found in (None, 1)
            file.write_bytes(before)
    assert len(noticed) >= 4
    assert {pathlib.Path(file).name for file in noticed} == {"orbax-0001"}
    shutil.rmtree(tmp_path / "x" / "orbax-0001")
    with pytest.raises(ee.CheckpointCorruptError, match=r"orbax-0001`, at `\['x'\]`: the file is missing"):
        ee.load(tmp_path / "x", tree(0))


def test_names_that_lead_elsewhere(tmp_path):
    save(tmp_path / "x", tree(1))
    manifest = read_manifest(tmp_path / "x")
    for name in ("orbax-../x", "orbax-1/../../y", "orbax-", "orbax-1x", "orbax-٣"):
        (tmp_path / "x" / "checkpoint.json").write_bytes(encode(manifest._replace(file=name)))
        with pytest.raises(ee.CheckpointCorruptError, match="`file` is not the name of a file of arrays"):
            ee.load(tmp_path / "x", tree(0))


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("old", [None, 1], ids=["new", "overwrite"])
def test_killed_at_every_boundary(old, how, tmp_path, monkeypatch):
    path = tmp_path / "run" / "x"
    # How many files there are to sync depends on Orbax.
    operations = tuple(name for name in faults.OPERATIONS if name != "sync_folder")
    monkeypatch.setattr(faults, "OPERATIONS", operations)

    def stopped(stop):
        shutil.rmtree(path.parent, ignore_errors=True)
        if old is not None:
            save(path, tree(old))
        with faults.Layer(stop=stop, how=how) as layer:
            try:
                save(path, tree(2))
            except faults.Killed:
                return True
        assert layer.count == stop
        return False

    seen = []
    while stopped(len(seen)):
        seen.append(version_at(path) if path.exists() else None)
        save(path, tree(3))
        assert version_at(path) == 3
        assert [entry.name for entry in path.parent.iterdir()] == ["x"]
        assert len(list(path.iterdir())) == 2
    assert len(seen) >= 5
    new = seen.count(2)
    assert seen == [old] * (len(seen) - new) + [2] * new
    assert new > 0 or (old is None and how == "before")


@pytest.mark.parametrize("old", [None, 1], ids=["new", "overwrite"])
def test_killed_before_orbax_is_done(old, tmp_path, monkeypatch):
    path = tmp_path / "x"
    if old is not None:
        save(path, tree(old))
    _orbax.begin(path, snapshot(tree(2), take=FORMATS["orbax"].take))  # and never the rest
    time.sleep(1)
    assert version_at(path) == old
    save(path, tree(3))
    assert version_at(path) == 3
    assert len(list(path.iterdir())) == 2


SAVES = """
import pathlib, sys, numpy as np, eqx_ensemble as ee
version, path = int(sys.argv[2]), pathlib.Path(sys.argv[1])
checkpoints = ee.checkpoint.Checkpoints(path / "run", last=2, format="orbax", asynchronous=True)
while True:
    version += 1
    tree = {"x": np.full(200_000, version), "step": version}
    ee.save(path / "x", tree, format="orbax")
    checkpoints.save(version, tree)
    checkpoints.wait()
    print(version, flush=True)
"""


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    moments, version = np.random.default_rng(0), 0
    like = {"x": np.zeros(200_000, int), "step": 0}
    for _ in range(12):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVES, str(tmp_path), str(version)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=HERE.parent.parent,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        version = int(child.stdout.readline())
        time.sleep(moments.uniform(0, 1))
        child.kill()
        version = max([version, *map(int, child.stdout.read().split())])
        child.wait()
        one = ee.load(tmp_path / "x", like)
        run = Checkpoints(tmp_path / "run", format="orbax").restore(like)
        assert one["x"].tolist() == [one["step"]] * 200_000
        assert run.tree["step"] == run.step
        assert one["step"] >= version
        assert run.step >= version
        version = max(one["step"], run.step)


def test_no_space(tmp_path):
    """The largest file that the process may write is too small for the second one."""
    code = f"""
        import resource, numpy as np, eqx_ensemble as ee
        ee.save({str(tmp_path / "x")!r}, {{"x": np.ones(10)}}, format="orbax")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        for name in ("x", "y"):
            try:
                ee.save({str(tmp_path)!r} + "/" + name, {{"x": np.random.normal(size=100_000)}}, format="orbax")
            except OSError as error:
                print(error.errno, error)
    """
    done = subprocess.run(
        [sys.executable, "-c", re.sub(r"^ {8}", "", code, flags=re.MULTILINE)],
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout.count("27 [Errno 27] Could not write the checkpoint") == 2, done.stdout + done.stderr
    assert done.stdout.count("bytes are free in") == 2
    assert_same(ee.load(tmp_path / "x", {"x": np.zeros(10)}), {"x": np.ones(10)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    assert len(list((tmp_path / "x").iterdir())) == 2


def test_one_format_in_the_place_of_the_other(tmp_path):
    for version, how in enumerate(["orbax", "safetensors", "orbax", "orbax", "safetensors"]):
        ee.save(tmp_path / "x", tree(version), format=how)
        assert version_at(tmp_path / "x") == version
        assert ee.checkpoint.contents(tmp_path / "x").format == how
        assert len(list((tmp_path / "x").iterdir())) == 2


def test_overwritten_while_it_is_opened(tmp_path, monkeypatch):
    save(tmp_path / "x", tree(1))
    read, saves = _open.read_manifest, iter([2])

    def slower(path):
        manifest = read(path)
        for version in saves:
            save(tmp_path / "x", tree(version))
        return manifest

    monkeypatch.setattr(_open, "read_manifest", slower)
    assert version_at(tmp_path / "x") == 2


def test_what_is_not_ours_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not a checkpoint, so nothing is overwritten"):
        save(tmp_path / "mine", tree(1))
    save(tmp_path / "x", tree(1))
    (tmp_path / "x" / "orbax-mine").mkdir()
    save(tmp_path / "x", tree(2))
    assert sorted(entry.name for entry in (tmp_path / "x").iterdir()) == ["checkpoint.json", "orbax-0002", "orbax-mine"]


def test_folders_on_the_way_and_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("a/b", tree(1))
    assert version_at("a/b") == 1
    shutil.move("a", "c")
    assert version_at(tmp_path / "c" / "b") == 1
