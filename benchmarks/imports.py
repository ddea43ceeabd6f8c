"""What `import eqx_ensemble` costs, compared with the import of its dependencies.

Its modules are imported when they are used: a second row imports those of a training run.
"""

import functools
import os
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
from _measure import Report, Timing, compared, script

THEIRS = "import jax, equinox, optax"
OURS = f"{THEIRS}, eqx_ensemble"
TRAINING = f"{OURS}; eqx_ensemble.build, eqx_ensemble.fit"


def measure(quick: bool) -> Report:
    rounds = 1 if quick else 9
    statements = (OURS, TRAINING, THEIRS)
    with tempfile.TemporaryDirectory() as folder:
        # Byte code as pip writes it, even if this interpreter is configured to write none; the first import writes it.
        environment = os.environ | {"PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        seconds = functools.partial(_seconds, environment=environment)
        for statement in statements:
            seconds(statement)
        taken = np.array([[seconds(statement) for statement in statements] for _ in range(rounds)])
    times = {s: Timing(s, taken[:, i, 0], taken[:, i, 1]) for i, s in enumerate(statements)}
    rows = [
        compared("import eqx_ensemble", times[OURS], times[THEIRS], target="<= 1.05"),
        compared("with build and fit", times[TRAINING], times[THEIRS]),
    ]
    return Report("Import", rows, list(times.values()))


def _seconds(statement: str, environment: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of a fresh interpreter that runs `statement`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, env=environment)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    script(measure)
