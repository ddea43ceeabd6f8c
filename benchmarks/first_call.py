"""The first call of `fit` in a process, compared with that of a scan by hand on the same batches.

Each takes place in a fresh interpreter, without a compilation cache, on an ensemble that is built already.
"validation": both validate and have patience. "second process": another one has filled JAX's persistent cache.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from _measure import Report, Timing, compared, script

CASES = ("no validation", "validation", "second process")
STEPS = 4


def measure(quick: bool) -> Report:
    rounds, whos = 1 if quick else 5, ("fit", "scan by hand")
    pairs = [(case, who) for case in CASES[: 1 if quick else 3] for who in whos]
    with tempfile.TemporaryDirectory() as folder:
        for pair in [pair for pair in pairs if pair[0] == "second process"]:
            _seconds(*pair, cache=folder)
        taken = np.array([[_seconds(*pair, cache=folder) for pair in pairs] for _ in range(rounds)])
    times = {p: Timing(", ".join(p), taken[:, i, 0], taken[:, i, 1]) for i, p in enumerate(pairs)}
    cases = dict.fromkeys(case for case, _ in pairs)
    both = {case: [times[case, who] for who in whos] for case in cases}
    rows = [compared(f"first call, {case}", *both[case], target="<= 1.4") for case in cases]
    return Report("First call", rows, list(times.values()))


def _seconds(case: str, who: str, cache: str) -> tuple[float, float]:
    """Wall and CPU seconds that a fresh interpreter says it took."""
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    if case == "second process":
        environment |= {
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    command = [sys.executable, __file__, "--first", case, who]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    wall, cpu = map(float, done.stdout.split()[-2:])
    return wall, cpu


def _first(case: str, who: str) -> None:
    """Trains for some steps, and prints the wall and CPU seconds that this took."""
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    import equinox as eqx
    import jax
    from _by_hand import scan_of_epoch, scan_with_patience
    from _problems import tiny

    import eqx_ensemble as ee

    problem = tiny(quick=False)
    size, validates = problem.batch_size, case == "validation"
    (x, y), held_out = ((problem.x[own], problem.y[own]) for own in (slice(STEPS * size), slice(-64, None)))
    ensemble, adam, key = problem.ensemble(), problem.adam, jax.random.key(1)
    train = scan_with_patience(problem, held_out, 1) if validates else scan_of_epoch(problem)
    order = np.stack([np.random.default_rng(i).permutation(len(x)) for i in range(problem.num_members)])
    rows = np.stack([order[:, i : i + size] for i in range(0, len(x), size)])
    jax.block_until_ready(eqx.filter((ensemble, key), eqx.is_array))
    _ = ee.fit
    options: dict[str, Any] = {"validation": held_out, "patience": 1} if validates else {}
    wall, cpu = time.perf_counter(), time.process_time()
    if who == "fit":
        ee.fit(ensemble, problem.loss, adam, (x, y), epochs=1, batch_size=size, key=key, **options)
    else:
        jax.block_until_ready(train([rows]))
    print(time.perf_counter() - wall, time.process_time() - cpu)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first"]:
        _first(*sys.argv[2:])
    else:
        script(measure)
