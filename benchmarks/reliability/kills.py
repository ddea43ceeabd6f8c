"""Kills training with checkpoints, at random moments and at every operation on the disk: is anything lost?

Each process of a run resumes from the checkpoint of the process before, saves at least once, and is killed at a random
moment after that. A run that reaches its end must have the bits of a run that was not killed.
`python benchmarks/reliability/kills.py --kills 1000`
"""

import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import _paths  # noqa: F401
import jax
from _measure import Report, counted, script
from faults import HOWS, Killed, Layer
from killing import killed_often
from resuming import digest, trainer

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import Checkpoints, _disk

EVERY = 3
SECONDS = 0.2
"""The longest time from a life's first save to its death."""


@dataclasses.dataclass
class Tally:
    """The outcomes of the runs, and of the complete checkpoints."""

    kills: int = 0
    within_a_save: int = 0
    saves: int = 0
    lost: int = 0
    ends: int = 0
    different: int = 0


def measure(quick: bool, kills: int) -> Report:
    epochs, steps = (9, 9) if quick else (40, 15)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        # The child that is forked there uses no jax.
        warnings.filterwarnings("ignore", message="os.fork")
        control = _in_a_child(lambda: killed_often(folder, 10 if quick else 100, "in place"))
        jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        tally = _killed_at_random(folder, kills, epochs)
        places = _in_a_child(lambda: _killed_everywhere(folder / "places", steps, seldom=quick))
    report = Report("Killed while saving")
    report.rows += [
        counted("SIGKILL at random moments", "saved and lost", tally.lost, tally.kills, target="<= 0"),
        counted("the runs killed at random", "ended with other bits", tally.different, tally.ends, target="<= 0"),
        counted(
            "a kill at every operation on the disk", "saved and lost", places["lost"], places["kills"], target="<= 0"
        ),
        counted("the runs killed there", "ended with other bits", places["different"], places["kills"], target="<= 0"),
        counted("control: overwriting in place, SIGKILL", "saved and lost", control["lost"], control["killed"]),
    ]
    report.facts["random kills within a save"] = f"{tally.within_a_save} of {tally.kills}, after {tally.saves} saves"
    report.facts["operations on the disk in a run"] = f"{places['operations']}, killed {', '.join(HOWS)} each"
    return report


def _killed_at_random(folder: pathlib.Path, kills: int, epochs: int) -> Tally:
    expected = _in_a_child(lambda: digest(trainer()(epochs=epochs, progress=False)))
    # This fills the cache of compiled programs. One that is killed writes nothing there, because half of it would stay.
    assert _in_a_child(lambda: _life(folder / "first", epochs)) == expected
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    tally, moments, run = Tally(), random.Random(0), folder / "run"
    while tally.kills < kills:
        saved, result = _one_life(run, epochs, moments, tally)
        if result is not None:
            tally.ends += 1
            tally.different += result != expected
            shutil.rmtree(run)
        elif not _is_whole(run, saved):
            tally.lost += 1
            shutil.rmtree(run)
        if (tally.kills + tally.ends) % 10 == 0:
            print(tally, flush=True)
    if run.exists():  # the state after the last kill must resume too
        tally.ends += 1
        tally.different += _in_a_child(lambda: _life(run, epochs)) != expected
    return tally


def _one_life(run: pathlib.Path, epochs: int, moments: random.Random, tally: Tally) -> tuple[int, str | None]:
    """The last step that was saved for certain when the process died; the run's digest, if it ended before."""
    saved = _newest(run)
    child, reading = _forked(lambda writing: _life(run, epochs, writing))
    said = os.read(reading, 1024)
    time.sleep(moments.uniform(0, SECONDS))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while part := os.read(reading, 65536):
        said += part
    os.close(reading)
    steps, _, result = said.partition(b"end ")
    tally.saves += steps.count(b"\n")
    if result:
        return saved, json.loads(result)
    assert os.WIFSIGNALED(status), "a process died of something else"
    tally.kills += 1
    tally.within_a_save += any(entry.name.startswith(".") for entry in run.iterdir())
    return max([saved, *map(int, steps.split())]), None


def _life(run: pathlib.Path, epochs: int, writing: int | None = None) -> str:
    """Trains to the end; prints each step as soon as it is saved."""
    rename = _disk.rename

    def said(old: pathlib.Path, new: pathlib.Path) -> None:
        rename(old, new)
        if writing is not None and new.name.startswith("step-"):
            os.write(writing, b"%d\n" % int(new.name.removeprefix("step-")))

    _disk.rename = said
    resume = "must" if _newest(run) >= 0 else "auto"
    return digest(
        trainer()(epochs=epochs, progress=False, checkpoint=ee.checkpoint.Checkpoints(run, every=EVERY, resume=resume))
    )


def _newest(run: pathlib.Path) -> int:
    return max(Checkpoints(run).steps, default=-1)


def _is_whole(run: pathlib.Path, saved: int) -> bool:
    """Whether the newest checkpoint is undamaged, and at least as new as the last that was reported as saved."""
    newest = _newest(run)
    try:
        ee.checkpoint.verify(Checkpoints(run).path(newest))
    except (ValueError, OSError):
        return False
    return newest >= saved


def _killed_everywhere(folder: pathlib.Path, steps: int, *, seldom: bool) -> dict[str, int]:
    """A run killed before, during and after each of its operations on the disk, and the run that resumes it."""
    train = trainer()
    call = lambda: train(steps=steps, progress=False, checkpoint=ee.checkpoint.Checkpoints(folder, every=EVERY))
    with Layer() as layer:
        expected = digest(call())
    found = {"operations": layer.count, "kills": 0, "lost": 0, "different": 0}
    for stop in range(0, layer.count, 17 if seldom else 1):
        for how in HOWS:
            shutil.rmtree(folder)
            with Layer(stop=stop, how=how) as layer:
                try:
                    call()
                except Killed:
                    found["kills"] += 1
            saved = [
                int(new.name[5:])
                for name, _, *rest in layer.log
                if name == "rename"
                for new in rest
                if new.name[0] == "s"
            ]
            if saved and not _is_whole(folder, max(saved)):
                found["lost"] += 1
            folder.mkdir(exist_ok=True)
            found["different"] += digest(call()) != expected
    return found


def _forked(work: Callable[[int], Any]) -> tuple[int, int]:
    """A child process that does the work and returns its result through a pipe. No thread of jax runs here yet."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)
    try:
        os.write(writing, b"end " + json.dumps(work(writing)).encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _in_a_child(work: Callable[[], Any]) -> Any:
    """What the work returns, done in another process, so that this one can still be forked."""
    child, reading = _forked(lambda _: work())
    said = b""
    while part := os.read(reading, 65536):
        said += part
    os.close(reading)
    os.waitpid(child, 0)
    return json.loads(said.removeprefix(b"end "))


if __name__ == "__main__":
    script(measure, amount=("kills", 1000, 3))
