"""The first `build` of a process, compared with one `make(key)` and with `eqx.filter_vmap(make)(keys)`.

Each takes place in a fresh interpreter, after the imports and without a compilation cache: nearly all of it is
compilation.
"""

import os
import subprocess
import sys

import numpy as np
from _measure import Report, Timing, compared, script

SETUP = """
import time
import equinox as eqx, jax
import eqx_ensemble as ee
ee.build
make = lambda key: eqx.nn.MLP(13, 1, 50, 2, key=key)
key, keys = jax.random.key(0), jax.random.split(jax.random.key(1), {count})
jax.block_until_ready((key, keys))
wall, cpu = time.perf_counter(), time.process_time()
made = {statement}
jax.block_until_ready(eqx.filter(made, eqx.is_array))
print(time.perf_counter() - wall, time.process_time() - cpu)
"""
ONE = "make(key)"
OURS = "ee.build(make, key=keys)"
VMAP = "eqx.filter_vmap(make)(keys)"


def measure(quick: bool) -> Report:
    rounds = 1 if quick else 7
    cases = [(ONE, 1), (OURS, 8), (VMAP, 8)] + [(OURS, 512), (VMAP, 512)] * (not quick)
    taken = np.array([[_seconds(*case) for case in cases] for _ in range(rounds)])
    name = lambda case: case[0] if case[0] == ONE else f"{case[0]}, {case[1]} members"
    times = {case: Timing(name(case), taken[:, i, 0], taken[:, i, 1]) for i, case in enumerate(cases)}
    rows = []
    for count in sorted({count for _, count in cases[1:]}):
        ours = times[OURS, count]
        rows.append(
            compared(f"first build, {count} members", ours, times[ONE, 1], target="<= 1.5" if count == 8 else "")
        )
        rows.append(compared(f"first build, {count} members", ours, times[VMAP, count]))
    return Report("First build", rows, list(times.values()))


def _seconds(statement: str, count: int) -> tuple[float, float]:
    """Wall and CPU seconds that a fresh interpreter says it took."""
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    code = SETUP.format(statement=statement, count=count)
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, stdout=subprocess.PIPE, text=True)
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


if __name__ == "__main__":
    script(measure)
