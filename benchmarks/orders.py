"""Row orders: what do they cost in a step, on many rows, and for many members?

The peer is NumPy: a permutation of all rows for each member and epoch, drawn on the host.
"""

import dataclasses
import functools as ft
from typing import Any

import _by_hand
import _ours
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Contender, Report, compared, interleaved, script
from _memory import estimate
from _problems import Problem, tiny

import eqx_ensemble as ee
from eqx_ensemble.train.compiled._order import permute


def measure(quick: bool) -> Report:
    report = Report("Row orders")
    _in_the_step(report, quick=quick)
    _many_rows(report, quick=quick)
    _many_members(report, quick=quick)
    return report


def _in_the_step(report: Report, *, quick: bool) -> None:
    """A long fit, whose members draw their rows, or read rows that were drawn before."""
    problem, epochs = tiny(quick=quick), 2 if quick else 16
    optimiser, steps = optax.adam(problem.learning_rate), problem.steps_per_epoch * epochs
    scan, drawn = _by_hand.scan_of_epoch(problem, optimiser), list(problem.own_rows(epochs))
    fit = ft.partial(_ours.fit, problem, optimiser, epochs=epochs)
    times = interleaved(
        [
            Contender("fit", fit(shuffle=True), steps),
            Contender("fit, rows given", fit(shuffle=False), steps),
            Contender("fit, one order for all", fit(shuffle="shared"), steps),
            Contender("scan by hand, NumPy's orders", lambda: scan(problem.own_rows(epochs)), steps),
            Contender("scan by hand, rows given", lambda: scan(drawn), steps),
        ],
        rounds=3 if quick else 15,
    )
    report.timings += times.values()
    drawing, given, _, by_numpy, by_hand = times.values()
    report.rows += [
        compared("row orders in a tiny step", drawing, given, target="<= 1.02"),
        compared("the same by NumPy on the host", by_numpy, by_hand),
        compared("fit beside a scan with NumPy's orders", drawing, by_numpy, target="<= 1.0"),
    ]


def _many_rows(report: Report, *, quick: bool) -> None:
    """A short run on many rows, beside one on few, of data on the device; a scan by hand reads as many rows."""
    few, many, steps = (2_000, 20_000, 32) if quick else (10_000, 1_000_000, 256)
    problems = [_with_rows(tiny(quick=quick), num_rows) for num_rows in (few, many)]
    contenders = [Contender(f"{steps} steps on {len(p.x):,} rows", _short_fit(p, steps)) for p in problems]
    contenders += [Contender(f"the same by hand on {len(p.x):,}", _short_scan(p, steps)) for p in problems]
    times = interleaved(contenders, rounds=3 if quick else 9)
    report.timings += times.values()
    on_few, on_many, hand_on_few, hand_on_many = times.values()
    report.rows += [
        compared(f"{steps} steps on many rows", on_many, on_few, target="<= 1.1"),
        compared("the same by hand, rows given", hand_on_many, hand_on_few),
    ]


def _many_members(report: Report, *, quick: bool) -> None:
    """The rows of a step for many members, in the program; NumPy draws all of their epochs before."""
    num_members, num_rows, batch_size = 100 if quick else 100_000, 2048, 32
    words = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (num_members, 2), dtype=np.uint32))
    positions = jnp.arange(batch_size, dtype=jnp.int32)
    rows_of = jax.jit(jax.vmap(lambda words: permute(words, jnp.int32(0), positions, num_rows)))
    tried, generator = num_members // 100, np.random.default_rng(0)
    times = interleaved(
        [
            Contender("rows in the program", lambda: rows_of(words), num_members * batch_size),
            Contender("NumPy", lambda: [generator.permutation(num_rows) for _ in range(tried)], tried * num_rows),
        ],
        rounds=3 if quick else 9,
    )
    report.timings += times.values()
    ours, numpy = times.values()
    report.rows.append(compared(f"a row of {num_members:,} members", ours, numpy, target="<= 1.0"))
    found = estimate(rows_of.lower(words).compile())
    report.facts[f"temporaries for {num_members:,} members, whatever the rows"] = str(found)
    report.facts["an epoch of all of them, stored"] = f"{4 * num_members * num_rows:,} bytes"


def _with_rows(problem: Problem, num_rows: int) -> Problem:
    x = np.random.default_rng(1).standard_normal((num_rows, problem.x.shape[1]), np.float32)
    return dataclasses.replace(problem, x=x, y=np.sin(x[:, 0]))


def _short_fit(problem: Problem, steps: int) -> Any:
    ensemble, optimiser = problem.ensemble(), optax.adam(problem.learning_rate)
    data = jax.tree.map(jnp.asarray, (problem.x, problem.y))
    options = {"steps": steps, "batch_size": problem.batch_size, "progress": False, "key": jax.random.key(0)}
    return lambda: ee.fit(ensemble, problem.loss, optimiser, data, **options)


def _short_scan(problem: Problem, steps: int) -> Any:
    scan = _by_hand.scan_of_epoch(problem, optax.adam(problem.learning_rate))
    shape = (steps, problem.num_members, problem.batch_size)
    rows = np.random.default_rng(2).integers(len(problem.x), size=shape, dtype=np.int32)
    return lambda: scan([rows])


if __name__ == "__main__":
    script(measure)
