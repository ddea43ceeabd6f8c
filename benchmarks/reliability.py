"""Kills runs, flips bits, cuts files and fills disks: is anything lost, or loaded that was not saved?

`python -m benchmarks.reliability`. All counts of what went wrong must be 0. Set `TMPDIR` to choose the disk.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import multiprocessing
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # for `python -m`

from _measure import Contender, Report, compared, counted, interleaved, script  # noqa: E402

import eqx_ensemble as ee  # noqa: E402

Life = Callable[[pathlib.Path | None], str]  # trains, with its files in a folder, and returns a digest
PARTS = ("kills", "damage", "disks", "speed")
KILLS = {"fit": 15, "halving": 15, "fleet": 10}
FLIPS, CUTS, DISKS = 2000, 200, 20
MEMBERS, LAYERS = 8, 12
MEGABYTES = {"0.5 MB": 0.5, "50 MB": 50, "1 GB": 1000}


def measure(quick: bool, parts: list[str]) -> Report:
    report = Report("Saved and lost")
    if "kills" in parts:  # first: no thread of jax runs yet, so that this process can be forked
        _kill(report, quick=quick)
    if "damage" in parts:
        _damage(report, flips=40 if quick else FLIPS, cuts=10 if quick else CUTS)
    if "disks" in parts:
        _fill_disks(report, 2 if quick else DISKS)
    for size, megabytes in MEGABYTES.items() if "speed" in parts else ():
        if not quick or megabytes < 1:
            _time(report, size, megabytes, rounds=3 if quick else 9)
    return report


def _kill(report: Report, *, quick: bool) -> None:
    """Each process continues the run of the one before, and is killed at a random moment.

    A run that comes to its end must be, in every bit, the run that nobody killed.
    """
    warnings.filterwarnings("ignore", message="os.fork")
    for name, life in {"fit": _fit, "halving": _halve, "fleet": _fit_on_workers}.items():
        kills = 1 if quick else KILLS[name]
        with tempfile.TemporaryDirectory() as folder:
            tally = _killed_often(name, life, pathlib.Path(folder), kills)
        _report(report, f"SIGKILL, {name}", tally, kills)


def _killed_often(name: str, life: Life, folder: pathlib.Path, kills: int) -> collections.Counter[str]:
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    expected, again = (_result(*_fork(life, run)) for run in (None, folder / "first"))
    assert expected == again
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # or half a program would stay there
    child, reading = _fork(life, folder / "second")
    begun, moments = _begun(child, folder / "second"), random.Random(name)
    assert _result(child, reading) == expected
    seconds = time.perf_counter() - begun
    tally, run = collections.Counter({"killed": 0, "left a hidden file": 0, "same": 0}), folder / "run"
    while tally["killed"] < kills or run.exists():
        child, reading = _fork(life, run)
        if tally["killed"] < kills:
            _begun(child, run)
            time.sleep(moments.uniform(0, seconds))
            child.kill()
        result = _result(child, reading)
        if result is None:
            tally["killed"] += 1
            tally["left a hidden file"] += any(not path.name.endswith(".lock") for path in run.rglob(".*"))
            continue
        tally["same" if result == expected else f"wrong: {result}"] += 1
        shutil.rmtree(run, ignore_errors=True)
    return tally


def _fork(life: Life, folder: pathlib.Path | None) -> tuple[Any, Any]:
    """A process that does the work, and the pipe that it sends its result to."""
    fork = multiprocessing.get_context("fork")
    reading, writing = fork.Pipe(duplex=False)
    child = fork.Process(target=_live, args=(life, folder, writing))
    child.start()
    writing.close()
    return child, reading


def _begun(child: Any, run: pathlib.Path) -> float:
    """When a process, after imports and compilation, locked a file that it saves to."""
    start = time.time()
    while child.is_alive() and not any(lock.stat().st_mtime > start for lock in run.rglob(".*.lock")):
        time.sleep(0.01)
    return time.perf_counter()


def _live(life: Life, folder: pathlib.Path | None, writing: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # XLA prints the features of the processor for each cached program
    try:
        writing.send(life(folder))
    except Exception as error:
        writing.send(repr(error))


def _result(child: Any, reading: Any) -> str | None:
    """What a process found, or its error; `None` if it was killed."""
    child.join()
    with reading, contextlib.suppress(EOFError):
        return reading.recv()
    return None


def _problem() -> dict[str, Any]:
    """The arguments of `fit`. The loss is random, so that a stream that began again would be seen."""
    x = jax.random.normal(key := jax.random.key(0), (203, 3))
    data = x, jnp.sin(x[:, 0])
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 6, key=key)
    hyper, adam = {"lr": jnp.geomspace(1e-3, 1e-2, 6)}, lambda hyper: optax.adam(hyper["lr"])
    options = {"ensemble": ensemble, "loss": _loss, "optimiser": adam, "data": data, "hyper": hyper}
    return options | {"key": key, "progress": False}


def _loss(model: eqx.nn.MLP, batch: Any, key: Any) -> Any:
    x, y = batch
    keep = jax.random.bernoulli(key, 0.8, x.shape)
    return jnp.mean((jax.vmap(model)(jnp.where(keep, x, 0.0))[:, 0] - y) ** 2)


def _fit(folder: pathlib.Path | None) -> str:
    saving = {} if folder is None else {"checkpoint": ee.train.Checkpoint(folder / "run.eqx", every=5)}
    problem = _problem()
    return _run_digest(ee.fit(**problem, validation=problem["data"], epochs=200, **saving))


def _halve(folder: pathlib.Path | None) -> str:
    problem = _problem()
    saving = {} if folder is None else {"checkpoint": ee.train.Checkpoint(folder / "run.eqx", every=5)}
    options = {"validation": problem["data"], "epochs": 20, "factor": 1.5}
    return _run_digest(ee.methods.successive_halving(**problem, **options, **saving))


def _fit_on_workers(folder: pathlib.Path | None) -> str:
    problem = _problem() | {"plan": ee.plan.Blocks(1)}  # with equal blocks, the same bits
    if folder is None:
        return _run_digest(ee.fit(**problem, epochs=60))
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        return _run_digest(ee.fleet.fit(executor, **problem, epochs=60, folder=folder, shards=3))


def _run_digest(run: ee.Run) -> str:
    return _digest((run.train_state, run.history))


def _digest(tree: Any) -> str:
    """A digest of every array and number of a tree."""
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not callable(x):
            x = np.asarray(jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x)
            digest.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}".encode() + x.tobytes())
    return digest.hexdigest()


def _damage(report: Report, *, flips: int, cuts: int) -> None:
    """Loading either raises `CheckpointCorruptError`, or gives what was saved."""
    places, tree = random.Random(0), _tree()
    with tempfile.TemporaryDirectory() as name:
        ee.save(path := pathlib.Path(name, "saved.eqx"), tree, meta={"epochs": 40})
        whole = path.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        bits = [places.randrange(8 * (header if i % 2 else len(whole))) for i in range(flips)]
        damage = {
            "flipped bits": [_flip(whole, bit) for bit in bits],
            "files cut short": [whole[: places.randrange(len(whole))] for _ in range(cuts)],
        }
        found = lambda: (_digest(ee.load(path, tree)), ee.contents(path))
        expected = found()
        for what, contents in damage.items():
            tally = collections.Counter(same=0, refused=0)
            for content in contents:
                path.write_bytes(content)
                try:
                    tally["same" if found() == expected else "wrong"] += 1
                except Exception as error:
                    tally["refused" if isinstance(error, ee.CheckpointCorruptError) else f"wrong: {error!r}"] += 1
            _report(report, what, tally, len(contents))
    report.facts["damaged file"] = f"{len(whole)} bytes, {header} of them header, in which half of the bits are"


def _report(report: Report, what: str, tally: collections.Counter[str], tries: int) -> None:
    wrong = sum(count for outcome, count in tally.items() if outcome.startswith("wrong"))
    report.rows.append(counted(what, "different, silent or another error", wrong, tries, target="<= 0"))
    report.facts[what] = ", ".join(f"{count} {outcome}" for outcome, count in tally.items())


def _tree() -> dict[str, Any]:
    """An ensemble, and a leaf of each other kind."""
    ensemble = ee.build(lambda key: eqx.nn.MLP(4, 2, 8, 2, key=key), 3, key=jax.random.key(0))
    half = jnp.linspace(0, 1, 64).astype(jnp.bfloat16)
    return {"ensemble": ensemble, "half": half, "key": jax.random.key(3), "on": np.arange(5) > 2, "rate": 0.1, "n": 7}


def _flip(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _fill_disks(report: Report, disks: int) -> None:
    """Saving raises `OSError`, the old file stays, nothing else does, and with room again it succeeds."""
    places, tally = random.Random(0), collections.Counter(refused=0)
    old, new = ({"x": np.random.default_rng(i).normal(size=65_536)} for i in range(2))
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path, mount = folder / "saved.eqx", ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
        if own := subprocess.run(mount, capture_output=True).returncode == 0:
            stack.callback(subprocess.run, ["umount", folder], check=True)
        for _ in range(disks):
            ee.save(path, old)
            try:
                with _room(folder, places.randrange(path.stat().st_size), own=own):
                    ee.save(path, new)
                outcome = "wrong"
            except OSError:
                outcome = "refused" if _digest(ee.load(path, old)) == _digest(old) else "wrong"
            is_left = [entry.name for entry in folder.iterdir()] != [path.name]
            ee.save(path, new)
            tally["wrong" if is_left or _digest(ee.load(path, new)) != _digest(new) else outcome] += 1
    _report(report, "full disks, a tmpfs" if own else "full disks, by RLIMIT_FSIZE", tally, disks)


@contextlib.contextmanager
def _room(folder: pathlib.Path, free: int, *, own: bool) -> Iterator[None]:
    """Room for so many bytes: on the folder's own disk, which is filled, or for every file of this process."""
    fill, limits, disk = folder / "fill", resource.getrlimit(resource.RLIMIT_FSIZE), os.statvfs(folder)
    try:
        if own:
            with open(fill, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - free)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (free, limits[1]))
        yield
    finally:
        fill.unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _time(report: Report, size: str, megabytes: float, *, rounds: int) -> None:
    """Beside Equinox's own file, made as safe against a kill: synced under another name, then renamed."""
    width = round((megabytes * 1e6 / (4 * MEMBERS * LAYERS)) ** 0.5)
    make = lambda key: eqx.nn.MLP(width, width, width, LAYERS - 1, key=key)
    ensemble = ee.build(make, MEMBERS, key=jax.random.key(0))
    with tempfile.TemporaryDirectory() as name:
        ours, plain = pathlib.Path(name, "ours.eqx"), pathlib.Path(name, "plain.eqx")
        works = {
            "save": (lambda: ee.save(ours, ensemble), lambda: _serialise(plain, ensemble)),
            "load": (lambda: ee.load(ours, ensemble), lambda: eqx.tree_deserialise_leaves(plain, ensemble)),
        }
        for verb, both in works.items():
            names = f"ee.{verb}", f"tree_{'de' * (verb == 'load')}serialise_leaves"
            arrays = [lambda run=run: eqx.filter(run(), eqx.is_array) for run in both]
            times = interleaved(map(Contender, names, arrays), rounds=rounds)
            report.timings += [dataclasses.replace(t, name=f"{verb} {size}: {name}") for name, t in times.items()]
            report.rows.append(compared(f"{verb} {size}", *times.values(), target="<= 1.5"))


def _serialise(path: pathlib.Path, tree: Any) -> None:
    new = path.with_suffix(".new")
    with open(new, "wb") as file:
        eqx.tree_serialise_leaves(file, tree)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


if __name__ == "__main__":
    script(measure, parts=PARTS, cores=0)
