"""The first call of `fit` in a process, compared with the first calls of the idiomatic step on the same batches.

Each takes place in a fresh interpreter, without a compilation cache, on an ensemble that is built already. "even": rows
divide evenly into batches, and nothing is validated.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from _measure import Report, Timing, compared, script

CASES = {"even": (0, False), "smaller last batch": (7, False), "validation": (0, True)}
STEPS = 4


def measure(quick: bool) -> Report:
    rounds = 1 if quick else 5
    problems = ["tiny"] if quick else ["tiny", "block"]
    cases = [(problem, case, who) for problem in problems for case in CASES for who in ("fit", "idiomatic")]
    taken = np.array([[_seconds(*case) for case in cases] for _ in range(rounds)])
    times = {c: Timing(f"{c[0]}, {c[1]}: {c[2]}", taken[:, i, 0], taken[:, i, 1]) for i, c in enumerate(cases)}
    rows = [
        compared(
            f"{problem}: first call, {case}",
            times[problem, case, "fit"],
            times[problem, case, "idiomatic"],
            target="<= 1.4" if case == "even" else "<= 2",
        )
        for problem in problems
        for case in CASES
    ]
    return Report("First call", rows, list(times.values()))


def _seconds(*case: str) -> tuple[float, float]:
    """Wall and CPU seconds that a fresh interpreter says it took."""
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
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
    from _by_hand import idiomatic
    from _problems import block, tiny

    import eqx_ensemble as ee

    problem, optimiser = {"tiny": tiny, "block": block}[name](quick=False), optax.adam(1e-3)
    last, validates = CASES[case]
    size = problem.batch_size
    x, y = problem.x[: STEPS * size + last], problem.y[: STEPS * size + last]
    held_out = problem.x[-64:], problem.y[-64:]
    ensemble, train = problem.ensemble(), idiomatic(problem, optimiser)
    models = eqx.combine(ensemble.stacked, ensemble.shared)
    order = np.stack([np.random.default_rng(i).permutation(len(x)) for i in range(problem.num_members)])
    batches = [order[:, i : i + size] for i in range(0, len(x), size)]
    key = jax.random.key(1)
    jax.block_until_ready(eqx.filter((ensemble, key), eqx.is_array))
    _ = ee.fit
    wall, cpu = time.perf_counter(), time.process_time()
    if who == "fit":
        validation = {"validation": held_out} if validates else {}
        ee.fit(ensemble, problem.loss, optimiser, (x, y), epochs=1, batch_size=size, key=key, **validation)
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
