"""How much memory does a plan need? The peak of a training step, and of a whole `fit`, under each plan."""

import json
import sys
from collections.abc import Callable
from typing import Any

import _ours
import equinox as eqx
import jax
import numpy as np
import optax
from _measure import ABSENT, Report, ratio_row, script
from _memory import UNKNOWN, estimate, in_child, peak
from _problems import Problem, deep

import eqx_ensemble as ee

PLANS = {
    "Vmap": ee.plan.Vmap(),
    "Chunked(8)": ee.plan.Chunked(8),
    "Sequential": ee.plan.Sequential(),
}
WORK = ("step", "fit")


def measure(quick: bool) -> Report:
    report = Report("Memory of training")
    size, plans = ("quick", ("Vmap", "Sequential")) if quick else ("full", tuple(PLANS))
    rounds = [
        {(work, plan): in_child(__file__, work, plan, size) for work in WORK for plan in plans}
        for _ in range(1 if quick else 3)  # hardly anything changes between them
    ]
    problem = deep(quick=quick)
    report.facts["members"] = f"{problem.num_members} MLPs {'-'.join(map(str, problem.sizes))}, {len(problem.x)} rows"
    report.facts["weights and Adam's moments"] = f"{_state_bytes(problem) / 2**20:.1f} MiB"
    if rounds[0]["step", "Vmap"]["peak"] is None:
        report.facts["peak resident memory"] = f"{ABSENT}: {UNKNOWN}"
        return report
    peaks = {way: np.array([found[way]["peak"] for found in rounds], float) for way in rounds[0]}
    for (work, plan), found in peaks.items():
        report.facts[f"{work}, {plan}: peak above what was there"] = f"{np.median(found) / 2**20:.1f} MiB"
        if plan != "Vmap":
            ratio = peaks[work, "Vmap"] / found
            report.rows.append(ratio_row(f"{work}: peak resident memory", f"Vmap / {plan}", ratio))
    for plan in plans:
        sizes = rounds[0]["step", plan]["estimate"]
        if sizes is None:
            report.facts[f"step, {plan}: the compiler's estimate"] = ABSENT
            continue
        words = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items())
        report.facts[f"step, {plan}: the compiler's estimate"] = words
        ratio = peaks["step", plan] / sum(sizes.values())
        report.rows.append(ratio_row(f"step, {plan}: is the estimate true?", "measured / estimated", ratio))
    return report


def _state_bytes(problem: Problem) -> int:
    weights = sum(x.nbytes for x in jax.tree.leaves(problem.ensemble().stacked) if eqx.is_inexact_array(x))
    return 3 * weights


def _child(work: str, plan: str, size: str) -> None:
    """Prints what one step or one `fit` needs; a call before it compiles, and its results are dropped."""
    problem = deep(quick=size == "quick")
    run, estimated = (_step if work == "step" else _fit)(problem, PLANS[plan])
    jax.block_until_ready(run())
    print(json.dumps({"peak": peak(run), "estimate": estimated}))


def _step(problem: Problem, plan: ee.plan.AbstractPlan) -> tuple[Callable[[], Any], Any]:
    optimiser = optax.adam(problem.learning_rate)
    state = ee.train.init(problem.ensemble(), optimiser, key=jax.random.key(0))
    batch = jax.device_put((problem.x, problem.y))
    step = ee.train.make_step(problem.loss, optimiser, plan=plan)
    compiled = eqx.filter_jit(lambda state, batch: step(state, batch)).lower(state, batch).compile()
    return lambda: compiled(state, batch), estimate(compiled.compiled)


def _fit(problem: Problem, plan: ee.plan.AbstractPlan) -> tuple[Callable[[], Any], Any]:
    optimiser = optax.adam(problem.learning_rate)
    return _ours.fit(problem, optimiser, epochs=8, shuffle=True, plan=plan), None


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _child(*sys.argv[2:])
    else:
        script(measure)
