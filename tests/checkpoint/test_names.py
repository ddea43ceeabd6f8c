"""Only files of the library are ever replaced or removed: by name, by kind and by how a manifest begins."""

import json
import os
import pathlib
import random
import shutil
import warnings

import numpy as np
import pytest
import safetensors.numpy

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import Checkpoints
from eqx_ensemble.checkpoint._folders import foreign, is_checkpoint, is_temporary, temporary
from eqx_ensemble.checkpoint._write import write_file

ARRAYS, MANIFEST = "arrays-0001.safetensors", "checkpoint.json"


def tree(version):
    return {"a": np.full(5, version), "each": ee.Each(np.full((2, 3), version))}


def everything_in(folder):
    """All files, with their content, and all folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if not path.is_symlink()
    }


def own_files():
    """A folder of the user with the names of ours, in each way in which it is not one."""
    return {
        "a manifest of another program": {MANIFEST: b'{"epoch": 3}'},
        "an empty manifest": {MANIFEST: b""},
        "both names, neither ours": {MANIFEST: b"{}", ARRAYS: (8).to_bytes(8, "little") + b"{}      "},
        "a model beside them": {MANIFEST: b"{}", "model.bin": b"1"},
        "names that begin like ours": {"orbax-1/x": b"1"},
        "names that begin like ours, in full": {"orbax-0001.mine/x": b"1"},
        "names that end unlike ours": {"arrays-0001.safetensors.bak": b"1"},
        "a file in the place of a folder": {"orbax-0001": b"1"},
        "a folder in the place of a file": {f"{ARRAYS}/x": b"1"},
        "our arrays, and something else": {ARRAYS: b"", "notes": b"1"},
        "arrays of the user": {ARRAYS: b"my only copy"},
        "arrays of another library": {ARRAYS: safetensors.numpy.save({"a": np.ones(3)})},
        "zeros that a program wrote": {ARRAYS: bytes(8) + b"1"},
        "arrays of the user after ours": {ARRAYS: b"", "arrays-0002.safetensors": b"1"},
        "arrays of the user beside a manifest": {MANIFEST: b"{}", "orbax-0001/weights.bin": b"1"},
        "folders of the user": {"orbax-0001/weights.bin": b"1"},
        "folders of the user with metadata": {"orbax-0001/state/_METADATA": b'{"tree_metadata": {}}'},
        "an unfinished file of another program": {f"{MANIFEST}.saving": b'{"epoch": 3}'},
        "a mark of another program": {f"{MANIFEST}.begun": b"today", ARRAYS: b""},
    }


@pytest.mark.parametrize("name", own_files())
def test_what_is_not_ours_is_not_overwritten(name, tmp_path):
    for file, content in own_files()[name].items():
        (tmp_path / "x" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / file).write_bytes(content)
    before = everything_in(tmp_path)
    with pytest.raises(FileExistsError, match="is not a checkpoint, so nothing is overwritten"):
        ee.save(tmp_path / "x", tree(1))
    assert everything_in(tmp_path) == before
    checkpoints = Checkpoints(tmp_path)
    shutil.move(tmp_path / "x", checkpoints.path(3))
    before = everything_in(tmp_path)
    with pytest.raises(FileExistsError, match="is not a checkpoint, so nothing is overwritten"):
        checkpoints.save(3, tree(1))
    assert everything_in(tmp_path) == before
    checkpoints.save(4, tree(1))  # and what it removes is its own
    assert before.items() <= everything_in(tmp_path).items()


def test_the_message_names_what_is_there(tmp_path):
    for name in "abcde":
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / name).touch()
    with pytest.raises(FileExistsError, match="overwritten: it holds `a`, `b`, `c` and 2 more.\nChoose another path"):
        ee.save(tmp_path / "x", tree(1))


def test_every_damage_to_a_manifest_leaves_it_ours(tmp_path):
    """A flipped bit anywhere, and every length: the folder can be saved over."""
    ee.save(tmp_path / "x", tree(1))
    file = tmp_path / "x" / MANIFEST
    data = file.read_bytes()
    for bit in range(0, 8 * 256):
        file.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
        assert is_checkpoint(tmp_path / "x")
    for size in range(0, len(data), 7):
        file.write_bytes(data[:size])
        assert is_checkpoint(tmp_path / "x")
    ee.save(tmp_path / "x", tree(2))
    assert ee.load(tmp_path / "x", tree(0))["a"].tolist() == [2] * 5


USERS = ["notes.txt", "arrays-1.safetensors", "orbax-0002", "checkpoint.json.bak", ".hidden", "plots/a.png", "link"]


@pytest.mark.parametrize("seed", range(4))
def test_nothing_of_the_user_is_ever_removed(seed, tmp_path):
    """Saves, retention and cleaning over folders with other files: all of these stay unchanged."""
    draw = random.Random(seed)
    run, own = tmp_path / "run", {}
    checkpoints = Checkpoints(run, last=2, best=1)
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("mine")

    def put(folder):
        name = draw.choice(USERS)
        path = folder / name
        if name == "link":
            path.symlink_to(target)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"mine {draw.random()}")
        own[path] = os.readlink(path) if path.is_symlink() else path.read_text()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            checkpoints.save(step, tree(step), score=draw.random())
            folders = [run, *(checkpoints.path(step) for step in checkpoints.steps)]
            left = temporary(run / "step-000000000002", draw.choice(["saving", "removing"]))
            left.mkdir()
            for folder in draw.sample([*folders, left], 2):
                if not {*own} & {folder / name for name in USERS}:
                    put(folder)
        checkpoints.save(99, tree(99))
    assert caught
    assert all("An old checkpoint is kept: " in str(warning.message) for warning in caught)
    for path, content in own.items():
        assert (os.readlink(path) if path.is_symlink() else path.read_text()) == content
    assert (target / "precious").read_text() == "mine"
    assert len(caught) == len({str(warning.message) for warning in caught})  # each is said once
    for step in checkpoints.steps:  # and what stays is whole
        assert ee.load(checkpoints.path(step), tree(0))["a"].tolist() == [step] * 5


def test_a_link_in_the_place_of_a_step_stays(tmp_path):
    ee.save(tmp_path / "mine", tree(1))
    checkpoints = Checkpoints(tmp_path / "run", last=1)
    (tmp_path / "run").mkdir()
    checkpoints.path(1).symlink_to(tmp_path / "mine")
    with pytest.warns(UserWarning, match="is a link, and is left as it is"):
        checkpoints.save(2, tree(2))
    assert ee.load(tmp_path / "mine", tree(0))["a"].tolist() == [1] * 5


LEFT = {
    "no manifest": [ARRAYS],
    "two files of arrays": [ARRAYS, "arrays-0002.safetensors"],
    "a manifest that was not put in its place": [ARRAYS, f"{MANIFEST}.saving"],
    "what rsync leaves": [ARRAYS, f".{MANIFEST}.Xy12Zz", ".arrays-0002.safetensors.aB3dE6"],
    "nothing": [],
    "arrays of Orbax": ["orbax-0001/state/_METADATA", "orbax-0002.orbax-checkpoint-tmp/x"],
    "parts of arrays": [f"{MANIFEST}.begun", "arrays-0003.safetensors", "orbax-0001/x"],
}


def left_content(name, whole):
    """What a kill may leave under a name, given the files of a whole checkpoint."""
    if name == ARRAYS:
        return whole[ARRAYS][:-1]
    if name.endswith("_METADATA"):
        return b'{"tree_metadata": {"(\'<checksums>\',)": {}}}'
    return {
        "arrays-0002.safetensors": bytes(100),
        f"{MANIFEST}.saving": whole[MANIFEST][:100],
        f"{MANIFEST}.begun": b"eqx_ensemble checkpoint",
    }.get(name, b"1")


@pytest.mark.parametrize("name", LEFT)
def test_a_folder_that_holds_only_our_names_is_ours(name, tmp_path):
    """An interrupted `rm` or `rsync` does not keep the run from saving that step again."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tree(1))
    whole = everything_in(checkpoints.path(1))
    for file in LEFT[name]:
        (checkpoints.path(2) / file).parent.mkdir(parents=True, exist_ok=True)
        (checkpoints.path(2) / file).write_bytes(left_content(file, whole))
    checkpoints.path(2).mkdir(exist_ok=True)
    assert not foreign(checkpoints.path(2))
    with pytest.warns(UserWarning, match="went back to step 1"):
        assert checkpoints.restore(tree(0)).step == 1
    checkpoints.save(2, tree(2))
    assert checkpoints.restore(tree(0)).tree["a"].tolist() == [2] * 5
    assert len(list(checkpoints.path(2).iterdir())) == 2


@pytest.mark.parametrize("name", ["x", "x" * 65, "x" * 240, "é" * 120, "x.saving-00000000", "a b*[!]"])
def test_names_of_any_length(name, tmp_path):
    for version in (1, 2):
        ee.save(tmp_path / name, tree(version))
        assert ee.load(tmp_path / name, tree(0))["a"].tolist() == [version] * 5
    left = temporary(tmp_path / name, "saving")
    assert is_temporary(left.name, name)
    assert not is_temporary(left.name, name[:-1])
    left.mkdir()
    ee.save(tmp_path / name, tree(3))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_links_are_resolved_by_the_system(tmp_path, monkeypatch):
    """`link/..` is the folder above the one that the link leads to."""
    (tmp_path / "far" / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inside")
    monkeypatch.chdir(tmp_path)
    for start in (tmp_path, pathlib.Path()):
        path = start / "link" / ".." / "m"
        ee.save(path, tree(1))
        assert (tmp_path / "far" / "m" / MANIFEST).exists()
        assert ee.load(path, tree(0))["a"].tolist() == [1] * 5
        run = Checkpoints(start / "link" / ".." / "run")
        run.save(1, tree(1))
        assert Checkpoints(tmp_path / "far" / "run").steps == run.steps == [1]
    write_file(pathlib.Path("link/../file"), b"1")
    assert (tmp_path / "far" / "file").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["far", "link"]


def test_the_manifest_of_anything_is_strict_json(tmp_path):
    """Numbers that JSON does not have are restored exactly, and every reader accepts the file."""
    nan, inf = float("nan"), float("inf")
    meta = {"loss": [1.5, nan, {"best": -inf}], "nested": {"<float": "nan", "x": "nan"}}
    checkpoints = Checkpoints(tmp_path)
    for step, score in enumerate((inf, -inf, nan, 0.5)):
        checkpoints.save(step, tree(step), meta=meta, score=score)

        def refuse(name):
            raise AssertionError(name)

        text = (checkpoints.path(step) / MANIFEST).read_text()
        json.loads(text, parse_constant=refuse)
        contents = ee.checkpoint.verify(checkpoints.path(step))
        assert repr(contents.meta) == repr(meta)
        assert contents.score == (None if score != score else score)
    with pytest.raises(ValueError, match="has the key '<float>'"):
        ee.save(tmp_path / "x", 1, meta={"a": {"<float>": "nan"}})
