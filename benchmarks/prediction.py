"""Prediction: `predict` in batches of rows against one plain `vmap` over all rows, and few rows in many calls."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import numpy as np
from _measure import ABSENT, Contender, Report, compared, interleaved, ratio_row, script
from _memory import UNKNOWN, estimate, in_child, peak

import eqx_ensemble as ee
from eqx_ensemble._cores import num_cores

BATCH = 256


def measure(quick: bool) -> Report:
    report = Report("Prediction")
    ensemble, x = _problem(quick=quick)
    ways = _ways(ensemble, x)
    ours, plain = (np.asarray(run()) for run in ways.values())
    far = np.max(np.abs(ours - plain)) / np.max(np.abs(plain))
    if far > 1e-5:
        raise AssertionError(f"`predict` differs from vmap by {far:.1e}")
    report.facts["equal to vmap"] = f"within {far:.0e} of the largest value"
    size = f"{ensemble.num_members} tiny members over {len(x):,} rows"
    ways["predict, one core"] = _on_one_core(ways["predict"])
    times = interleaved([Contender(name, run) for name, run in ways.items()], rounds=3 if quick else 9)
    del ways["predict, one core"]
    report.timings += times.values()
    time_row = compared(f"{size}: time", times["vmap"], times["predict"])
    cpu = ratio_row(f"{size}: CPU seconds", time_row.ratio_of, times["vmap"].cpu / times["predict"].cpu, target=">= 8")
    report.rows += [cpu, time_row]
    if num_cores() > 1:
        question = f"{size}: one core, and {num_cores()}"
        report.rows.append(compared(f"{question}: time", times["predict, one core"], times["predict"], target=">= 1.7"))
        more = times["predict"].cpu / times["predict, one core"].cpu
        report.rows.append(ratio_row(f"{question}: CPU seconds", "all cores / one core", more, target="<= 1.15"))

    rounds = 1 if quick else 7
    child_size = "quick" if quick else "full"
    peaks = [[in_child(__file__, name, child_size) for name in ways] for _ in range(rounds)]
    if peaks[0][0] is None:
        report.facts["peak resident memory"] = f"{ABSENT}: {UNKNOWN}"
    else:
        ours, plain = np.array(peaks, float).T
        question = f"{size}: peak resident memory"
        report.rows.append(ratio_row(question, "vmap / predict", plain / ours, target=">= 40"))
        report.facts["peak resident memory above what was there"] = (
            f"vmap {np.median(plain) / 2**20:.1f} MiB, predict {np.median(ours) / 2**20:.1f} MiB"
        )
    report.facts["the compiler's estimate of temporary and result"] = _estimates(ensemble, x)
    _measure_small_calls(report, ensemble, x, quick=quick)
    return report


def _measure_small_calls(report: Report, ensemble: ee.Ensemble, x: jax.Array, *, quick: bool) -> None:
    """`predict` of a few rows, called again and again, against a jitted `vmap`; and its programs for all row counts."""
    ensemble, calls = ensemble[:8], 2 if quick else 100
    plain = eqx.filter_jit(_all_rows)
    repeated = lambda call: Contender("", lambda: [jax.block_until_ready(call()) for _ in range(calls)][-1], calls)
    words = []
    for count in (16, 24) if quick else (1, 16, 24, 64):
        few = x[:count]
        ways = {
            "predict": lambda few=few: ee.predict(ensemble, few),
            "predict, mean": lambda few=few: ee.predict(ensemble, few, combine=ee.combine.mean),
            "jitted vmap": lambda few=few: plain(ensemble, few),
        }
        contenders = [dataclasses.replace(repeated(call), name=name) for name, call in ways.items()]
        times = interleaved(contenders, rounds=3 if quick else 15)
        times = {name: dataclasses.replace(time, name=f"{count} rows: {name}") for name, time in times.items()}
        report.timings += times.values()
        for name in ("predict", "predict, mean"):
            question = f"8 tiny members, {count} rows a call: {name}"
            report.rows.append(compared(question, times[name], times["jitted vmap"], target="<= 3"))
        words.append(f"{count} rows {1e3 * np.min(times['predict'].wall):.3f}")
    report.facts["fastest milliseconds a call of `predict`"] = ", ".join(words)
    host = np.asarray(x)
    with _count_programs() as programs:
        own, most = lambda model, x: 2 * model(x), 16 if quick else 200
        for count in range(1, most + 1):
            ee.predict(ensemble, host[:count], fn=own)
    report.facts[f"programs compiled for every number of rows up to {most}"] = str(programs[0])


@contextlib.contextmanager
def _count_programs() -> Iterator[list[int]]:
    """Counts the programs that are compiled inside."""
    found, active = [0], [True]

    def listen(event: str, duration: float, **_: Any) -> None:
        found[0] += active[0] and event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    active[0] = False


def _problem(*, quick: bool) -> tuple[ee.Ensemble, jax.Array]:
    num_members, rows = (4, 2048) if quick else (64, 32_768)
    make = lambda key: eqx.nn.MLP(13, 1, 50, 1, key=key)
    return ee.build(make, num_members, key=jax.random.key(0)), jax.random.normal(jax.random.key(1), (rows, 13))


def _ways(ensemble: ee.Ensemble, x: jax.Array) -> dict[str, Callable[[], Any]]:
    plain = eqx.filter_jit(_all_rows)
    return {
        "predict": lambda: ee.predict(ensemble, x, batch_size=BATCH, progress=False),
        "vmap": lambda: plain(ensemble, x),
    }


def _on_one_core(run: Callable[[], Any]) -> Callable[[], Any]:
    def run_on_one() -> Any:
        with mock.patch("eqx_ensemble._predict.num_cores", return_value=1):
            return jax.block_until_ready(run())

    return run_on_one


def _all_rows(ensemble: ee.Ensemble, x: jax.Array) -> jax.Array:
    return eqx.filter_vmap(lambda model, x: jax.vmap(model)(x), in_axes=(eqx.if_array(0), None))(ensemble.stacked, x)


def _estimates(ensemble: ee.Ensemble, x: jax.Array) -> str:
    """`memory_analysis` of the plain program, and of ours for one batch of rows."""
    batch = eqx.filter_jit(lambda ensemble, x: ee.predict(ensemble, x, batch_size=BATCH, progress=False))
    programs = {
        "vmap": eqx.filter_jit(_all_rows).lower(ensemble, x),
        "predict, one batch": batch.lower(ensemble, x[:BATCH]),
    }
    words = []
    for name, lowered in programs.items():
        sizes = estimate(lowered.compile().compiled)
        mebibytes = " + ".join(f"{size / 2**20:.2f}" for size in sizes.values()) + " MiB" if sizes else ABSENT
        words.append(f"{name} {mebibytes}")
    return "; ".join(words)


def _child(name: str, size: str) -> None:
    """Prints the bytes by which one call, compiled before, raises this process's peak resident size."""
    ensemble, x = _problem(quick=size == "quick")
    run = _ways(ensemble, x)[name]
    # Compiled without running over all rows: memory once used may stay resident.
    if name == "predict":
        jax.block_until_ready(ee.predict(ensemble, x[: 2 * BATCH], batch_size=BATCH, progress=False))
    else:
        compiled = eqx.filter_jit(_all_rows).lower(ensemble, x).compile()
        run = lambda: compiled(ensemble, x)
    print(json.dumps(peak(run)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _child(*sys.argv[2:])
    else:
        script(measure, cores=2)
