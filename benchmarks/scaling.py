"""One set of members on more devices, and what a step sends between them.

On a CPU the devices are virtual and share its cores: little gets faster. `docs/scale.md` says what follows for a choice
of axes.
"""

import dataclasses
import math
import re
from typing import Any

import equinox as eqx
import jax
import numpy as np
from _measure import Contender, Report, Row, compared, interleaved, ratio_row, script
from _problems import Problem, middle, tiny

import eqx_ensemble as ee

COUNTS = (1, 2, 4)
MESHES = ({"members": 4}, {"members": 2, "data": 2}, {"members": 1, "data": 4})
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"


def measure(quick: bool) -> Report:
    jax.config.update("jax_num_cpu_devices", max(COUNTS))  # before jax is used; what is no CPU has as many as it has
    report = Report("Scaling")
    report.facts["devices"] = f"{jax.device_count()} ({jax.default_backend()})"
    _times(report, tiny(quick=quick), 2 if quick else 16, 3 if quick else 7)
    for shape in MESHES[: 1 if quick else 3]:
        _sent(report, dataclasses.replace(middle(quick=quick), num_members=4), shape)
    return report


def _mesh(**shape: int) -> Any:
    """A mesh, or nothing where there are too few devices."""
    return ee.make_mesh(**shape) if math.prod(shape.values()) <= jax.device_count() else None


def _times(report: Report, problem: Problem, epochs: int, rounds: int) -> None:
    meshes = {"no mesh": None} | {f"a mesh of {n}": mesh for n in COUNTS if (mesh := _mesh(members=n)) is not None}
    fits = {name: problem.fit(epochs=epochs, mesh=mesh) for name, mesh in meshes.items()}
    losses = {name: fit().history.loss for name, fit in fits.items()}
    for name, found in losses.items():
        far = float(np.max(np.abs(found - losses["no mesh"]) / np.abs(losses["no mesh"])))
        if far > 1e-3:
            raise AssertionError(f"{problem.name}: losses on {name} are {far:.1e} from those without a mesh")
    times = interleaved([Contender(f"fit, {name}", fit, epochs) for name, fit in fits.items()], rounds=rounds)
    report.timings += times.values()
    alone, *others = times.values()
    report.rows += [
        compared(f"{problem.name}: speed-up by {name}", alone, t) for (name, t) in zip(list(fits)[1:], others)
    ]


def _sent(report: Report, problem: Problem, shape: dict[str, int]) -> None:
    """The communication of the compiled step."""
    mesh, where = _mesh(**shape), ", ".join(f"{axis} {size}" for axis, size in shape.items())
    question = f"{problem.name}, 4 members on {where}: bytes sent a step"
    if mesh is None:
        report.rows.append(compared(question, None, None))
        return
    ensemble, parts = problem.ensemble(mesh), shape.get("data", 1)
    state = ee.train.init(ensemble, problem.adam, key=jax.random.key(0))
    step = ee.train.make_step(problem.loss, problem.adam, mesh=mesh)
    batch = problem.x[: problem.batch_size], problem.y[: problem.batch_size]
    found = _collectives(eqx.filter_jit(step).lower(state, batch).compile().compiled.as_text())
    sent = sum(_by_ring(kind, size, parts) for kind, size in found)
    if parts == 1:
        report.rows.append(Row(question, "bytes", sent, None, None, None, "<= 0"))
        return
    weights = sum(x.nbytes for x in jax.tree.leaves(eqx.filter(ensemble, eqx.is_array))) // shape["members"]
    least = weights * 2 * (parts - 1) / parts
    report.rows.append(ratio_row(question, "sent / least for the gradients", [sent / least]))


def _by_ring(kind: str, size: int, parts: int) -> float:
    """The bytes that each of `parts` devices sends around a ring, whose result has `size` bytes on each of them."""
    factor = {"all-reduce": 2 / parts, "all-gather": 1 / parts, "all-to-all": 1 / parts, "reduce-scatter": 1.0}
    return size * factor.get(kind, 1 / max(parts - 1, 1)) * (parts - 1)


def _collectives(text: str) -> list[tuple[str, int]]:
    """The kind of each collective of a program, and the bytes of its result on one device."""
    found = []
    for shapes, kind in re.findall(rf"= (.*?) ({KINDS})(?:-start)?\(", text):
        arrays = re.findall(r"\b(?:pred|[a-z]+([0-9]+)[a-z0-9]*)\[([0-9,]*)\]", shapes)
        counts = [math.prod(int(size) for size in dims.split(",") if size) for _, dims in arrays]
        bits = [int(bits) if bits else 8 for bits, _ in arrays]
        found.append((kind, sum(n * b // 8 for n, b in zip(counts, bits, strict=True))))
    return found


if __name__ == "__main__":
    script(measure, cores=0)
