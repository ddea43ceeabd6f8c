"""Training: `fit` beside other ways to train, which have as many cores; all cores, and then one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import _by_hand
import _peers
import numpy as np
from _by_hand import Train
from _measure import ABSENT, Contender, Report, Row, Timing, compared, in_child, interleaved, script
from _problems import Problem, cnn, middle, tiny

import eqx_ensemble as ee
from eqx_ensemble._cores import num_cores


def measure(quick: bool, parts: Sequence[str]) -> Report:
    report = Report("Training on the cores of a CPU")
    report.facts["cores"] = str(num_cores())
    for part in [part for part in parts if part != "one core"]:
        PARTS[part](report, quick=quick)
    if "one core" in parts:
        _on_one_core(report, quick=quick)
    return report


def _tiny(report: Report, *, quick: bool) -> None:
    problem = tiny(quick=quick)
    fast, slow, slowest = (2, 1, 1) if quick else (64, 8, 1)
    trains = _trains(report, problem)
    lengths = {"scan by hand": fast, "idiomatic": slow, "torch.func": slow}
    contenders = [_contender("fit", problem, problem.fit(epochs=fast), fast)]
    if num_cores() > 1:
        fit = problem.fit(epochs=fast, plan=ee.plan.Blocks(cores=1))
        contenders.append(_contender("fit, Blocks(cores=1)", problem, fit, fast))
    contenders += [_of_rows(name, problem, train, lengths.get(name, slowest)) for name, train in trains.items()]
    bagging = _present(report, problem, "sklearn bagging", lambda: _peers.sklearn_bagging(problem, jobs=num_cores()))
    contenders += [_of_rows("sklearn bagging", problem, train, 1 if quick else 2) for train in bagging]
    times = _timed(report, problem, contenders, rounds=3 if quick else 7)
    report.rows.append(_ratio(problem, times, "fit", "scan by hand", "<= 0.5" if num_cores() > 1 else "<= 1.03"))
    others = [name for name in times if name not in ("fit", "scan by hand")]
    report.rows += [_ratio(problem, times, name, "fit") for name in others]
    if bagging:  # the processes of joblib are not this one's CPU seconds
        report.rows[-1] = dataclasses.replace(report.rows[-1], cpu_ratio=None)


def _patience(report: Report, *, quick: bool) -> None:
    """With validation and patience, where no member stops: a stop would save the time that is to be measured."""
    problem, epochs = tiny(quick=quick), 2 if quick else 64
    held_out = problem.x[-256:], problem.y[-256:]
    fit = problem.fit(epochs=epochs, validation=held_out, patience=epochs)
    scan = _by_hand.scan_with_patience(problem, held_out, epochs)
    names = "fit, validation and patience", "scan by hand, validation and patience"
    contenders = [_contender(names[0], problem, fit, epochs), _of_rows(names[1], problem, scan, epochs)]
    times = _timed(report, problem, contenders, rounds=3 if quick else 7)
    report.rows.append(_ratio(problem, times, *names, "<= 0.52" if num_cores() > 1 else ""))


def _beside_others(report: Report, problem: Problem, lengths: dict[str, int], target: str, *, quick: bool) -> None:
    """`fit` beside the best of the others, all for so many epochs."""
    trains, epochs = _trains(report, problem), lambda name: 1 if quick else lengths.get(name, lengths[""])
    contenders = [_contender("fit", problem, problem.fit(epochs=epochs("fit")), epochs("fit"))]
    contenders += [_of_rows(name, problem, train, epochs(name)) for name, train in trains.items()]
    times = _timed(report, problem, contenders, rounds=3 if quick else 7)
    others = sorted([name for name in times if name != "fit"], key=lambda name: float(np.median(times[name].wall)))
    best = _ratio(problem, times, others[0], "fit", target)
    report.rows.append(dataclasses.replace(best, question=f"{problem.name}: the best of the others, {others[0]}"))
    report.rows += [_ratio(problem, times, name, "fit") for name in others[1:]]


def _middle(report: Report, *, quick: bool) -> None:
    lengths = {"": 4 if num_cores() > 1 else 2, "idiomatic": 1, "loop of members": 1}
    _beside_others(report, middle(quick=quick), lengths, ">= 1.05", quick=quick)


def _cnn(report: Report, *, quick: bool) -> None:
    lengths = {"": 40, "scan by hand": 1, "idiomatic": 2, "loop of members": 2}
    _beside_others(report, cnn(quick=quick), lengths, ">= 1.1", quick=quick)


def _on_one_core(report: Report, *, quick: bool) -> None:
    """A process of its own stays on one core."""
    found = in_child(__file__, "--cores", "1", "--parts", "tiny", "middle", *["--quick"] * quick)
    report.rows += [dataclasses.replace(row, question=f"one core, {row.question}") for row in found.rows]
    report.timings += [dataclasses.replace(t, name=f"one core, {t.name}") for t in found.timings]


def _contender(name: str, problem: Problem, run: Callable[[], Any], epochs: int) -> Contender:
    return Contender(name, run, problem.steps_per_epoch * epochs)


def _of_rows(name: str, problem: Problem, train: Train, epochs: int) -> Contender:
    return _contender(name, problem, lambda: train(problem.own_rows(epochs)), epochs)


def _trains(report: Report, problem: Problem) -> dict[str, Train]:
    """What trains on given rows, after a look at its losses, which must follow those of `fit`."""
    threads = num_cores()
    trains = {
        "scan by hand": _by_hand.scan_of_epoch(problem),
        "idiomatic": _by_hand.idiomatic(problem),
        "loop of members": _by_hand.loop_of_members(problem),
    }
    makes = {
        "torch.func": lambda: _peers.torch_func(problem, threads=threads),
        "torch loop": lambda: _peers.torch_loop(problem, threads=threads),
    }
    for name, make in makes.items():
        trains.update((name, train) for train in _present(report, problem, name, make))
    ours, rows = problem.fit(epochs=1, shuffle=False)().history.loss.T, list(problem.own_rows(1))
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


PARTS: dict[str, Callable[..., None]] = {"tiny": _tiny, "patience": _patience, "middle": _middle, "CNN": _cnn}

if __name__ == "__main__":
    script(measure, parts=(*PARTS, "one core"), cores=0)
