"""Prediction: `predict` in batches of rows against one plain `vmap` over all rows."""

import json
import pathlib
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from _measure import ABSENT, Contender, Report, compared, interleaved, ratio_row, script

import eqx_ensemble as ee

BATCH = 256
STATUS = pathlib.Path("/proc/self/status")
CLEAR = pathlib.Path("/proc/self/clear_refs")


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
    times = interleaved([Contender(name, run) for name, run in ways.items()], rounds=3 if quick else 9)
    report.timings += times.values()
    time_row = compared(f"{size}: time", times["vmap"], times["predict"])
    cpu = ratio_row(f"{size}: CPU seconds", time_row.ratio_of, times["vmap"].cpu / times["predict"].cpu, target=">= 8")
    report.rows += [cpu, time_row]

    rounds = 1 if quick else 7
    peaks = [[_peak_in_child(name, quick=quick) for name in ways] for _ in range(rounds)]
    if peaks[0][0] is None:
        report.facts["peak resident memory"] = f"{ABSENT}: this system does not tell the peak of a part of a run"
    else:
        ours, plain = np.array(peaks, float).T
        question = f"{size}: peak resident memory"
        report.rows.append(ratio_row(question, "vmap / predict", plain / ours, target=">= 40"))
        report.facts["peak resident memory above what was there"] = (
            f"vmap {np.median(plain) / 2**20:.1f} MiB, predict {np.median(ours) / 2**20:.1f} MiB"
        )
    report.facts["the compiler's estimate of temporary and result"] = _estimates(ensemble, x)
    return report


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


def _all_rows(ensemble: ee.Ensemble, x: jax.Array) -> jax.Array:
    models = eqx.combine(ensemble.stacked, ensemble.shared)
    return eqx.filter_vmap(lambda model, x: jax.vmap(model)(x), in_axes=(eqx.if_array(0), None))(models, x)


def _estimates(ensemble: ee.Ensemble, x: jax.Array) -> str:
    """What `memory_analysis` says of the plain program, and of ours for one batch of rows."""
    batch = eqx.filter_jit(lambda ensemble, x: ee.predict(ensemble, x, batch_size=BATCH, progress=False))
    programs = {
        "vmap": eqx.filter_jit(_all_rows).lower(ensemble, x),
        "predict, one batch": batch.lower(ensemble, x[:BATCH]),
    }
    words = []
    for name, lowered in programs.items():
        analysis = lowered.compile().compiled.memory_analysis()
        if analysis is None:
            words.append(f"{name} {ABSENT}")
            continue
        sizes = (analysis.temp_size_in_bytes / 2**20, analysis.output_size_in_bytes / 2**20)
        words.append(f"{name} {sizes[0]:.2f} + {sizes[1]:.2f} MiB")
    return "; ".join(words)


def _peak_in_child(name: str, *, quick: bool) -> int | None:
    command = [sys.executable, __file__, "child", name, "quick" if quick else "full"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


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
    if not CLEAR.exists():
        print("null")
        return
    CLEAR.write_text("5")  # sets the peak back to the present size
    before = _resident("VmHWM")
    jax.block_until_ready(run())
    print(max(_resident("VmHWM") - before, resource.getpagesize()))


def _resident(field: str) -> int:
    """A line of this process's status, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _child(*sys.argv[2:])
    else:
        script(measure)
