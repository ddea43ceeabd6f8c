"""Which plan is the fastest? Every plan on five kinds of models, compared with hand-written code."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import _by_hand
import _ours
import jax
import numpy as np
import optax
from _measure import Contender, Report, compared, interleaved, script
from _problems import Problem, block, cnn, middle, recurrent, tiny

import eqx_ensemble as ee

LOOPS = ("Vmap", "Chunked", "Sequential")
ALL = (*LOOPS, "Unrolled")


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, its epochs per run (of `fit`, of the idiomatic step), and the target ratio to the latter."""

    problem: Problem
    epochs: tuple[int, int]
    plans: tuple[str, ...]
    target: str = ""


def measure(quick: bool) -> Report:
    report = Report("Plans")
    for case in _smallest() if quick else _cases():
        _measure_case(report, case, rounds=3 if quick else 7)
    return report


def _cases() -> list[Case]:
    """All plans, except `Unrolled` for 64 members, which takes minutes to compile."""
    return [
        Case(tiny(quick=False), (24, 6), LOOPS, ">= 2"),
        Case(middle(quick=False), (2, 2), ALL),
        Case(block(quick=False), (3, 3), ALL, ">= 1.45"),
        Case(recurrent(quick=False), (6, 3), ALL),
        Case(cnn(4, quick=False), (4, 2), ALL, ">= 1.5"),  # 8 steps: a short run
        Case(cnn(16, quick=False), (1, 1), ALL, ">= 1.5"),
    ]


def _smallest() -> list[Case]:
    """Every plan, and a model with convolutions, but not all pairs: most of the time here is compilation."""
    return [Case(tiny(quick=True), (1, 1), ALL), Case(cnn(2, quick=True), (1, 1), ("Sequential",))]


def _measure_case(report: Report, case: Case, *, rounds: int) -> None:
    problem = case.problem
    optimiser = optax.adam(problem.learning_rate)
    plans = _plans(problem, case.plans)
    fits = {
        name: _ours.fit(problem, optimiser, epochs=case.epochs[0], shuffle=False, plan=plan)
        for name, plan in plans.items()
    }
    _first_runs(report, problem, optimiser, fits)
    steps, slow_steps = (problem.steps_per_epoch * epochs for epochs in case.epochs)
    step, loop = _by_hand.idiomatic(problem, optimiser), _by_hand.loop_of_members(problem, optimiser)
    contenders = [Contender(name, fit, steps) for name, fit in fits.items()]
    contenders += [
        Contender("idiomatic", lambda: step(problem.own_rows(case.epochs[1])), slow_steps),
        Contender("loop of members", lambda: loop(problem.own_rows(1)), problem.steps_per_epoch),
    ]
    times = interleaved(contenders, rounds=rounds)
    times = {name: dataclasses.replace(t, name=f"{problem.name}: {name}") for name, t in times.items()}
    report.timings += times.values()
    best = min(plans, key=lambda name: np.median(times[name].wall))
    asked = [("idiomatic", case.target), ("loop of members", "")]
    asked += [(name, "") for name in plans if name != best]
    report.rows += [
        compared(f"{problem.name}: {name} / best plan", times.get(name), times[best], target=target)
        for name, target in asked
    ]


def _plans(problem: Problem, names: tuple[str, ...]) -> dict[str, Any]:
    size = max(problem.num_members // 4, 2)
    known = {
        "Vmap": ee.plan.Vmap(),
        "Chunked": ee.plan.Chunked(size),
        "Sequential": ee.plan.Sequential(),
        "Unrolled": ee.plan.Unrolled(),
    }
    return {f"Chunked({size})" if name == "Chunked" else name: known[name] for name in names}


def _first_runs(report: Report, problem: Problem, optimiser: Any, fits: dict[str, Callable[[], ee.Run]]) -> None:
    """Losses before times: every plan must follow the idiomatic step; and what each costs to compile."""
    idiomatic = _by_hand.idiomatic(problem, optimiser)
    seconds, losses = _twice(lambda: jax.block_until_ready(idiomatic(problem.own_rows(1))))
    expected = np.stack([np.asarray(loss) for loss in losses])
    compiling, apart = [f"idiomatic {seconds:.2f}"], []
    ee.train.init(problem.ensemble(), optimiser, key=jax.random.key(0))  # compiled once for all plans
    for name, fit in fits.items():
        seconds, run = _twice(fit)
        far = float(np.max(np.abs(run.history.loss.T[: len(expected)] - expected) / np.abs(expected)))
        if far > 1e-2:
            raise AssertionError(f"{problem.name}: losses under {name} are not the idiomatic step's: {far:.1e} apart")
        compiling.append(f"{name} {seconds:.2f}")
        apart.append(f"{name} {far:.1e}")
    report.facts[f"{problem.name}: CPU seconds that a first run takes more than a second"] = ", ".join(compiling)
    report.facts[f"{problem.name}: relative distance of {expected.size} losses from the idiomatic"] = ", ".join(apart)


def _twice(run: Callable[[], Any]) -> tuple[float, Any]:
    """How many CPU seconds more a first run takes than a second, and what it returns."""
    times = [time.process_time()]
    for _ in range(2):
        result = run()
        times.append(time.process_time())
    return 2 * times[1] - times[0] - times[2], result


if __name__ == "__main__":
    script(measure)
