"""Members over workers: what do shards cost beside one `fit`, and which shards and checkpoints cost least?

Members are tiny MLPs, and workers are warm: they have run the same shards before. CPU seconds are those of this
process and of all its workers; what travels are the bytes of all shards and of their results. The overhead of shards is
measured with one worker: the time of the call less that of the `fit`s on the worker, relative to these. Workers share a
persistent compilation cache; a fresh pool is timed with it empty, and full. The last part is a simulation.
"""

import contextlib
import functools as ft
import multiprocessing
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _fleet_simulation import Fleet, Policy, checkpoint_overhead, daly, overhead, young
from _measure import Report, Row, ratio_row, script

import eqx_ensemble as ee
from eqx_ensemble.fleet._serialise import loads

KEY = jax.random.key(0)
OPTIMISER = optax.adam(1e-3)
CACHE = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


class Counting(Executor):
    """An executor that counts the bytes of the arguments and results of another, and keeps the results."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.num_bytes, self.results = inner, 0, []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Submits the call to the other."""
        self.num_bytes += sum(len(arg) for arg in args if isinstance(arg, bytes))
        future = self.inner.submit(fn, *args, **kwargs)
        future.add_done_callback(self._add)
        return future

    def _add(self, future: "Future[Any]") -> None:
        self.num_bytes += len(future.result())
        self.results.append(future.result())

    def seconds(self) -> float:
        """Those of the calls of `fit` on workers."""
        return sum(loads(result).result.seconds for result in self.results)

    def clear(self) -> None:
        """Forgets what it counted."""
        self.num_bytes, self.results = 0, []


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def measure(quick: bool) -> Report:
    report = Report("Fleet")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CACHE | {"JAX_COMPILATION_CACHE_DIR": folder})  # of the workers, which inherit it
        _start(report, quick)
        _compare(report, quick)
        _long_shards(report, quick)
    _simulate(report, quick)
    return report


def _call(members: int, epochs: int) -> Callable[..., Any]:
    """One `fit`, or `fleet.fit` where it is given an executor."""
    x = np.random.default_rng(0).normal(size=(512, 13)).astype(np.float32)
    ensemble = ee.build(lambda key: eqx.nn.MLP(13, 1, 50, 1, key=key), members, key=KEY)
    args = ensemble, loss, OPTIMISER, (x, x[:, 0])
    options = {"epochs": epochs, "batch_size": 32, "progress": False, "key": KEY}
    return lambda *executor, **more: (ee.fleet.fit if executor else ee.fit)(*executor, *args, **options, **more)


def _start(report: Report, quick: bool) -> None:
    """A pool from nothing: two processes import JAX and compile, or read what others have compiled."""
    members, shard = (8, 4) if quick else (256, 64)
    run = _call(members, epochs=1)
    for cache in ("empty", "full"):
        with _pool(2) as pool:
            wall, cpu = _seconds(ft.partial(run, pool, shard=shard))
        report.facts[f"two new processes, compilation cache {cache}"] = _text(wall, cpu)


def _compare(report: Report, quick: bool) -> None:
    members, shards, epochs, rounds = (40, (20,), 1, 1) if quick else (10_000, (100, 1000, 5000), 3, 2)
    alone = _call(members, epochs)
    alone()
    for name, open_executor in EXECUTORS.items():
        for shard in shards:
            with open_executor(2) as executor:
                counting = Counting(executor)
                run = ft.partial(alone, counting, shard=shard, workers=1 if name == "one thread" else 2)
                run()
                counting.clear()
                pairs = [(_seconds(run), _seconds(alone)) for _ in range(rounds)]
            question = f"{name}, shards of {shard}"
            report.rows.append(ratio_row(question, f"{name} / one fit", [ours[0] / one[0] for ours, one in pairs]))
            moved = f", {counting.num_bytes / rounds / 1e6:.0f} MB travelled"
            ours, one = np.median(pairs, axis=0)
            report.facts[question] = f"{_text(*ours)}{moved}; one fit {_text(*one)}"


def _long_shards(report: Report, quick: bool) -> None:
    """What is added to shards of some ten seconds."""
    members, shard, epochs = (8, 4, 1) if quick else (2000, 1000, 240)
    call = _call(members, epochs)
    for name in ("processes", "Dask"):
        with EXECUTORS[name](1) as executor:
            counting = Counting(executor)
            run = ft.partial(call, counting, shard=shard, workers=1)
            run()
            counting.clear()
            wall, _ = _seconds(run)
        own = counting.seconds()
        question = f"{name}, {members // shard} shards of {own * shard / members:.1f} s on one worker"
        report.rows.append(Row(question, "overhead / fits", wall / own - 1, None, None, None, "<= 0.05"))


def _text(wall: float, cpu: float) -> str:
    return f"{wall:.1f} s, {cpu:.1f} CPU s"


def _seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of this process and of those that it started."""
    wall, cpu = time.perf_counter(), _cpu_seconds()
    run()
    return time.perf_counter() - wall, _cpu_seconds() - cpu


def _cpu_seconds(pid: int | None = None) -> float:
    folder = pathlib.Path("/proc") / ("self" if pid is None else str(pid))
    user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    children = {int(child) for file in folder.glob("task/*/children") for child in file.read_text().split()}
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") + sum(map(_cpu_seconds, children))


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Executor]:
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield pool


@contextlib.contextmanager
def _dask(workers: int) -> Iterator[Executor]:
    from distributed import Client, LocalCluster

    options = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client.get_executor(pure=False)


EXECUTORS: dict[str, Callable[[int], Any]] = {
    "one thread": lambda workers: ThreadPoolExecutor(1),
    "processes": _pool,
    "Dask": _dask,
}


def _simulate(report: Report, quick: bool) -> None:
    fleet, draws = Fleet(workers=50 if quick else 1000), 1 if quick else 3
    mean = lambda policy, members, seconds: np.mean(
        [overhead(fleet, policy, members, seconds, seed=seed) for seed in range(draws)]
    )
    report.facts["Young's and Daly's interval"] = f"{young(fleet):.0f} s, {daly(fleet):.0f} s"
    for interval in (30, 60, 120, 294, 600, 3600):
        value = checkpoint_overhead(fleet, interval, 86_400.0, seed=0, draws=20 if quick else 2000)
        report.facts[f"a day in one shard, saved every {interval} s"] = f"{value:.1%} more"
    for minutes in (5, 15, 30, 60, 120):
        members = fleet.workers * 24
        without, saved = (mean(Policy(1, interval), members, 60.0 * minutes) for interval in (None, 294))
        report.facts[f"24 shards of {minutes} min a worker"] = f"{without:.1%} more; {saved:.1%} saved every 294 s"
    for shard in (1, 2, 5, 10, 20, 50, 100):
        value = mean(Policy(shard, None), fleet.workers * 100, 60.0)
        report.facts[f"100 members of a minute a worker, in shards of {shard}"] = f"{value:.1%} more"


if __name__ == "__main__":
    script(measure, cores=2)
