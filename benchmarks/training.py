"""Training: `fit` and `make_step` compared with other ways to train, on a tiny and on a middle MLP."""

import dataclasses
import functools as ft
import time
from collections.abc import Callable
from typing import Any

import _by_hand
import _ours
import _peers
import jax
import numpy as np
import optax
from _by_hand import Train
from _measure import ABSENT, Contender, Report, Timing, compared, copying, gemm, interleaved, ratio_row, script
from _problems import Problem, bfloat16_loss, middle, tiny

import eqx_ensemble as ee


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Epochs per run. Slow contenders run fewer: they have no fixed cost per run, and times are per step."""

    fast: int
    slow: int
    slowest: int
    rounds: int


def measure(quick: bool) -> Report:
    report = Report("Training")
    _tiny(report, quick=quick, lengths=Lengths(2, 1, 1, 3) if quick else Lengths(48, 12, 1, 9))
    _middle(report, quick=quick, lengths=Lengths(1, 1, 1, 3) if quick else Lengths(6, 6, 3, 9))
    _full_batch(report, quick=quick)
    _short(report, quick=quick)
    return report


def _tiny(report: Report, *, quick: bool, lengths: Lengths) -> None:
    problem = tiny(quick=quick)
    optimiser = optax.adam(problem.learning_rate)
    _check_losses(report, problem, optimiser)
    contenders = _by_us(problem, optimiser, lengths) + _by_others(problem, optimiser, lengths)
    of_batches = _ours.fit_of_batches(problem, optimiser)
    steps = problem.steps_per_epoch * lengths.slow
    contenders.append(Contender("fit of batches", lambda: of_batches(problem.own_rows(lengths.slow)), steps))
    contenders += _peer(report, problem, "torch.func", lengths.slow, lambda: _peers.torch_func(problem, fused=False))
    contenders += _peer(report, problem, "nnx.vmap", lengths.slow, lambda: _peers.nnx_vmap(problem))
    contenders += _peer(report, problem, "sklearn bagging", lengths.slowest, lambda: _peers.sklearn_bagging(problem))
    times = _named(problem, interleaved(contenders, rounds=lengths.rounds))
    report.timings += times.values()
    asked = [
        ("Python loop of jitted members", "loop of members", "fit, own rows", ">= 30"),
        ("idiomatic step", "idiomatic, own rows", "fit, own rows", ">= 2"),
        ("torch.func on one thread", "torch.func", "fit, own rows", ">= 2"),
        ("fit against a scan by hand", "fit, own rows", "scan by hand, own rows", "<= 1.03"),
        ("a row order of its own per member", "fit, own rows", "fit, rows given", "<= 1.10"),
        ("make_step", "idiomatic, own rows", "make_step, own rows", ">= 1.0"),
        ("an iterable of batches against make_step", "fit of batches", "make_step, own rows", "<= 1.1"),
        ("flax.nnx vmap", "nnx.vmap", "fit, own rows", ""),
        ("scikit-learn's bagging", "sklearn bagging", "fit, own rows", ""),
    ]
    report.rows += _answers(problem, times, asked)
    _one_off_costs(report, problem, optimiser, times["tiny: fit, own rows"])


def _middle(report: Report, *, quick: bool, lengths: Lengths) -> None:
    problem = middle(quick=quick)
    optimiser = optax.adam(problem.learning_rate)
    _check_losses(report, problem, optimiser)
    contenders = _by_us(problem, optimiser, lengths) + _by_others(problem, optimiser, lengths)
    in_turn = _ours.fit(problem, optimiser, epochs=lengths.fast, shuffle=True, plan=ee.plan.Blocks(1))
    contenders.append(Contender("fit, one after another", in_turn, problem.steps_per_epoch * lengths.fast))
    in_bfloat16 = dataclasses.replace(problem, loss=ft.partial(bfloat16_loss, problem.loss))
    if jax.default_backend() != "cpu":
        fit = _ours.fit(in_bfloat16, optimiser, epochs=lengths.fast, shuffle=True)
        contenders.append(Contender("fit, bfloat16", fit, problem.steps_per_epoch * lengths.fast))
    for name, fused in (("torch.func", False), ("torch.func, fused Adam", True)):
        make = ft.partial(_peers.torch_func, problem, fused=fused)
        contenders += _peer(report, problem, name, lengths.slow, make)
    contenders += _peer(report, problem, "nnx.vmap", lengths.slowest, lambda: _peers.nnx_vmap(problem))
    product, flops = gemm("GEMM", problem.num_members * problem.batch_size, *problem.sizes[:2])
    copy, moved = copying("copy", 16 if quick else 256)
    times = _named(problem, interleaved([*contenders, product, copy], rounds=lengths.rounds))
    report.timings += times.values()
    rate = flops / times["middle: GEMM"].wall
    report.facts["the machine in this run"] = (
        f"GEMM {np.median(rate) / 1e9:.3g} GFLOP/s, copy {np.median(moved / times['middle: copy'].wall) / 1e9:.3g} GB/s"
    )
    fits = ("fit, one after another", "fit, own rows")
    for name in (*fits, "scan by hand, own rows", "torch.func, fused Adam"):
        timing = times.get(f"middle: {name}")
        if timing is not None:
            fractions = problem.flops_per_step() / timing.wall / rate
            question, target = f"middle: share of the GEMM rate, {name}", ">= 0.80" if name == fits[0] else ""
            report.rows.append(ratio_row(question, "step's FLOP/s / GEMM's FLOP/s", fractions, target=target))
    asked = [
        ("torch.func with fused Adam", "torch.func, fused Adam", "fit, one after another", ">= 1"),
        ("torch.func with Adam by hand", "torch.func", "fit, one after another", ""),
        ("one after another against a scan by hand", "fit, one after another", "scan by hand, own rows", "<= 1.03"),
        ("torch.func with fused Adam, all members at once", "torch.func, fused Adam", "fit, own rows", ""),
        ("fit against a scan by hand", "fit, own rows", "scan by hand, own rows", "<= 1.03"),
        ("idiomatic step", "idiomatic, own rows", "fit, own rows", ""),
        ("Python loop of jitted members", "loop of members", "fit, own rows", ""),
        ("make_step", "idiomatic, own rows", "make_step, own rows", ""),
        ("flax.nnx vmap", "nnx.vmap", "fit, own rows", ""),
        ("float32 beside bfloat16 with float32 weights", "fit, own rows", "fit, bfloat16", ""),
    ]
    report.rows += _answers(problem, times, asked)


def _full_batch(report: Report, *, quick: bool) -> None:
    """One step per epoch, many epochs: this shows the fixed cost of an epoch."""
    few = tiny(quick=quick)
    few = dataclasses.replace(few, name="full batch", x=few.x[:256], y=few.y[:256], batch_size=256)
    problem, optimiser = few, optax.adam(few.learning_rate)
    lengths = Lengths(4, 1, 1, 3) if quick else Lengths(256, 1, 1, 9)
    contenders = [*_by_us(problem, optimiser, lengths)[:2], *_by_others(problem, optimiser, lengths)[:1]]
    times = _named(problem, interleaved(contenders, rounds=lengths.rounds))
    report.timings += times.values()
    asked = [
        ("fit against a scan by hand", "fit, own rows", "scan by hand, own rows", "<= 1.03"),
    ]
    report.rows += _answers(problem, times, asked)


def _short(report: Report, *, quick: bool) -> None:
    """A fit of 256 steps: this shows the fixed cost of a call."""
    few = tiny(quick=quick)
    problem = few if quick else dataclasses.replace(few, x=few.x[:1024], y=few.y[:1024])
    problem = dataclasses.replace(problem, name="short")
    optimiser = optax.adam(problem.learning_rate)
    lengths = Lengths(2, 1, 1, 3) if quick else Lengths(8, 1, 1, 15)
    contenders = [*_by_us(problem, optimiser, lengths)[:2], *_by_others(problem, optimiser, lengths)[:1]]
    times = _named(problem, interleaved(contenders, rounds=lengths.rounds))
    report.timings += times.values()
    asked = [
        ("fit against a scan by hand", "fit, own rows", "scan by hand, own rows", "<= 1.05"),
        ("the same, rows given", "fit, rows given", "scan by hand, own rows", ""),
    ]
    report.rows += _answers(problem, times, asked)


def _by_us(problem: Problem, optimiser: optax.GradientTransformation, lengths: Lengths) -> list[Contender]:
    steps, slow_steps = (problem.steps_per_epoch * n for n in (lengths.fast, lengths.slow))
    fit = lambda shuffle: _ours.fit(problem, optimiser, epochs=lengths.fast, shuffle=shuffle)
    own_loop = _ours.own_loop(problem, optimiser)
    return [
        Contender("fit, own rows", fit(True), steps),
        Contender("fit, rows given", fit(False), steps),
        Contender("make_step, own rows", lambda: own_loop(problem.own_rows(lengths.slow)), slow_steps),
    ]


def _by_others(problem: Problem, optimiser: optax.GradientTransformation, lengths: Lengths) -> list[Contender]:
    scan, step = _by_hand.scan_of_epoch(problem, optimiser), _by_hand.idiomatic(problem, optimiser)
    loop = _by_hand.loop_of_members(problem, optimiser)
    steps, slow_steps, slowest = (problem.steps_per_epoch * n for n in (lengths.fast, lengths.slow, lengths.slowest))
    return [
        Contender("scan by hand, own rows", lambda: scan(problem.own_rows(lengths.fast)), steps),
        Contender("idiomatic, own rows", lambda: step(problem.own_rows(lengths.slow)), slow_steps),
        Contender("loop of members", lambda: loop(problem.own_rows(lengths.slowest)), slowest),
    ]


def _peer(report: Report, problem: Problem, name: str, epochs: int, make: Callable[[], Train]) -> list[Contender]:
    """A peer as a contender, or none if it is not installed, which the report records."""
    try:
        train = make()
    except ImportError:
        report.facts[f"{problem.name}: {name}"] = ABSENT
        return []
    return [Contender(name, lambda: train(problem.own_rows(epochs)), problem.steps_per_epoch * epochs)]


def _check_losses(report: Report, problem: Problem, optimiser: Any) -> None:
    """Losses before times: on the same rows, all of them must follow the same curve."""
    ours = _ours.fit(problem, optimiser, epochs=2, shuffle=False)().history.loss.T
    in_turn = _ours.fit(problem, optimiser, epochs=2, shuffle=False, plan=ee.plan.Blocks(1))
    rows = list(problem.own_rows(1)) * 2
    others = {
        "fit, one after another": lambda _: [in_turn().history.loss.T],
        "scan by hand": _by_hand.scan_of_epoch(problem, optimiser),
        "idiomatic": _by_hand.idiomatic(problem, optimiser),
        "make_step": _ours.own_loop(problem, optimiser),
        "fit of batches": _ours.fit_of_batches(problem, optimiser),
    }
    try:
        others["torch.func"] = _peers.torch_func(problem, fused=False)
        others["torch.func, fused Adam"] = _peers.torch_func(problem, fused=True)
    except ImportError:
        pass  # reported as absent where it is to be timed
    found = []
    for name, train in others.items():
        losses = np.concatenate([np.reshape(loss, (-1, problem.num_members)) for loss in train(rows)])
        far = float(np.max(np.abs(losses - ours) / np.abs(ours)))
        if far > 1e-2:
            raise AssertionError(f"{problem.name}: the losses of `{name}` are not those of `fit`: {far:.1e} apart")
        found.append(f"{name} {far:.1e}")
    report.facts[f"{problem.name}: largest relative distance of {ours.size} losses from fit's"] = ", ".join(found)


def _one_off_costs(report: Report, problem: Problem, optimiser: Any, steady: Timing) -> None:
    """The fixed costs of a fit: a second call, and everything up to the first step of a first call."""
    one_epoch = _ours.fit(problem, optimiser, epochs=1, shuffle=True)
    times = interleaved([Contender("fit of one epoch", one_epoch)], rounds=7)["fit of one epoch"]
    rest = np.median(times.wall) - problem.steps_per_epoch * np.median(steady.wall)
    report.facts["tiny: a compiled fit without its steps"] = f"{rest * 1e3:.1f} ms"
    jax.clear_caches()
    start = time.perf_counter()
    one_epoch()
    report.facts["tiny: first epoch of a first fit, compiling"] = f"{time.perf_counter() - start:.2f} s"
    step = _by_hand.idiomatic(problem, optimiser)
    start = time.perf_counter()
    jax.block_until_ready(step(problem.own_rows(1)))
    report.facts["tiny: first epoch of the idiomatic step, compiling"] = f"{time.perf_counter() - start:.2f} s"


def _named(problem: Problem, times: dict[str, Timing]) -> dict[str, Timing]:
    full = {f"{problem.name}: {name}": timing for name, timing in times.items()}
    return {name: dataclasses.replace(timing, name=name) for name, timing in full.items()}


def _answers(problem: Problem, times: dict[str, Timing], asked: list[tuple[str, str, str, str]]) -> list[Any]:
    label = lambda name: f"{problem.name}: {name}"
    return [
        compared(label(question), times.get(label(above)), times.get(label(below)), target=target)
        for question, above, below, target in asked
    ]


if __name__ == "__main__":
    script(measure)
