"""The first call of `fit` in a process, compared with the first calls of programs written by hand on the same batches.

Each takes place in a fresh interpreter, without a compilation cache, on an ensemble that is built already. "even": rows
divide evenly into batches, and nothing is validated. "second process": another one has filled JAX's persistent cache.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _measure import Report, Timing, compared, script

CASES = ("even", "validation", "Blocks(16)", "order given", "second process")
# Neither peer validates in the scan. Both have one way to run and to draw rows.
PEERS = {"scan": ("even", "second process"), "idiomatic": ("even", "validation")}
STEPS = 4


def measure(quick: bool) -> Report:
    rounds = 1 if quick else 5
    problems = ["tiny"] if quick else ["tiny", "block"]
    pairs = [(problem, case, peer) for problem in problems for peer in PEERS for case in PEERS[peer]]
    of_fit = [(problem, case, "fit") for problem in problems for case in CASES]
    with tempfile.TemporaryDirectory() as folder:
        for case in [*of_fit, *pairs]:
            if case[1] == "second process":
                _seconds(*case, cache=folder)
        taken = np.array([[_seconds(*case, cache=folder) for case in [*of_fit, *pairs]] for _ in range(rounds)])
    times = {
        c: Timing(f"{c[0]}, {c[1]}: {c[2]}", taken[:, i, 0], taken[:, i, 1]) for i, c in enumerate([*of_fit, *pairs])
    }
    rows = [
        compared(
            f"{problem}: first call, {case}, of the {peer}",
            times[problem, case, "fit"],
            times[problem, case, peer],
            target="<= 1.4" if peer == "scan" or case == "even" else "<= 2",
        )
        for problem, case, peer in pairs
    ]
    return Report("First call", rows, list(times.values()))


def _seconds(*case: str, cache: str) -> tuple[float, float]:
    """Wall and CPU seconds that a fresh interpreter says it took."""
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    if case[1] == "second process":
        environment |= {
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    command = [sys.executable, __file__, "--first", *case]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    wall, cpu = map(float, done.stdout.split()[-2:])
    return wall, cpu


def _first(name: str, case: str, who: str) -> None:
    """Trains for some steps, and prints the wall and CPU seconds that this took."""
    sys.path.insert(0, str(Path(__file__).parent))
    import equinox as eqx
    import jax
    import optax
    from _by_hand import idiomatic, scan_of_epoch
    from _problems import block, tiny

    import eqx_ensemble as ee

    problem, optimiser = {"tiny": tiny, "block": block}[name](quick=False), optax.adam(1e-3)
    size, validates = problem.batch_size, case == "validation"
    x, y = problem.x[: STEPS * size], problem.y[: STEPS * size]
    held_out = problem.x[-64:], problem.y[-64:]
    ensemble = problem.ensemble()
    train = {"idiomatic": idiomatic, "scan": scan_of_epoch, "fit": idiomatic}[who](problem, optimiser)
    models = ensemble.stacked
    order = np.stack([np.random.default_rng(i).permutation(len(x)) for i in range(problem.num_members)])
    batches = [order[:, i : i + size] for i in range(0, len(x), size)]
    key = jax.random.key(1)
    jax.block_until_ready(eqx.filter((ensemble, key), eqx.is_array))
    _ = ee.fit
    wall, cpu = time.perf_counter(), time.process_time()
    if who == "fit":
        options: dict[str, Any] = {"validation": held_out} if validates else {}
        options |= {"plan": ee.plan.Blocks(16)} if case == "Blocks(16)" else {}
        options |= {"shuffle": False} if case == "order given" else {}
        ee.fit(ensemble, problem.loss, optimiser, (x, y), epochs=1, batch_size=size, key=key, **options)
    elif who == "scan":
        jax.block_until_ready(train([np.stack(batches)]))
    else:
        jax.block_until_ready(train([batches]))  # pyright: ignore[reportArgumentType]
        if validates:
            score = eqx.filter_vmap(lambda model: problem.loss(model, held_out, None), in_axes=eqx.if_array(0))
            jax.block_until_ready(eqx.filter_jit(score)(models))
    print(time.perf_counter() - wall, time.process_time() - cpu)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first"]:
        _first(*sys.argv[2:])
    else:
        script(measure)
