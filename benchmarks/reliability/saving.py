"""What a checkpoint with checksums, synced to the disk, costs compared with the files of Equinox and Orbax.

The state is an ensemble of eight members. `eqx.tree_serialise_leaves` neither checks nor syncs what it writes: it runs
as it is, and with an fsync after it. Set `TMPDIR` to choose the disk; `--megabytes 50` omits larger sizes.
"""

import dataclasses
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import _paths  # noqa: F401
import equinox as eqx
import jax
import numpy as np
from _measure import Contender, Report, Row, Timing, compared, interleaved, ratio_row, script

import eqx_ensemble as ee

MEMBERS, LAYERS = 8, 12
MEGABYTES = {"0.5 MB": 0.5, "50 MB": 50, "1 GB": 1000}
OURS, PLAIN, SYNCED, ORBAX = "ee.save", "tree_serialise_leaves", "tree_serialise_leaves, fsync", "orbax"


def measure(quick: bool, most: float) -> Report:
    report = Report("Saving and loading")
    for size, megabytes in MEGABYTES.items():
        if megabytes > most:
            report.facts[size] = "left out"
            continue
        with tempfile.TemporaryDirectory() as folder:
            _measure_size(report, size, megabytes, pathlib.Path(folder), rounds=3 if quick else 7)
    return report


def _measure_size(report: Report, size: str, megabytes: float, folder: pathlib.Path, *, rounds: int) -> None:
    ensemble, blank = _ensemble(megabytes), eqx.filter_eval_shape(_ensemble, megabytes)
    orbax = _orbax(folder / "orbax", ensemble)
    savers = {
        OURS: lambda: ee.save(folder / "ours", ensemble),
        PLAIN: lambda: eqx.tree_serialise_leaves(folder / "plain.eqx", ensemble),
        SYNCED: lambda: _synced(folder / "synced.eqx", ensemble),
    }
    loaders = {
        OURS: lambda: jax.tree.leaves(ee.load(folder / "ours", blank)),
        PLAIN: lambda: jax.tree.leaves(eqx.tree_deserialise_leaves(folder / "plain.eqx", blank)),
    }
    if orbax is not None:
        savers[ORBAX], loaders[ORBAX] = orbax
    for verb, work in (("save", savers), ("load", loaders)):
        times = interleaved([Contender(name, run) for name, run in work.items()], rounds=rounds)
        report.timings += [dataclasses.replace(t, name=f"{verb} {size}: {name}") for name, t in times.items()]
        report.rows += _rows(f"{verb} {size}", times)
    files = {OURS: folder / "ours", PLAIN: folder / "plain.eqx", ORBAX: folder / "orbax"}
    report.facts[f"size, {size}"] = ", ".join(f"{name} {_size(path)} bytes" for name, path in files.items())
    report.rows.append(_blocked(f"blocked {size}", ensemble, folder / "run", rounds=rounds))


def _rows(question: str, times: dict[str, Timing]) -> list[Row]:
    """Ours compared with each, and with the faster of the two others."""
    ours, orbax = times[OURS], times.get(ORBAX)
    rows = [compared(question, ours, orbax)]
    for equinox in [times[name] for name in (PLAIN, SYNCED) if name in times]:
        rows.append(compared(question, ours, equinox))
        faster = min([equinox] + [orbax] * (orbax is not None), key=lambda timing: np.median(timing.wall))
        rows.append(compared(f"{question}, the faster of orbax and {equinox.name}", ours, faster, target="<= 1.0"))
    return rows


def _blocked(question: str, ensemble: ee.Ensemble, folder: pathlib.Path, *, rounds: int) -> Row:
    """The share of an asynchronous save that blocks its caller; the save before has ended."""
    ratios = []
    with ee.checkpoint.Checkpoints(folder, last=1, asynchronous=True) as checkpoints:
        for step in range(rounds):
            start = time.perf_counter()
            checkpoints.save(step, ensemble, per_member=True, ids=ensemble.ids)
            blocked = time.perf_counter() - start
            checkpoints.wait()
            ratios.append(blocked / (time.perf_counter() - start))
    return ratio_row(question, "asynchronous save returns / is done", ratios)


def _ensemble(megabytes: float) -> ee.Ensemble:
    width = round((megabytes * 1e6 / (4 * MEMBERS * LAYERS)) ** 0.5)
    return ee.build(lambda key: eqx.nn.MLP(width, width, width, LAYERS - 1, key=key), MEMBERS, key=jax.random.key(0))


def _synced(path: pathlib.Path, tree: Any) -> None:
    with open(path, "wb") as file:
        eqx.tree_serialise_leaves(file, tree)
        file.flush()
        os.fsync(file.fileno())


def _orbax(path: pathlib.Path, tree: Any) -> tuple[Callable, Callable] | None:
    """How Orbax saves and loads the arrays of the tree; `None` if it is not installed."""
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        return None
    arrays = eqx.filter(tree, eqx.is_array)
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays)
    checkpointer = ocp.StandardCheckpointer()

    def save() -> None:
        checkpointer.save(path, arrays, force=True)
        checkpointer.wait_until_finished()

    return save, lambda: jax.tree.leaves(checkpointer.restore(path, shapes))


def _size(path: pathlib.Path) -> int:
    if not path.exists():
        return 0
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    script(measure, amount=("megabytes", 1000.0, 0.5), cores=0)
