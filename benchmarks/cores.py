"""All cores of a CPU: `fit` beside other ways to train, which have as many cores; sizes of blocks; growth."""

import dataclasses
import functools as ft
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import _by_hand
import _ours
import _peers
import jax
import numpy as np
import optax
from _by_hand import Train
from _measure import ABSENT, Contender, Report, Row, Timing, compared, interleaved, ratio_row, script
from _problems import Problem, block, cnn, middle, tiny

import eqx_ensemble as ee
from eqx_ensemble._cores import num_cores

PARTS = (
    "tiny",
    "patience",
    "mesh",
    "middle",
    "CNN-4",
    "CNN-16",
    "block",
    "sizes-tiny",
    "sizes-middle",
    "members",
    "rows",
)
_STAT = pathlib.Path("/proc/stat")
_ADAM = optax.adam(Problem.learning_rate)  # one object: calls share their compiled programs


def measure(quick: bool, parts: Sequence[str]) -> Report:
    is_child = list(parts) == ["mesh"]
    if is_child:
        jax.config.update("jax_num_cpu_devices", 2)  # before jax is used
    report = Report("All cores of a CPU")
    report.facts["cores"] = str(num_cores())
    for part in parts:
        before = _busy()
        if part == "mesh":
            _mesh(report, quick=quick) if is_child else _in_child(report, quick=quick)
        else:
            _MEASURES[part](report, quick=quick)
        others, seconds = (after - start for after, start in zip(_busy(), before, strict=True))
        report.facts[f"{part}: cores that others kept busy"] = (
            f"{others / seconds:.2f}" if _STAT.exists() else "unknown"
        )
    return report


def _busy() -> tuple[float, float]:
    """The seconds that all cores were busy for other processes, and a clock's; workers of joblib count as others."""
    ticks = [int(x) for x in _STAT.read_text().split("\n")[0].split()[1:9]] if _STAT.exists() else [0] * 8
    own = os.times()
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return busy - sum(own[:4]), time.perf_counter()


def _tiny(report: Report, *, quick: bool) -> None:
    problem = tiny(quick=quick)
    fast, slow, slowest = (2, 1, 1) if quick else (64, 16, 1)
    of_fit = lambda plan: _fit(problem, fast, plan)
    trains = _trains(report, problem)
    lengths = {"scan by hand": fast, "idiomatic": slow, "torch.func": slow}
    contenders = [
        _contender("fit", problem, of_fit(None), fast),
        _contender("fit, Vmap", problem, of_fit(ee.plan.Vmap()), fast),
        _contender("fit, one core", problem, of_fit(ee.plan.Blocks(cores=1)), fast),
        *(_of_rows(name, problem, train, lengths.get(name, slowest)) for name, train in trains.items()),
    ]
    bagging = _present(report, problem, "sklearn bagging", lambda: _peers.sklearn_bagging(problem, jobs=num_cores()))
    contenders += [_of_rows("sklearn bagging", problem, train, 1 if quick else 2) for train in bagging]
    times = _timed(report, problem, contenders, rounds=3 if quick else 7)
    report.rows.append(_ratio(problem, times, "fit", "scan by hand", "<= 0.5"))
    others = [name for name in times if name not in ("fit", "scan by hand")]
    report.rows += [_ratio(problem, times, name, "fit") for name in others]
    if bagging:  # the processes of joblib are not this one's CPU seconds
        report.rows[-1] = dataclasses.replace(report.rows[-1], cpu_ratio=None)


def _patience(report: Report, *, quick: bool) -> None:
    """With validation and patience, where no member stops: a stop would save the time that is to be measured."""
    problem, epochs = tiny(quick=quick), 2 if quick else 64
    held_out = problem.x[-256:], problem.y[-256:]
    fit = _ours.fit(problem, _ADAM, epochs=epochs, validation=held_out, patience=epochs)
    scan = _by_hand.scan_with_patience(problem, _ADAM, held_out, epochs)
    names = "fit, validation and patience", "scan by hand, validation and patience"
    contenders = [_contender(names[0], problem, fit, epochs), _of_rows(names[1], problem, scan, epochs)]
    times = _timed(report, problem, contenders, rounds=3 if quick else 7)
    report.rows.append(_ratio(problem, times, *names, "<= 0.52"))


def _mesh(report: Report, *, quick: bool) -> None:
    """Virtual devices change the process: a process of its own, which has its own `fit` without a mesh."""
    problem, epochs = tiny(quick=quick), 2 if quick else 32
    on_mesh = _ours.fit(problem, _ADAM, epochs=epochs, mesh=ee.make_mesh(members=2))
    contenders = [
        _contender("fit beside a mesh", problem, _fit(problem, epochs, None), epochs),
        _contender("fit on a mesh of two CPU devices", problem, on_mesh, epochs),
    ]
    times = _timed(report, problem, contenders, rounds=3 if quick else 7)
    report.rows.append(_ratio(problem, times, "fit on a mesh of two CPU devices", "fit beside a mesh"))


def _in_child(report: Report, *, quick: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "mesh.json")
        command = [sys.executable, __file__, "--parts", "mesh", "--json", str(path)]
        subprocess.run(command + ["--quick"] * quick, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(path.read_text())["results"]
    report.rows += [Row(**{k: v for k, v in row.items() if k != "verdict"}) for row in found["rows"]]
    arrays = lambda t: (np.array(t["wall"]), np.array(t["cpu"]))
    report.timings += [Timing(t["name"], *arrays(t)) for t in found["seconds per unit"]]


def _beside_others(report: Report, problem: Problem, epochs: int, *, quick: bool) -> None:
    """`fit` beside the best of the others."""
    trains = _trains(report, problem)
    contenders = [_contender("fit", problem, _fit(problem, epochs, None), epochs)]
    slow = ("scan by hand", "loop of members") if problem.name.startswith("CNN") else ()
    contenders += [
        _of_rows(name, problem, train, 1 if name in slow else epochs)
        for name, train in trains.items()
        if name != "idiomatic"
    ]
    times = _timed(report, problem, contenders, rounds=3 if quick else 7)
    others = sorted([name for name in times if name != "fit"], key=lambda name: float(np.median(times[name].wall)))
    best = _ratio(problem, times, others[0], "fit", ">= 1.1" if slow else ">= 1.05")
    report.rows.append(dataclasses.replace(best, question=f"{problem.name}: the best of the others, {others[0]}"))
    report.rows += [_ratio(problem, times, name, "fit") for name in others[1:]]


def _middle(report: Report, *, quick: bool) -> None:
    if not quick:
        _beside_others(report, middle(quick=False), 8, quick=False)


def _cnn(report: Report, *, count: int, quick: bool) -> None:
    _beside_others(report, cnn(2 if quick else count, quick=quick), 1 if quick else 100, quick=quick)


def _cnn_of_16(report: Report, *, quick: bool) -> None:
    if not quick:
        _cnn(report, count=16, quick=False)


def _block(report: Report, *, quick: bool) -> None:
    if not quick:
        _beside_others(report, block(quick=False), 1, quick=False)


def _sizes(report: Report, *, make: Callable[..., Problem], epochs: int, quick: bool) -> None:
    """The size of blocks that follows from the cache, beside others."""
    problem = make(quick=quick)
    sizes = (1,) if quick else tuple(size for size in (1, 4, 8, 16, 32) if size <= problem.num_members)
    plans = {"Vmap": ee.plan.Vmap(), **{f"Blocks({size})": ee.plan.Blocks(size) for size in sizes}}
    contenders = [_contender(name, problem, _fit(problem, epochs, plan), epochs) for name, plan in plans.items()]
    contenders.append(_contender("fit", problem, _fit(problem, epochs, None), epochs))
    times = _timed(report, problem, contenders, rounds=3 if quick else 7)
    best = min(plans, key=lambda name: float(np.median(times[name].wall)))
    row = _ratio(problem, times, "fit", best, "<= 1.05")
    report.rows.append(dataclasses.replace(row, question=f"{problem.name}: the default / the best size, {best}"))
    report.rows += [_ratio(problem, times, name, "fit") for name in plans if name != best]


def _members(report: Report, *, quick: bool) -> None:
    """The time of one member's step, for more and more members."""
    counts = (4,) if quick else (8, 64, 512, 4096, 32768)
    steps = {n: 8 if quick else max(2**18 // n, 48) for n in counts}
    problem = tiny(quick=quick)
    for where, plan in (("one core", ee.plan.Blocks(cores=1)), ("all cores", None)):
        contenders = []
        for n in counts:
            fit = _ours.fit(dataclasses.replace(problem, num_members=n), _ADAM, steps=steps[n], plan=plan)
            contenders.append(Contender(f"{n} members, {where}", fit, n * steps[n]))
        times = _timed(report, problem, contenders, rounds=3)
        report.rows.append(_growth(f"tiny, {counts[0]} to {counts[-1]} members, {where}", times, "<= 1.15"))


def _rows(report: Report, *, quick: bool) -> None:
    """The same number of steps on more and more rows, which are jax arrays before."""
    counts, steps = ((256,), 8) if quick else ((10**4, 10**5, 10**6, 10**7), 2048)
    problem, contenders = tiny(quick=quick), []
    for n in counts:
        x = jax.random.normal(jax.random.key(1), (n, 13))
        data: Any = dataclasses.replace(problem, x=x, y=jax.numpy.sin(x[:, 0]))
        fit = _ours.fit(data, _ADAM, steps=steps)
        contenders.append(Contender(f"{n} rows, all cores", fit, problem.num_members * steps))
    times = _timed(report, problem, contenders, rounds=3 if quick else 7)
    report.rows.append(_growth(f"tiny, {counts[0]} to {counts[-1]} rows, all cores", times, "<= 1.2"))


def _growth(question: str, times: dict[str, Timing], target: str) -> Row:
    """The largest time of a member's step over the smallest, from medians."""
    wall, cpu = ([float(np.median(getattr(t, what))) for t in times.values()] for what in ("wall", "cpu"))
    row = ratio_row(question, "largest / smallest time of a member's step", [max(wall) / min(wall)], target=target)
    return dataclasses.replace(row, cpu_ratio=max(cpu) / min(cpu))


def _fit(problem: Problem, epochs: int, plan: Any) -> Callable[[], ee.Run]:
    return _ours.fit(problem, _ADAM, epochs=epochs, plan=plan)


def _contender(name: str, problem: Problem, run: Callable[[], Any], epochs: int) -> Contender:
    return Contender(name, run, problem.steps_per_epoch * epochs)


def _of_rows(name: str, problem: Problem, train: Train, epochs: int) -> Contender:
    return _contender(name, problem, lambda: train(problem.own_rows(epochs)), epochs)


def _trains(report: Report, problem: Problem) -> dict[str, Train]:
    """What trains on given rows, after a look at its losses, which must follow those of `fit`."""
    threads = num_cores()
    trains = {
        "scan by hand": _by_hand.scan_of_epoch(problem, _ADAM),
        "idiomatic": _by_hand.idiomatic(problem, _ADAM),
        "loop of members": _by_hand.loop_of_members(problem, _ADAM),
    }
    makes = {
        "torch.func": lambda: _peers.torch_func(problem, fused=True, threads=threads),
        "torch loop": lambda: _peers.torch_loop(problem, threads=threads),
    }
    for name, make in makes.items():
        trains.update((name, train) for train in _present(report, problem, name, make))
    ours, rows = _ours.fit(problem, _ADAM, epochs=1, shuffle=False)().history.loss.T, list(problem.own_rows(1))
    found = []
    for name, train in trains.items():
        losses = np.concatenate([np.ravel(loss) for loss in train(rows)]).reshape(ours.shape)
        far = float(np.max(np.abs(losses - ours) / np.abs(ours)))
        if far > 1e-2:
            raise AssertionError(f"{problem.name}: the losses of `{name}` are not those of `fit`: {far:.1e} apart")
        found.append(f"{name} {far:.1e}")
    report.facts[f"{problem.name}: largest relative distance of {ours.size} losses from fit's"] = ", ".join(found)
    return trains


def _present(report: Report, problem: Problem, name: str, make: Callable[[], Train]) -> list[Train]:
    try:
        return [make()]
    except ImportError:
        report.facts[f"{problem.name}: {name}"] = ABSENT
        return []


def _timed(report: Report, problem: Problem, contenders: list[Contender], *, rounds: int) -> dict[str, Timing]:
    times = interleaved(contenders, rounds=rounds)
    report.timings += [dataclasses.replace(t, name=f"{problem.name}: {name}") for name, t in times.items()]
    return times


def _ratio(problem: Problem, times: dict[str, Timing], above: str, below: str, target: str = "") -> Row:
    row = compared(f"{problem.name}: {above} / {below}", times.get(above), times.get(below), target=target)
    return dataclasses.replace(row, question=f"{problem.name}: {above if below == 'fit' else row.ratio_of}")


_MEASURES: dict[str, Callable[..., None]] = {
    "tiny": _tiny,
    "patience": _patience,
    "middle": _middle,
    "CNN-4": ft.partial(_cnn, count=4),
    "CNN-16": _cnn_of_16,
    "block": _block,
    "sizes-tiny": ft.partial(_sizes, make=tiny, epochs=16),
    "sizes-middle": ft.partial(_sizes, make=middle, epochs=1),
    "members": _members,
    "rows": _rows,
}

if __name__ == "__main__":
    script(measure, parts=PARTS, cores=0)
