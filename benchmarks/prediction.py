"""Prediction: `predict` of few and of many rows beside one plain jitted `vmap` over all rows; memory and programs."""

import contextlib
import functools as ft
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from _measure import ABSENT, Contender, Report, compared, interleaved, ratio_row, script
from _memory import UNKNOWN, in_child, peak

import eqx_ensemble as ee

ROWS = (1, 64, 32_768)


def measure(quick: bool) -> Report:
    report = Report("Prediction")
    for count in ROWS[:2] if quick else ROWS:
        _measure_rows(report, count, quick=quick)
    _measure_memory(report, quick=quick)
    _count(report, most=16 if quick else 200)
    return report


def _measure_rows(report: Report, count: int, *, quick: bool) -> None:
    ensemble, x = _problem(count, quick=quick)
    calls = 2 if quick else max(1, 200 // count)
    ways = _ways(ensemble, x)
    ours, plain = (np.asarray(ways[name]()) for name in ("predict", "jitted vmap"))
    far = np.max(np.abs(ours - plain)) / np.max(np.abs(plain))
    if far > 1e-5:
        raise AssertionError(f"`predict` differs from vmap by {far:.1e}")
    size = f"{ensemble.num_members} tiny members, {count:,} rows"
    contenders = [Contender(f"{size}: {name}", ft.partial(_repeat, run, calls), calls) for name, run in ways.items()]
    times = interleaved(contenders, rounds=3 if quick else 15)
    report.timings += times.values()
    own, mean, plain = times.values()
    target = "<= 1.5" if count < 1000 else "<= 0.6"
    report.rows += [
        compared(f"{size}: all", own, plain, target=target),
        compared(f"{size}: mean", mean, plain),
    ]


def _repeat(run: Callable[[], Any], calls: int) -> Any:
    return [jax.block_until_ready(run()) for _ in range(calls)][-1]


def _measure_memory(report: Report, *, quick: bool) -> None:
    """The peak resident memory of a call, above what was there."""
    peaks = [
        [in_child(__file__, name, "quick" if quick else "full") for name in ("predict", "jitted vmap")]
        for _ in range(1 if quick else 7)
    ]
    if peaks[0][0] is None:
        report.facts["peak resident memory"] = f"{ABSENT}: {UNKNOWN}"
        return
    ours, plain = np.array(peaks, float).T
    report.rows.append(ratio_row("peak resident memory", "jitted vmap / predict", plain / ours))
    report.facts["peak resident memory above what was there"] = (
        f"vmap {np.median(plain) / 2**20:.1f} MiB, predict {np.median(ours) / 2**20:.1f} MiB"
    )


def _count(report: Report, *, most: int) -> None:
    ensemble, x = _problem(most, quick=True)
    host, own = np.asarray(x), lambda model, x: 2 * model(x)
    with _count_programs() as programs:
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


def _problem(count: int, *, quick: bool) -> tuple[ee.Ensemble, jax.Array]:
    make = lambda key: eqx.nn.MLP(13, 1, 50, 1, key=key)
    return ee.build(make, 4 if quick else 64, key=jax.random.key(0)), jax.random.normal(jax.random.key(1), (count, 13))


def _ways(ensemble: ee.Ensemble, x: jax.Array) -> dict[str, Callable[[], Any]]:
    return {
        "predict": lambda: ee.predict(ensemble, x, progress=False),
        "predict, mean": lambda: ee.predict(ensemble, x, combine=ee.combine.mean, progress=False),
        "jitted vmap": lambda: _all_rows(ensemble, x),
    }


@eqx.filter_jit
def _all_rows(ensemble: ee.Ensemble, x: jax.Array) -> jax.Array:
    return eqx.filter_vmap(lambda model, x: jax.vmap(model)(x), in_axes=(eqx.if_array(0), None))(ensemble.stacked, x)


def _child(name: str, size: str) -> None:
    """Prints the bytes by which one call, compiled before, raises this process's peak resident size."""
    ensemble, x = _problem(8192 if size == "quick" else ROWS[-1], quick=size == "quick")
    run = _ways(ensemble, x)[name]
    # Compiled without running over all rows: memory once used may stay resident.
    if name == "predict":
        jax.block_until_ready(ee.predict(ensemble, x[:4096], progress=False))
    else:
        compiled = _all_rows.lower(ensemble, x).compile()
        run = lambda: compiled(ensemble, x)
    print(json.dumps(peak(run)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _child(*sys.argv[2:])
    else:
        script(measure, cores=0)
