"""How we measure: contenders alternate in one process, ratios are computed per round, medians come with quartiles.

Every script here is a function `measure(quick) -> Report` handed to `script`.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results"
ABSENT = "absent"


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to do the work. `run` returns arrays to wait for; one run does `units` steps, rows or calls."""

    name: str
    run: Callable[[], Any]
    units: int = 1


def repeated(name: str, run: Callable[[], Any], calls: int) -> Contender:
    """A contender of short calls, each of which is waited for."""
    return Contender(name, lambda: [jax.block_until_ready(run()) for _ in range(calls)][-1], calls)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per unit, one entry per round; CPU seconds are those of the whole process."""

    name: str
    wall: np.ndarray
    cpu: np.ndarray


@dataclasses.dataclass(frozen=True)
class Row:
    """The answer to one question: a ratio with its quartiles, and its target."""

    question: str
    ratio_of: str
    ratio: float | None
    low: float | None
    high: float | None
    cpu_ratio: float | None
    target: str

    @property
    def verdict(self) -> str:
        """Whether the target is met; a peer that is not installed is reported as absent."""
        if self.ratio is None:
            return ABSENT
        if not self.target:
            return ""
        sign, limit = self.target.split()
        met = self.ratio >= float(limit) if sign == ">=" else self.ratio <= float(limit)
        return "met" if met else "NOT MET"


@dataclasses.dataclass
class Report:
    """The results of a script: rows of ratios, the times behind them, facts, and tables in Markdown."""

    title: str
    rows: list[Row] = dataclasses.field(default_factory=list)
    timings: list[Timing] = dataclasses.field(default_factory=list)
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    text: str = ""


def interleaved(contenders: Iterable[Contender], *, rounds: int) -> dict[str, Timing]:
    """Times contenders in turns (A B C A B C ...), so that a slow minute of a shared machine hits all of them alike.

    Each runs twice before: the first run compiles, the second may settle what the first has measured.
    """
    contenders = list(contenders)
    for contender in contenders * 2:
        jax.block_until_ready(contender.run())
    wall, cpu = np.zeros((2, len(contenders), rounds))
    for i in range(rounds):
        for j, contender in enumerate(contenders):
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            jax.block_until_ready(contender.run())
            wall[j, i] = (time.perf_counter() - wall_start) / contender.units
            cpu[j, i] = (time.process_time() - cpu_start) / contender.units
    return {c.name: Timing(c.name, wall[j], cpu[j]) for j, c in enumerate(contenders)}


def compared(question: str, above: Timing | None, below: Timing | None, *, target: str = "") -> Row:
    """The ratio `above / below` of every round; `None` for a peer that is not installed."""
    if above is None or below is None:
        present = above or below
        return Row(question, f"{ABSENT} / {present.name}" if present else ABSENT, None, None, None, None, target)
    row = ratio_row(question, f"{above.name} / {below.name}", above.wall / below.wall, target=target)
    return dataclasses.replace(row, cpu_ratio=float(np.median(above.cpu / below.cpu)))


def ratio_row(question: str, ratio_of: str, ratios: Any, *, target: str = "") -> Row:
    """A row from one ratio per round."""
    low, median, high = np.quantile(np.asarray(ratios, float), (0.25, 0.5, 0.75))
    return Row(question, ratio_of, float(median), float(low), float(high), None, target)


def counted(question: str, what: str, found: int, tries: int, *, target: str = "") -> Row:
    """A row that counts how many of so many tries went some way."""
    return Row(question, f"{what}, of {tries}", float(found), None, None, None, target)


def device_name() -> str:
    """The accelerator's name, or the processor's."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """What a result depends on in addition to the code."""
    versions = {}
    for name in ("eqx_ensemble", "jax", "jaxlib", "equinox", "optax", "numpy", "torch", "scikit-learn"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ABSENT
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "cores of the machine": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": versions,
    }


def stay_on(cores: int) -> None:
    """Keeps this process on its first `cores` cores, before jax starts its threads; 0 leaves it as it is.

    Libraries disagree on how many threads they start. On one core they cannot, and CPU seconds are wall seconds.
    """
    if cores == 0 or not hasattr(os, "sched_setaffinity"):
        return
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    tasks = pathlib.Path("/proc/self/task")
    for thread in [int(p.name) for p in tasks.iterdir()] if tasks.exists() else [0]:
        os.sched_setaffinity(thread, chosen)


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Left-aligned columns."""
    lines = [list(headings), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def markdown(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """The same as a table in Markdown."""
    lines = [list(headings), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_table(rows: Iterable[Row]) -> str:
    """All questions in one table."""
    cells = []
    for row in rows:
        spread = "" if row.low is None else f"{row.low:.3g} to {row.high:.3g}"
        ratio, cpu = ("" if x is None else f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in (row.ratio, row.cpu_ratio))
        cells.append([row.question, row.ratio_of, ratio, spread, cpu, row.target, row.verdict])
    return table(["question", "ratio of", "ratio", "quartiles", "CPU ratio", "target", ""], cells)


def environment_lines(found: dict[str, Any]) -> str:
    """The environment in two lines, and the seconds that a script took."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    load = "" if found["load"] is None else f"; load {found['load']:.1f} at the end"
    cores = f"{found['cores']} of {found['cores of the machine']} cores"
    first = f"{found['device']}; {cores}{load}; {found['date']}; {found['seconds']} s"
    return f"{first}\nPython {found['python']}, {versions}"


def printed(report: Report, found: dict[str, Any]) -> None:
    """A report in full: facts, times, ratios."""
    print(f"\n{report.title}\n{'=' * len(report.title)}\n{environment_lines(found)}")
    for name, fact in report.facts.items():
        print(f"{name}: {fact}")
    cells = []
    for timing in report.timings:
        low, median, high = np.quantile(timing.wall, (0.25, 0.5, 0.75)) * 1e3
        cpu = np.median(timing.cpu) * 1e3
        cells.append([timing.name, f"{median:.4g}", f"{low:.4g} to {high:.4g}", f"{cpu:.4g}"])
    if report.text:
        print(report.text)
    if cells:
        print("\n" + table(["ms per unit, this machine only", "wall", "quartiles", "CPU"], cells))
    if report.rows:
        print("\n" + rows_table(report.rows), flush=True)


def as_json(report: Report) -> dict[str, Any]:
    """A report as plain data."""
    timings = [{"name": t.name, "wall": t.wall.tolist(), "cpu": t.cpu.tolist()} for t in report.timings]
    rows = [dataclasses.asdict(row) | {"verdict": row.verdict} for row in report.rows]
    found = {"title": report.title, "facts": report.facts, "text": report.text}
    return found | {"rows": rows, "seconds per unit": timings}


def saved(name: str, report: Report, found: dict[str, Any]) -> pathlib.Path:
    """Writes results under the date and the device's name; tables in Markdown beside them."""
    device = re.sub(r"[^A-Za-z0-9]+", "-", found["device"]).strip("-")
    path = RESULTS / f"{found['date'][:10]}-{device}-{name.replace(' ', '_')}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"environment": found, "results": as_json(report)}, indent=1) + "\n")
    if report.text:
        path.with_suffix(".md").write_text(f"# {report.title}\n\n{environment_lines(found)}\n{report.text}")
    return path


def module_at(path: pathlib.Path) -> Any:
    """A module that is no script's neighbour, after its run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_child(path: str, *arguments: str, **environment: str) -> Report:
    """What a script finds in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "found.json")
        command = [sys.executable, path, "--json", file, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | environment)
        found = json.loads(file.read_text())["results"]
    rows = [Row(**{k: v for k, v in row.items() if k != "verdict"}) for row in found["rows"]]
    timings = [Timing(t["name"], np.array(t["wall"]), np.array(t["cpu"])) for t in found["seconds per unit"]]
    return Report(found["title"], rows, timings, found["facts"], found["text"])


def flags() -> argparse.ArgumentParser:
    """The flags that all scripts have in common."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="smallest sizes, few rounds: does it run at all?")
    parser.add_argument("--save", action="store_true", help=f"write JSON to {RESULTS.name}/")
    parser.add_argument("--cores", type=int, help="stay on so many cores; 0: all (default: 1, few scripts need all)")
    return parser


def script(measure: Callable[..., Report], *, parts: Sequence[str] = (), cores: int = 1) -> None:
    """The `main` of a script, whose `parts` can be measured alone: measures, prints, and writes JSON if asked to."""
    name, start = pathlib.Path(measure.__code__.co_filename).stem, time.perf_counter()
    parser = flags()
    parser.add_argument("--json", type=pathlib.Path, help="also write JSON to this file")
    if parts:
        parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="measure these alone")
    options = parser.parse_args()
    stay_on(cores if options.cores is None else options.cores)
    report = measure(options.quick, options.parts) if parts else measure(options.quick)
    if options.quick:  # the smallest sizes do not measure speed
        report.rows = [row if row.low is None else dataclasses.replace(row, target="") for row in report.rows]
    found = environment() | {"seconds": round(time.perf_counter() - start)}
    printed(report, found)
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": found, "results": as_json(report)}))
    if options.save:
        name = "-".join([name, *(options.parts if parts and options.parts != parts else ())])
        print(f"\nsaved to {saved(name, report, found)}")
