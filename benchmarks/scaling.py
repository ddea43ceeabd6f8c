"""Scaling: one set of members on more devices, more members on more devices, more members on one; and what is sent.

On a CPU the devices are virtual and share its cores. A spin test with as many threads as
devices measures what its cores can do at most. `docs/scale.md` says what follows for a choice of axes.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import _ours
import equinox as eqx
import jax
import numpy as np
import optax
from _measure import Contender, Report, Row, Timing, compared, interleaved, ratio_row, script
from _problems import Problem, cnn, middle, tiny

import eqx_ensemble as ee

COUNTS = (1, 2, 4)
SPIN = bytes(2**20)
MESHES = {
    "members 4": {"members": 4},
    "members 2, data 2": {"members": 2, "data": 2},
    "data 4": {"members": 1, "data": 4},
}


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Epochs per run of `fit` and of `make_step`, and rounds."""

    fit: int
    step: int
    rounds: int


def measure(quick: bool) -> Report:
    jax.config.update("jax_num_cpu_devices", max(COUNTS))  # before jax is used; what is no CPU has as many as it has
    report = Report("Scaling")
    report.facts["devices"] = f"{jax.device_count()} ({jax.default_backend()})"
    _ladder(report, quick=quick)
    if quick:
        _over_devices(report, "strong", dict.fromkeys((1, 4), tiny(quick=True)), Lengths(1, 1, 3))
    else:
        _tiny(report)
        _middle(report)
        _line_search(report)
    _sent(report, quick=quick)
    return report


def _tiny(report: Report) -> None:
    problem, lengths = tiny(quick=False), Lengths(8, 2, 7)
    _over_devices(report, "strong", dict.fromkeys(COUNTS, problem), lengths)
    _over_devices(report, "64 a device", {n: _of(problem, 64 * n) for n in COUNTS}, lengths)


def _middle(report: Report) -> None:
    problem, lengths = middle(quick=False), Lengths(1, 1, 7)
    _over_devices(report, "strong", dict.fromkeys(COUNTS, problem), lengths)
    _over_devices(report, "4 a device", {n: _of(problem, 4 * n) for n in COUNTS}, lengths)
    _over_devices(report, "rows over devices", dict.fromkeys(COUNTS, _of(problem, 4)), lengths, axis="data")


def _of(problem: Problem, num_members: int) -> Problem:
    return dataclasses.replace(problem, num_members=num_members)


def _over_devices(
    report: Report, what: str, problems: dict[int, Problem], lengths: Lengths, *, axis: str = "members"
) -> None:
    """The problem of each number of devices, per member and step, compared with one device; a spin test."""
    first, optimiser = problems[1], optax.adam(problems[1].learning_rate)
    label = lambda name: f"{first.name}, {what}: {name}"
    contenders = [*_spins(problems), *_ways(first, optimiser, lengths, None, "no mesh")]
    for n, problem in problems.items():
        if (mesh := _mesh(**{"members": 1, axis: n})) is not None:
            _check_losses(problem, optimiser, mesh)
            contenders += _ways(problem, optimiser, lengths, mesh, f"mesh of {n}")
    times = interleaved([dataclasses.replace(c, name=label(c.name)) for c in contenders], rounds=lengths.rounds)
    report.timings += times.values()
    for way in ("fit", "make_step"):
        timing = lambda name, way=way: times.get(label(f"{way}, {name}"))
        alone = timing("no mesh")
        report.rows.append(compared(label(f"{way}, a mesh of one device costs"), timing("mesh of 1"), alone))
        for n in (n for n in problems if n > 1):
            question = label(f"{way}, speed-up by {n} devices")
            report.rows.append(compared(question, alone, timing(f"mesh of {n}")))
            report.rows.append(_share(question, n, times, label, alone, timing(f"mesh of {n}")))


def _ways(problem: Problem, optimiser: Any, lengths: Lengths, mesh: Any, where: str) -> list[Contender]:
    fit = _ours.fit(problem, optimiser, epochs=lengths.fit, shuffle=True, mesh=mesh)
    loop = _ours.own_loop(problem, optimiser, mesh=mesh)
    units = problem.steps_per_epoch * problem.num_members
    return [
        Contender(f"fit, {where}", fit, units * lengths.fit),
        Contender(f"make_step, {where}", lambda: loop(problem.own_rows(lengths.step)), units * lengths.step),
    ]


def _share(
    question: str, n: int, times: dict[str, Timing], label: Callable, alone: Timing | None, on_n: Timing | None
) -> Row:
    """The speed-up as a share of that of so many threads on a CPU; of the number of devices elsewhere."""
    question = question.replace("speed-up", "share of what is there reached")
    if alone is None or on_n is None:
        return compared(question, on_n, alone)
    one, many = (times.get(label(f"spin, {k} threads")) for k in (1, n))
    there = np.full_like(alone.wall, n) if one is None or many is None else one.wall / many.wall
    of = "devices" if one is None else f"a spin test's on {n} threads, {np.median(there):.3g}"
    return ratio_row(question, f"speed-up / {of}", alone.wall / on_n.wall / there)


def _spins(counts: Any) -> list[Contender]:
    """Hashing in threads, which holds no lock: the number of cores that are really available. CPU only."""
    if jax.default_backend() != "cpu":
        return []
    pool = ThreadPoolExecutor(max(counts))
    work = lambda _: [hashlib.sha256(SPIN).digest() for _ in range(32)]
    return [Contender(f"spin, {n} threads", lambda n=n: list(pool.map(work, range(n))) and None, n) for n in counts]


def _mesh(**shape: int) -> Any:
    """A mesh, or nothing where there are too few devices."""
    needed = int(np.prod(list(shape.values())))
    return ee.make_mesh(**shape) if needed <= jax.device_count() else None


def _check_losses(problem: Problem, optimiser: Any, mesh: Any) -> None:
    """Losses before times."""
    losses = lambda mesh: _ours.fit(problem, optimiser, epochs=1, shuffle=True, mesh=mesh)().history.loss
    expected, found = losses(None), losses(mesh)
    far = float(np.max(np.abs(found - expected) / np.abs(expected)))
    if far > 1e-3:
        raise AssertionError(f"{problem.name}: losses on {dict(mesh.shape)} are {far:.1e} from those without a mesh")


def _ladder(report: Report, *, quick: bool) -> None:
    """More and more members on the default device, compared with one."""
    on_cpu = jax.default_backend() == "cpu"
    of = lambda problem, *counts: dict.fromkeys(counts[:2] if quick else counts, problem)
    images = {n: cnn(n, quick=quick) for n in ((1,) if quick else (1, 4, 16))}
    _rungs(report, of(tiny(quick=quick), 1, 16, 64, 256, 1024), 2 if quick else 48, target=not on_cpu)
    if not quick:
        _rungs(report, of(middle(quick=False), 1, 4, 16, 64), 3)
    _rungs(report, images, 2)


def _rungs(report: Report, problems: dict[int, Problem], epochs: int, *, target: bool = False) -> None:
    first, contenders = problems[1], []
    optimiser = optax.adam(first.learning_rate)
    kind = "CNN" if first.name.startswith("CNN") else first.name
    label = lambda n: f"{kind}, {n} member{'s' * (n > 1)}"
    for n, problem in problems.items():
        # On a CPU a run of many members is long enough sooner; elsewhere the fixed costs of a run would show.
        length = max(1, epochs * 16 // max(16, n)) if jax.default_backend() == "cpu" else epochs
        fit = _ours.fit(_of(problem, n), optimiser, epochs=length)
        contenders.append(Contender(label(n), fit, problem.steps_per_epoch * length))
    times = interleaved(contenders, rounds=3 if len(problems) < 3 else 7)
    report.timings += times.values()
    for n in problems:
        if n > 1:
            limit = "<= 2" if target and n == 64 else ""
            question = f"{label(n)}: a step of all / a step of one"
            report.rows.append(compared(question, times[label(n)], times[label(1)], target=limit))


def _sent(report: Report, *, quick: bool) -> None:
    """The communication of the compiled step, and the bytes on a device."""
    problem = _of(tiny(quick=True) if quick else middle(quick=False), 4)
    optimiser = optax.adam(problem.learning_rate)
    names = list(MESHES)[:1] if quick else list(MESHES)
    batch = problem.x[: problem.batch_size], problem.y[: problem.batch_size]
    for name in names:
        mesh, label = _mesh(**MESHES[name]), f"{problem.name}, 4 members on {name}"
        if mesh is None:
            report.rows.append(compared(f"{label}: bytes sent a step", None, None))
            continue
        ensemble = problem.ensemble(mesh)
        state = ee.train.init(ensemble, optimiser, key=jax.random.key(0))
        step = ee.train.make_step(problem.loss, optimiser, mesh=mesh)
        found = _collectives(_text(step, state, batch))
        weights = _bytes(ensemble) // mesh.shape["members"]
        _say_sent(report, label, found, weights, parts=mesh.shape["data"])
        whole = _bytes(state)
        held = max(_held(state).values())
        report.rows.append(ratio_row(f"{label}: state that a device holds", "a device's bytes / all", [held / whole]))


def _say_sent(report: Report, label: str, found: list, weights: int, *, parts: int) -> None:
    sent = sum(_by_ring(kind, size, parts) for kind, size in found)
    report.facts[f"{label}: a step sends"] = f"{_shown(found)}; {sent:,.0f} bytes leave each device of a ring"
    if parts == 1:
        row = Row(f"{label}: bytes sent a step", "bytes", float(sent), None, None, None, "<= 0")
    else:
        least = weights * 2 * (parts - 1) / parts
        row = ratio_row(f"{label}: bytes sent a step", "sent / least for the gradients", [sent / least])
    report.rows.append(row)


def _line_search(report: Report) -> None:
    """A loop that runs until all members are done needs communication at every iteration."""
    problem, mesh, optimiser = _of(tiny(quick=False), 4), _mesh(members=4), optax.lbfgs()
    if mesh is None:
        return
    state = ee.train.init(problem.ensemble(mesh), optimiser, key=jax.random.key(0))
    step = ee.train.make_step(problem.loss, optimiser, mesh=mesh)
    report.facts["tiny, 4 members on members 4: a step of L-BFGS sends, at each turn of its line search"] = _shown(
        _collectives(_text(step, state, (problem.x[:32], problem.y[:32])))
    )


def _by_ring(kind: str, size: int, parts: int) -> float:
    """The bytes that each of `parts` devices sends around a ring, whose result has `size` bytes on each of them."""
    factor = {"all-reduce": 2 / parts, "all-gather": 1 / parts, "all-to-all": 1 / parts, "reduce-scatter": 1.0}
    return size * factor.get(kind, 1 / max(parts - 1, 1)) * (parts - 1)


def _text(fn: Callable, *args: Any) -> str:
    """The optimised program of `fn(*args)` for one device."""
    return eqx.filter_jit(fn).lower(*args).compile().compiled.as_text()


_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"


def _collectives(text: str) -> list[tuple[str, int]]:
    """The kind of each collective of a program, and the bytes of its result on one device."""
    found = []
    for shapes, kind in re.findall(rf"= (.*?) ({_KINDS})(?:-start)?\(", text):
        arrays = re.findall(r"\b(?:pred|[a-z]+([0-9]+)[a-z0-9]*)\[([0-9,]*)\]", shapes)
        counts = (math.prod(int(size) for size in dims.split(",") if size) for _, dims in arrays)
        found.append(
            (kind, sum(n * (int(bits) if bits else 8) // 8 for n, (bits, _) in zip(counts, arrays, strict=True)))
        )
    return found


def _held(tree: Any) -> dict[Any, int]:
    """The bytes on each device."""
    held: dict[Any, int] = {}
    for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)):
        for part in x.addressable_shards:
            held[part.device] = held.get(part.device, 0) + part.data.nbytes
    return held


def _shown(found: list) -> str:
    """The bytes of each kind."""
    kinds = sorted({kind for kind, _ in found})
    return ", ".join(f"{kind} of {sum(b for k, b in found if k == kind):,} B" for kind in kinds) or "nothing"


def _bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


if __name__ == "__main__":
    script(measure, cores=0)
