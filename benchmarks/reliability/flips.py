"""Flips bits of checkpoints and truncates them: is anything loaded that differs from what was saved?

`python benchmarks/reliability/flips.py --flips 100000`
"""

import mmap
import pathlib
import tempfile

import _paths  # noqa: F401
import numpy as np
from _measure import Report, counted, script
from damage import MANIFEST, arrays_file, every_bit, every_length, small
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import eqx_ensemble as ee

MEMORY = pathlib.Path("/dev/shm")
"""Where files stay in memory, if there is such a place: the disk has no part in the question."""


def measure(quick: bool, flips: int) -> Report:
    report = Report("Flipped bits and cut files")
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        folder = pathlib.Path(name)
        size = _saved_small(folder / "small")
        silent, count = every_bit(folder / "small", step=97 if quick else 1)
        what = f"single bits of a checkpoint of {size} bytes"
        report.rows.append(counted(what, "silent", len(silent), count, target="<= 0"))
        silent, count = every_length(folder / "small", step=41 if quick else 1)
        report.rows.append(counted("lengths of its two files", "silent", len(silent), count, target="<= 0"))
        tree = _larger(quick=quick)
        ee.save(folder / "larger", tree)
        size = sum(file.stat().st_size for file in (folder / "larger").iterdir())
        found = _random_flips(folder / "larger", flips)
        what = f"random bits of a checkpoint of {size} bytes"
        report.rows.append(counted(what, "silent", found, flips, target="<= 0"))
        count = min(flips, 2000)
        found = _random_flips_unchecked(folder / "plain.safetensors", tree, count)
        report.rows.append(counted("control: the same arrays, safetensors alone", "silent", found, count))
    return report


def _saved_small(path: pathlib.Path) -> int:
    """Saves a checkpoint of exactly 4 KiB."""
    size = lambda: sum(file.stat().st_size for file in path.iterdir())
    ee.save(path, small(), meta={"note": ""})
    ee.save(path, small(), meta={"note": "." * (4096 - size())})
    return size()


def _larger(*, quick: bool) -> dict[str, object]:
    """Arrays of 1 MB, with members and without, of several dtypes."""
    random, width = np.random.default_rng(0), 16 if quick else 128
    return {
        "w": ee.Each(random.normal(size=(8, width, width)).astype(np.float32)),
        "b": ee.Each(random.integers(0, 2, (8, width)).astype(bool)),
        "table": random.normal(size=(width // 2, width)),
        "rows": random.integers(0, 2**15, (width * width * 4,)),
    }


def _random_flips(path: pathlib.Path, flips: int) -> int:
    """The number of undetected single flips, at positions drawn uniformly over the bytes of both files."""
    files = [path / MANIFEST, arrays_file(path)]
    ends = np.cumsum([file.stat().st_size for file in files])
    silent = 0
    with open(files[0], "r+b") as first, open(files[1], "r+b") as second:
        maps = [mmap.mmap(file.fileno(), 0) for file in (first, second)]
        for done, bit in enumerate(np.random.default_rng(1).integers(0, 8 * ends[-1], flips).tolist()):
            if done % 10_000 == 0:
                print(f"{done} random bits, {silent} silent", flush=True)
            which = int(bit >= 8 * ends[0])
            place, mask = bit // 8 - which * int(ends[0]), 1 << bit % 8
            maps[which][place] ^= mask
            try:
                ee.checkpoint.verify(path)
                silent += 1
            except ee.CheckpointCorruptError as error:
                silent += error.file != str(files[which])
            maps[which][place] ^= mask
    ee.checkpoint.verify(path)
    return silent


def _random_flips_unchecked(path: pathlib.Path, tree: dict, flips: int) -> int:
    """The same for a file without checksums: the number of loads that differ from what was saved."""
    arrays = {name: np.asarray(getattr(x, "value", x)) for name, x in tree.items()}
    save_file(arrays, path)
    silent = 0
    with open(path, "r+b") as file:
        content = mmap.mmap(file.fileno(), 0)
        for bit in np.random.default_rng(1).integers(0, 8 * len(content), flips).tolist():
            content[bit // 8] ^= 1 << bit % 8
            try:
                load_file(path)
                silent += 1
            except (SafetensorError, ValueError, KeyError):
                pass
            content[bit // 8] ^= 1 << bit % 8
    return silent


if __name__ == "__main__":
    script(measure, amount=("flips", 100_000, 200))
