"""A checkpoint is complete or absent: whatever is written, and wherever the process, the disk or the power stops."""

import errno
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import _disk
from eqx_ensemble.checkpoint import _formats as _open
from eqx_ensemble.checkpoint import _write as _commit
from eqx_ensemble.checkpoint._write import write_file

from .faults import HOWS, Killed, Layer

HERE = pathlib.Path(__file__).parent


def tree(version):
    """Two arrays whose values show their version, so that a mixture is detected; one is larger than a piece."""
    return {"a": np.full(5, version), "b": np.full(200_000, version, np.int64)}


def version_at(path):
    got = ee.load(path, tree(0))
    (version,) = {*got["a"].tolist(), *got["b"].tolist()}
    return version


def operations_of(save):
    with Layer() as layer:
        save()
    return layer


def kill(save, **where):
    with Layer(**where), pytest.raises(Killed):
        save()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("old", [None, "empty", 1], ids=["new", "empty", "overwrite"])
def test_killed_at_every_boundary(old, how, tmp_path):
    path, is_empty = tmp_path / "run" / "x", old == "empty"
    old = None if is_empty else old

    def start():
        shutil.rmtree(path.parent, ignore_errors=True)
        if is_empty:
            path.mkdir(parents=True)
        if old is not None:
            ee.save(path, tree(old))

    def found():
        try:
            return version_at(path)
        except FileNotFoundError:
            return None

    start()
    count = operations_of(lambda: ee.save(path, tree(2))).count
    assert count >= 10
    seen = set()
    for stop in range(count):
        start()
        kill(lambda: ee.save(path, tree(2)), stop=stop, how=how)
        seen.add(found())
        # The next process saves as if nothing had been, and leaves nothing behind.
        ee.save(path, tree(3))
        assert version_at(path) == 3
        assert [entry.name for entry in path.parent.iterdir()] == ["x"]
        assert len(list(path.iterdir())) == 2
    assert seen == {old, 2}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("old", [None, 1], ids=["new", "overwrite"])
def test_an_error_at_every_boundary(old, error, tmp_path):
    path = tmp_path / "run" / "x"
    path.parent.mkdir()
    if old is not None:
        ee.save(path, tree(old))
    stop, failed = 0, 0
    while True:
        with Layer(stop=stop, error=error) as layer:
            try:
                ee.save(path, tree(2))
            except OSError as caught:
                failed += 1
                text, number = str(caught), caught.errno
            else:
                text, number = f"{path} bytes are free", error
        if layer.count <= stop:
            break
        assert number == error
        assert str(path) in text
        assert "bytes are free" in text
        now = version_at(path) if path.exists() else None
        assert now in (old, 2)
        assert [entry.name for entry in path.parent.iterdir()] == ["x"] * path.exists()
        if now != old:
            shutil.rmtree(path)
            if old is not None:
                ee.save(path, tree(old))
        stop += 1
    assert failed >= 8


@pytest.fixture
def _all_disks_sync(monkeypatch):
    monkeypatch.setattr(_commit, "_unsynced", set())


def stopped_at(stop, error, save):
    """The error of a save in which one operation fails; the name of that operation, `None` if there are fewer."""
    with Layer(stop=stop, error=error) as layer:
        try:
            save()
        except OSError as caught:
            return layer.stopped, str(caught)
    return layer.stopped, None


@pytest.mark.parametrize("old", [None, 1], ids=["new", "overwrite"])
def test_what_an_error_reports_as_present_is_present(old, tmp_path):
    """At whichever operation the disk fails: `load` reads what the message names."""
    path, stop, said = tmp_path / "run" / "x", 0, []
    while True:
        shutil.rmtree(path.parent, ignore_errors=True)
        if old is not None:
            ee.save(path, tree(old))
        operation, text = stopped_at(stop, errno.EIO, lambda: ee.save(path, tree(2)))
        if operation is None:
            break
        now, stop = version_at(path) if path.exists() else None, stop + 1
        if text is None:
            assert now == 2  # only the cleaning failed
            continue
        in_place = "The new checkpoint is in place and complete" in text
        assert in_place != ("The previous checkpoint, if any, is intact" in text)
        assert now == (2 if in_place else old)
        if in_place:
            said.append(operation)
            assert "a power cut may restore the old one" in text
            # The manifest that a power cut brings back names the old arrays, which must still be there.
            assert old is None or len(list(path.glob("arrays-*"))) == 2
        ee.save(path, tree(3))
        assert len(list(path.iterdir())) == 2
    assert said == ["sync_folder"]


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP])
@pytest.mark.usefixtures("_all_disks_sync")
def test_a_file_system_that_cannot_sync_folders(error, tmp_path, monkeypatch):
    def refused(path):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(_disk, "sync_folder", refused)
    with pytest.warns(UserWarning, match="cannot sync folders .*a power cut may lose the newest"):
        ee.save(tmp_path / "a" / "x", tree(1))
    ee.save(tmp_path / "a" / "x", tree(2))  # it is said once: another warning would be an error here
    for step in (1, 2):
        ee.checkpoint.Checkpoints(tmp_path / "run").save(step, tree(step))
    assert version_at(tmp_path / "a" / "x") == 2
    assert ee.checkpoint.Checkpoints(tmp_path / "run").steps == [1, 2]


@pytest.mark.parametrize("how", HOWS)
def test_a_file_is_written_atomically(how, tmp_path):
    """As exports are written: what a kill leaves, the next one to the same path removes."""
    path = tmp_path / "x.zip"
    for stop in range(operations_of(lambda: write_file(path, b"1" * 100)).count):
        write_file(path, b"1" * 100)
        kill(lambda: write_file(path, b"2" * 100), stop=stop, how=how)
        assert path.read_bytes() in (b"1" * 100, b"2" * 100)
        busy = tmp_path / ".x.zip.saving-00000000"
        busy.write_bytes(b"3")
        with _disk.hold_lock(busy):
            write_file(path, b"4" * 100)
            assert sorted(entry.name for entry in tmp_path.iterdir()) == [busy.name, path.name]
        write_file(path, b"5" * 100)
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


class Power:
    """What is on a disk after a power cut, given the operations before it and which of the unsynced ones are lost.

    A name is safe once its folder is synced, the content of a file once the file is. What is not safe may be there or
    not, each on its own; of content, any beginning.
    """

    def __init__(self, log, root):
        self.log, self.root = log, root

    def unsafe(self):
        """The positions of operations that a cut after the last one may undo."""
        return [i for i, operation in enumerate(self.log) if not self.is_safe(i, operation)]

    def is_safe(self, i, operation):
        name, path, *rest = operation
        if name == "write":
            return ("sync", path) in self.log[i:]
        if name in ("sync", "sync_folder"):
            return True
        folders = {path.parent, *(other.parent for other in rest)}
        return all(("sync_folder", folder) in self.log[i:] for folder in folders)

    def replay(self, folder, lost):
        """The disk in `folder`, which stands for `root`."""
        place = lambda path: folder / path.relative_to(self.root)
        for i, (name, path, *rest) in enumerate(self.log):
            target = place(path)
            if i in lost:
                if name == "write" and target.exists():
                    with open(target, "ab") as file:
                        file.write(rest[0][: len(rest[0]) // 2])
            elif name == "make_folder":
                target.mkdir(exist_ok=True)
            elif name == "create" and target.parent.exists():
                target.touch()
            elif name == "write" and target.exists():
                with open(target, "ab") as file:
                    file.write(rest[0])
            elif name in ("rename", "replace") and target.exists():
                os.replace(target, place(rest[0]))
            elif name == "remove":
                target.unlink(missing_ok=True)
            elif name == "remove_folder":
                shutil.rmtree(target, ignore_errors=True)


def outcomes(log, root, before, tmp_path, old):
    """What is found after power cuts at every moment, with the worst that may be lost."""
    found = set()
    for end in range(len(log) + 1):
        power = Power(log[:end], root)
        unsafe = power.unsafe()
        for lost in [set(), set(unsafe), *({i} for i in unsafe), *(set(unsafe) - {i} for i in unsafe)]:
            disk = tmp_path / "disk"
            shutil.rmtree(disk, ignore_errors=True)
            shutil.copytree(before, disk)
            power.replay(disk, lost)
            try:
                now = version_at(disk / "x") if (disk / "x").exists() else None
            except ee.CheckpointCorruptError:
                now = "damaged"
            found.add((end == len(log), now))
    return found


@pytest.mark.parametrize("old", [None, 1], ids=["new", "overwrite"])
@pytest.mark.parametrize("syncs", [True, False], ids=["ours", "without fsync"])
def test_power_cut_at_every_moment(syncs, old, tmp_path):
    root, before = tmp_path / "run", tmp_path / "before"
    root.mkdir()
    if old is not None:
        ee.save(root / "x", tree(old))
    shutil.copytree(root, before)
    log = operations_of(lambda: ee.save(root / "x", tree(2))).log
    log = [operation for operation in log if syncs or operation[0] not in ("sync", "sync_folder")]
    found = outcomes(log, root, before, tmp_path, old)
    if syncs:
        assert found == {(False, old), (False, 2), (True, 2)}
    else:  # the control: the same writer on a disk that is never synced
        assert (True, old) in found
        assert (True, "damaged") in found


def test_overwriting_in_place_loses_some(tmp_path):
    """The control: the same kill under a writer that overwrites the old file."""
    path = tmp_path / "x"

    def save(version):
        path.unlink(missing_ok=True)
        file = _disk.create(path)
        try:
            _disk.write_all(file, np.full(1000, version).tobytes())
        finally:
            os.close(file)

    save(1)
    kill(lambda: save(2), stop=1, how="amid")
    assert path.stat().st_size == 4000


def kill_randomly(folder, kills, mode):
    done = subprocess.run(
        [sys.executable, str(HERE / "killing.py"), str(folder), str(kills), mode],
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mode", ["overwrite", "numbered"])
def test_killed_at_random_moments(mode, tmp_path):
    result = kill_randomly(tmp_path, 20, mode)
    assert result["lost"] == 0
    assert result["killed"] == 20
    assert result["saves"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["overwrite", "numbered"])
def test_killed_very_often_at_random_moments(mode, tmp_path):
    result = kill_randomly(tmp_path, 300, mode)
    assert (result["lost"], result["killed"]) == (0, 300)


@pytest.mark.slow
def test_random_kills_of_overwriting_in_place_lose_some(tmp_path):
    assert kill_randomly(tmp_path, 100, "in place")["lost"] > 0


def test_what_a_living_process_writes_is_left_alone(tmp_path):
    part = "arrays-0001.safetensors"
    busy, dead = tmp_path / ".x.saving-00000000", tmp_path / ".x.removing-11111111"
    others = [tmp_path / name for name in (".x.saving-note", ".x.saving-0000000", ".x.y.saving-22222222", ".y")]
    mixed = tmp_path / ".x.saving-33333333"
    for folder in (busy, dead, mixed, *others):
        folder.mkdir()
        (folder / part).write_bytes(b"1")
    (mixed / "note").write_text("mine")
    with _disk.hold_lock(busy):
        ee.save(tmp_path / "x", tree(1))
    for folder in (busy, *others):
        assert (folder / part).exists()
    assert [entry.name for entry in mixed.iterdir()] == ["note"]
    assert not dead.exists()
    ee.save(tmp_path / "x", tree(2))
    assert not busy.exists()


def test_two_that_save_the_same_path_for_the_first_time(tmp_path, monkeypatch):
    rename = _disk.rename

    def slower(old, new):
        monkeypatch.setattr(_disk, "rename", rename)
        ee.save(tmp_path / "x", tree(1))
        rename(old, new)

    monkeypatch.setattr(_disk, "rename", slower)
    ee.save(tmp_path / "x", tree(2))
    assert version_at(tmp_path / "x") == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_overwritten_while_it_is_opened(tmp_path, monkeypatch):
    ee.save(tmp_path / "x", tree(1))
    read, saves = _open.read_manifest, iter([2])

    def slower(path):
        manifest = read(path)
        for version in saves:
            ee.save(tmp_path / "x", tree(version))
        return manifest

    monkeypatch.setattr(_open, "read_manifest", slower)
    assert version_at(tmp_path / "x") == 2


def test_only_checkpoints_are_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        with pytest.raises(FileExistsError, match="is not a checkpoint, so nothing is overwritten"):
            ee.save(tmp_path / name, tree(1))
    assert (tmp_path / "mine" / "note.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    ee.save(tmp_path / "empty", tree(1))
    assert version_at(tmp_path / "empty") == 1


def test_files_of_the_user_in_a_checkpoint_stay(tmp_path):
    ee.save(tmp_path / "x", tree(1))
    (tmp_path / "x" / "README.md").write_text("mine")
    (tmp_path / "x" / "arrays-mine.safetensors").write_text("mine")
    ee.save(tmp_path / "x", tree(2))
    assert version_at(tmp_path / "x") == 2
    assert (tmp_path / "x" / "README.md").read_text() == "mine"
    assert (tmp_path / "x" / "arrays-mine.safetensors").read_text() == "mine"


def test_a_damaged_checkpoint_can_be_overwritten(tmp_path):
    ee.save(tmp_path / "x", tree(1))
    (tmp_path / "x" / "checkpoint.json").write_text("{}")
    ee.save(tmp_path / "x", tree(2))
    assert version_at(tmp_path / "x") == 2
    assert len(list((tmp_path / "x").iterdir())) == 2


@pytest.fixture
def _small_files():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("old", [None, 1], ids=["new", "overwrite"])
def test_a_limit_on_the_size_of_files(old, tmp_path, request):
    path = tmp_path / "run" / "x"
    path.parent.mkdir()
    if old is not None:
        ee.save(path, tree(old))
    request.getfixturevalue("_small_files")
    text = r"`.*/run/x` \(16[0-9]* bytes\): File too large; [0-9]+ bytes are free"
    with pytest.raises(OSError, match=text) as caught:
        ee.save(path, tree(2))
    assert caught.value.errno == errno.EFBIG
    assert [entry.name for entry in path.parent.iterdir()] == ["x"] * (old is not None)
    if old is not None:
        assert version_at(path) == old
        assert len(list(path.iterdir())) == 2


def test_a_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system of 64 KiB could be mounted: {mounted.stderr.decode().strip()}")
    try:
        small = {"a": np.arange(1000)}
        ee.save(disk / "x", small)
        with pytest.raises(OSError, match="No space left on device; [0-9]+ bytes are free"):
            ee.save(disk / "x", {"a": np.arange(100_000)})
        with pytest.raises(OSError, match="No space left on device"):
            ee.save(disk / "y", {"a": np.arange(100_000)})
        np.testing.assert_array_equal(ee.load(disk / "x", small)["a"], small["a"])
        assert [entry.name for entry in disk.iterdir()] == ["x"]
        ee.save(disk / "x", small)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_that_may_not_be_written(tmp_path):
    ee.save(tmp_path / "run" / "x", tree(1))
    for folder in (tmp_path / "run" / "x", tmp_path / "run"):
        folder.chmod(0o500)
    try:
        for name in ("x", "y"):
            with pytest.raises(PermissionError, match="Check the folder and its permissions"):
                ee.save(tmp_path / "run" / name, tree(2))
        assert version_at(tmp_path / "run" / "x") == 1
    finally:
        for folder in (tmp_path / "run", tmp_path / "run" / "x"):
            folder.chmod(0o700)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc")
def test_a_file_system_that_takes_no_files():
    text = "Could not write the checkpoint `/proc/self/run/x`.*bytes are free in `/proc/self`"
    with pytest.raises(OSError, match=text):
        ee.save("/proc/self/run/x", tree(1))


@pytest.mark.parametrize("operation", ["write", "sync", "rename"])
def test_the_folder_is_removed_in_the_middle(operation, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    before = getattr(_disk, operation)

    def removing(*args):
        monkeypatch.setattr(_disk, operation, before)
        shutil.rmtree(run)
        return before(*args)

    monkeypatch.setattr(_disk, operation, removing)
    with pytest.raises(FileNotFoundError, match="Could not write the checkpoint"):
        ee.save(run / "x", tree(1))
    assert not run.exists()
    ee.save(run / "x", tree(2))
    assert version_at(run / "x") == 2


def test_a_missing_file_of_a_parent(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="Could not write"):
        ee.save(tmp_path / "file" / "x", tree(1))
