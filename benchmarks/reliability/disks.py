"""Disks that are full, limited, read-only or removed while a checkpoint is written: which error, which files remain?"""

import os
import pathlib
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable

import _paths  # noqa: F401
import equinox as eqx
import numpy as np
from _measure import Report, counted, script, table
from faults import Layer

import eqx_ensemble as ee

SMALL, LARGE = 1000, 100_000
NOBODY = 65534


class Skip(Exception):
    """The system does not allow this case."""


def measure(quick: bool) -> Report:
    report = Report("Disks that refuse")
    lines, bad, tries = [], 0, 0
    with tempfile.TemporaryDirectory() as name:
        for case, run in CASES.items():
            folder = pathlib.Path(name, case.replace(" ", "-"))
            folder.mkdir()
            try:
                error, usable = run(folder)
            except Skip as reason:
                lines.append([case, "skipped", str(reason), ""])
                continue
            text = str(error).splitlines()[0].replace(name, "") if error else "no error"
            lines.append([case, type(error).__name__, text, "yes" if usable else "no"])
            if "control" not in case:
                tries += 1
                bad += error is None or not isinstance(error, OSError) or not usable
            else:
                report.rows.append(counted(case, "the old file unusable", int(not usable), 1))
    print(table(["case", "error", "first line", "old one usable"], lines))
    report.facts |= {case: f"{error}; old one usable: {usable or '-'}" for case, error, _, usable in lines}
    report.rows.insert(0, counted("refused saves", "no OSError, or the old one lost", bad, tries, target="<= 0"))
    return report


def tree(size: int) -> dict[str, np.ndarray]:
    return {"a": np.arange(size)}


def refused(save: Callable[[], object]) -> Exception | None:
    """The error of a save."""
    try:
        save()
    except Exception as error:
        return error
    return None


def usable(path: pathlib.Path) -> bool:
    """Whether the old checkpoint is unchanged and can be overwritten."""
    same = np.array_equal(ee.load(path, tree(SMALL))["a"], tree(SMALL)["a"])
    return same and not any(entry.name.startswith(".") for entry in path.parent.iterdir())


def on_a_small_disk(name: str, *, in_place: bool = False) -> Callable:
    def run(folder: pathlib.Path) -> tuple[Exception | None, bool]:
        _mounted(folder, "size=64k")
        try:
            if in_place:
                return _in_place(folder / "x.eqx")
            ee.save(folder / "old", tree(SMALL))
            return refused(lambda: ee.save(folder / name, tree(LARGE))), usable(folder / "old")
        finally:
            subprocess.run(["umount", str(folder)], check=True)

    return run


def _in_place(path: pathlib.Path) -> tuple[Exception | None, bool]:
    eqx.tree_serialise_leaves(path, tree(SMALL))
    error = refused(lambda: eqx.tree_serialise_leaves(path, tree(LARGE)))
    return error, refused(lambda: eqx.tree_deserialise_leaves(path, tree(SMALL))) is None


def run_of_checkpoints(folder: pathlib.Path) -> tuple[Exception | None, bool]:
    _mounted(folder, "size=64k")
    try:
        checkpoints = ee.checkpoint.Checkpoints(folder / "run", asynchronous=True)
        checkpoints.save(1, tree(SMALL))
        checkpoints.save(2, tree(LARGE))
        error = refused(checkpoints.wait)
        return error, checkpoints.restore(tree(SMALL)).step == 1 and usable(checkpoints.path(1))
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def read_only_disk(folder: pathlib.Path) -> tuple[Exception | None, bool]:
    _mounted(folder, "size=1m")
    try:
        ee.save(folder / "old", tree(SMALL))
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        return refused(lambda: ee.save(folder / "old", tree(LARGE))), usable(folder / "old")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _mounted(folder: pathlib.Path, options: str) -> None:
    if os.geteuid() != 0:
        raise Skip("only root can mount")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True)
    if done.returncode:
        raise Skip(f"cannot mount: {done.stderr.decode().strip()}")


def limited_files(folder: pathlib.Path) -> tuple[Exception | None, bool]:
    ee.save(folder / "old", tree(SMALL))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        return refused(lambda: ee.save(folder / "old", tree(LARGE))), usable(folder / "old")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def read_only_folder(name: str) -> Callable:
    """Permissions do not restrict root: run as root, this case switches to the user `nobody`."""

    def run(folder: pathlib.Path) -> tuple[Exception | None, bool]:
        if os.name == "nt":
            raise Skip("no permissions of POSIX")
        ee.save(folder / "old", tree(SMALL))
        folder.parent.chmod(0o755)
        for place in (folder / "old", folder):
            place.chmod(0o555)
        root = os.geteuid() == 0
        try:
            if root:
                os.seteuid(NOBODY)
            return refused(lambda: ee.save(folder / name, tree(LARGE))), usable(folder / "old")
        finally:
            if root:
                os.seteuid(0)
            for place in (folder, folder / "old"):
                place.chmod(0o755)

    return run


def removed(names: str) -> Callable:
    """Removes what has such a name before each of the operations that write a new checkpoint, one after another."""

    def run(folder: pathlib.Path) -> tuple[Exception | None, bool]:
        def away() -> None:
            for place in folder.parent.glob(names):
                shutil.rmtree(place)

        whole, stop, last = True, 0, None
        while True:
            ee.save(folder / "old", tree(SMALL))
            with Layer(stop=stop, meanwhile=away) as layer:
                error = refused(lambda: ee.save(folder / "new", tree(LARGE)))
            if not (folder / "old").exists():  # it went with its folder: what counts is that the next save is whole
                ee.save(folder / "old", tree(SMALL))
            whole = whole and usable(folder / "old") and (error is None or isinstance(error, OSError))
            last = error or last
            if layer.count <= stop:
                return last, whole
            shutil.rmtree(folder)
            stop += 1

    return run


CASES = {
    "full disk, new": on_a_small_disk("new"),
    "full disk, overwriting": on_a_small_disk("old"),
    "full disk, asynchronous": run_of_checkpoints,
    "control: full disk, tree_serialise_leaves": on_a_small_disk("", in_place=True),
    "RLIMIT_FSIZE": limited_files,
    "read-only disk": read_only_disk,
    "read-only folder, new": read_only_folder("new"),
    "read-only folder, overwriting": read_only_folder("old"),
    "unfinished folder removed": removed("unfinished-folder-removed/.new.*"),
    "folder of the run removed": removed("folder-of-the-run-removed"),
}


if __name__ == "__main__":
    script(measure)
