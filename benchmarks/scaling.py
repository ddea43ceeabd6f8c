"""One set of members on one, two and four devices: on a CPU virtual ones, which share its cores."""

import jax
import numpy as np
from _measure import Contender, Report, compared, interleaved, script
from _problems import Problem, middle, tiny

import eqx_ensemble as ee

COUNTS = (1, 2, 4)


def measure(quick: bool) -> Report:
    jax.config.update("jax_num_cpu_devices", max(COUNTS))  # before jax is used; what is no CPU has as many as it has
    report = Report("Scaling")
    report.facts["devices"] = f"{jax.device_count()} ({jax.default_backend()})"
    _times(report, tiny(quick=quick), 2 if quick else 16, 3 if quick else 7)
    if not quick:
        _times(report, middle(quick=False), 1, 7)
    return report


def _times(report: Report, problem: Problem, epochs: int, rounds: int) -> None:
    counts = [n for n in COUNTS if n <= jax.device_count()]
    meshes = {"no mesh": None} | {f"a mesh of {n}": ee.make_mesh(members=n) for n in counts}
    fits = {name: problem.fit(epochs=epochs, mesh=mesh) for name, mesh in meshes.items()}
    losses = {name: fit().history.loss for name, fit in fits.items()}
    for name, found in losses.items():
        far = float(np.max(np.abs(found - losses["no mesh"]) / np.abs(losses["no mesh"])))
        if far > 1e-3:
            raise AssertionError(f"{problem.name}: losses on {name} are {far:.1e} from those without a mesh")
    contenders = [Contender(f"{problem.name}: fit, {name}", fit, epochs) for name, fit in fits.items()]
    times = interleaved(contenders, rounds=rounds)
    report.timings += times.values()
    alone, *others = times.values()
    for name, timing in zip(list(fits)[1:], others, strict=True):
        report.rows.append(compared(f"{problem.name}: speed-up by {name}", alone, timing))


if __name__ == "__main__":
    script(measure, cores=0)
