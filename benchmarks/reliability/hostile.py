"""Reads hostile files, written by hand and as many random ones as time allows.

Every read must end in the documented errors or in a tree, within a bound on memory, without running code and without
touching a file outside of the checkpoint. `python benchmarks/reliability/hostile.py --minutes 60`
"""

import collections
import ctypes
import json
import os
import pathlib
import pickle
import platform
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import _paths  # noqa: F401
from _measure import Report, counted, script
from damage import HEADERS, HOSTILE, MANIFEST, arrays_file, forge, load, small, write_manifest

import eqx_ensemble as ee
from eqx_ensemble.checkpoint._manifest import LIMIT
from eqx_ensemble.checkpoint._read import decode
from eqx_ensemble.checkpoint._snapshot import file_layout

BOUND = 64 * 2**20
"""Address space beyond what the process has at the start, for files below 1 MB: more is refused by the system."""

DOCUMENTED = (ee.CheckpointCorruptError, ee.MemberMismatchError)
FORMAT = "of the checkpoint format"
CODE = (
    "compile",
    "exec",
    "import",
    "marshal.",
    "pickle.",
    "os.exec",
    "os.fork",
    "os.system",
    "os.spawn",
    "subprocess.",
)
CODE += ("os.posix_spawn", "ctypes.", "socket.", "code.")
INTERESTING = [None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, -0.5, float("nan"), float("inf"), "", "..", "/etc/x"]
INTERESTING += ["\ud800", "\0", "a" * 10_000, "float32", "bool", "members", "shared", "threefry2x32", [], {}, [[]], [0]]


class Watch:
    """Records code that is run and files that are opened, while it is active."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self.on, self.seen = str(folder), False, []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        name = arguments[0] if arguments else None  # files that are open already have numbers
        outside = event == "open" and type(name) is not int and not str(name).startswith(self._folder)
        if outside or event.startswith(CODE):
            self.seen.append((event, str(arguments)[:100]))


def measure(quick: bool, minutes: float) -> Report:
    report = Report("Hostile files")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        folder = pathlib.Path(name)
        largest = [_peak(folder / "largest", body) for body in _largest_manifests(quick=quick)]
        ee.save(folder / "good", small(), meta={"note": ["small", {"a": 1.5}]})
        watch = Watch(folder)
        outcomes: collections.Counter = collections.Counter()
        for case, damage in _cases().items():
            outcomes[_outcome(folder, watch, damage, case)] += 1
        known = sum(outcomes.values())
        bad = {text: count for text, count in outcomes.items() if text != "CheckpointCorruptError"}
        report.rows.append(
            counted("files made by hand", "not refused as damaged", sum(bad.values()), known, target="<= 0")
        )
        _one_heap()
        _outcome(folder, watch, lambda path: None)  # threads that start in here take address space of their own
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + BOUND, before[1]))
        fuzzed, seconds = _fuzzed(folder, watch, 60 * minutes)
        seen, control = list(watch.seen), _seen_of_a_pickle(watch)
        resource.setrlimit(resource.RLIMIT_AS, before)
        crashes = {text: count for text, count in fuzzed.items() if text.startswith("!")}
        tries = sum(fuzzed.values())
    report.rows += [
        counted("random files", "other errors than the documented", sum(crashes.values()), tries, target="<= 0"),
        counted("all of these", "ran code or opened another file", len(seen), known + tries, target="<= 0"),
        counted("control: a pickle that runs code", "seen", control, 1),
    ]
    report.facts |= {
        "fuzzed": f"{tries} files in {seconds:.0f} CPU seconds, within {BOUND // 2**20} MiB of address space",
        "outcomes": json.dumps(dict(fuzzed.most_common(12))),
        "unexpected": json.dumps({**bad, **crashes}) + f" {seen[:5]}",
        "peak memory at the largest manifests": ", ".join(f"{peak // 2**20} MiB" for peak in largest),
    }
    return report


def _cases() -> dict[str, Callable[[pathlib.Path], None]]:
    """Everything that the tests try, and links."""
    cases = {name: lambda path, change=change: forge(path, change) for name, change in HOSTILE.items()}
    for name, change in HEADERS.items():
        cases[f"{name}, arrays"] = lambda path, change=change: _rewritten(arrays_file(path), change)
    for name in (MANIFEST, "arrays-0001.safetensors"):
        cases[f"{name} is a link"] = lambda path, name=name: _linked(path / name, "/etc/passwd")
        cases[f"{name} is a link to the good one"] = lambda path, name=name: _linked(path / name, f"../good/{name}")
        cases[f"{name} is a device"] = lambda path, name=name: _linked(path / name, "/dev/zero")
    return cases


def _rewritten(file: pathlib.Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


def _linked(file: pathlib.Path, target: str) -> None:
    file.unlink()
    file.symlink_to(target)


def _outcome(folder: pathlib.Path, watch: Watch, damage: Callable[[pathlib.Path], None], case: str = "") -> str:
    """The outcome of reading a damaged copy, with a `!` in front if it is not a documented one."""
    path = folder / "copy"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(folder / "good", path)
    damage(path)
    ends = []
    for read in (load, ee.checkpoint.verify):
        watch.on = True
        try:
            read(path)
            ends.append("read")
        except DOCUMENTED as error:
            ends.append(type(error).__name__)
        except Exception as error:
            watch.on = False
            known = isinstance(error, ValueError) and FORMAT in str(error)
            ends.append("another format" if known else f"! {case} {type(error).__name__}: {str(error)[:80]}")
        finally:
            watch.on = False
    return ends[0] if ends[0] == ends[1] else " / ".join(sorted(ends))


def _fuzzed(folder: pathlib.Path, watch: Watch, seconds: float) -> tuple[collections.Counter, float]:
    draw, outcomes, begun = random.Random(0), collections.Counter(), time.process_time()
    kinds = (_change_bytes, _change_manifest, _change_both)
    while (spent := time.process_time() - begun) < seconds:
        if (tries := sum(outcomes.values())) % 10_000 == 0:
            print(f"{tries} random files: {dict(outcomes)}", flush=True)
        kind = draw.choice(kinds)
        outcomes[_outcome(folder, watch, lambda path, kind=kind: kind(path, draw))] += 1
    return outcomes, spent


def _change_bytes(path: pathlib.Path, draw: random.Random) -> None:
    """Random bytes in one of the two files."""
    file = draw.choice([path / MANIFEST, arrays_file(path)])
    data = bytearray(file.read_bytes())
    for _ in range(draw.randint(1, 8)):
        start = draw.randrange(len(data))
        end = min(len(data), start + draw.choice([0, 1, 1, 2, 8, 100]))
        data[start:end] = draw.choice([draw.randbytes(draw.randint(0, 9)), data[:100], b"\xff" * 8, b"[" * 1000])
    file.write_bytes(data)


def _change_manifest(path: pathlib.Path, draw: random.Random) -> None:
    """A manifest with a correct checksum and some wrong values."""

    def change(content: dict) -> None:
        for _ in range(draw.choice([1, 1, 1, 2, 5])):
            _change_value(content, draw)

    forge(path, change)


def _change_value(content: Any, draw: random.Random) -> None:
    while isinstance(content, dict | list) and content:
        key = draw.choice(sorted(content) if isinstance(content, dict) else range(len(content)))
        inner = content[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.8:
            content = inner
            continue
        action = draw.random()
        if action < 0.15:
            del content[key]
        elif action < 0.3:
            new = draw.choice(list(content.values()) if isinstance(content, dict) else content)
            content[key] = json.loads(json.dumps(new))
        elif action < 0.5 and type(inner) is int:
            content[key] = inner + draw.choice([-1, 1, 2, 2**32, 2**62])
        else:
            content[key] = draw.choice(INTERESTING)
        return


def _change_both(path: pathlib.Path, draw: random.Random) -> None:
    """A changed manifest, and a file of arrays with the header and the size that follow from it."""
    _change_manifest(path, draw)
    file = arrays_file(path)
    try:
        plan = file_layout(decode((path / MANIFEST).read_bytes(), MANIFEST).entries)
    except Exception:  # its outcome is looked at when it is read
        return
    data = file.read_bytes()
    if plan.size < 10**6:
        file.write_bytes((plan.header + data[-draw.randint(1, 200) :])[: plan.size].ljust(plan.size, b"\0"))


def _seen_of_a_pickle(watch: Watch) -> int:
    """The control: whether code that a file runs is recorded."""
    before, watch.on = len(watch.seen), True
    pickle.loads(b"cos\nsystem\n(S'true'\ntR.")
    watch.on = False
    return int(len(watch.seen) > before)


def _largest_manifests(*, quick: bool) -> list[bytes]:
    """Those that become the most Python objects."""
    size = (LIMIT if not quick else 2**16) - 1000
    entries = b",".join(b'"%x":0' % i for i in range(size // 10))
    return [b"[" + b"[]," * (size // 3) + b"0]", b"[" + b"{}," * (size // 3) + b"0]", b"{" + entries + b"}"]


def _peak(path: pathlib.Path, body: bytes) -> int:
    """How much the resident memory of a process grows that reads a manifest."""
    path.mkdir(exist_ok=True)
    write_manifest(path, body)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            ee.checkpoint.contents(path)
        except ee.CheckpointCorruptError:
            os.write(writing, b"%d" % (1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    return int(os.read(reading, 100))


def _one_heap() -> None:
    """glibc's heap for each new thread takes 64 MiB of address space, used or not: all threads share the first one."""
    arena_max = -8
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(arena_max, 1)


def _address_space() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    script(measure, amount=("minutes", 60.0, 0.03))
