"""Members over workers: what do shards cost beside one `fit`, and which shards and checkpoints cost least?

Members are tiny MLPs. Workers are warm: they have run the same shards before. CPU seconds are
those of this process, without its workers'. What travels are the bytes of all shards and of their results. The second
part is a simulation.
"""

import contextlib
import functools as ft
import multiprocessing
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
from _measure import Report, ratio_row, script

import eqx_ensemble as ee

KEY = jax.random.key(0)
OPTIMISER = optax.adam(1e-3)


class Counting(Executor):
    """An executor that counts the bytes of the arguments and results of another."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.num_bytes = inner, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Submits the call to the other."""
        self.num_bytes += sum(len(arg) for arg in args if isinstance(arg, bytes))
        future = self.inner.submit(fn, *args, **kwargs)
        future.add_done_callback(self._add)
        return future

    def _add(self, future: "Future[Any]") -> None:
        self.num_bytes += len(future.result())


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def measure(quick: bool) -> Report:
    report = Report("Fleet")
    _compare(report, quick)
    _simulate(report, quick)
    return report


def _compare(report: Report, quick: bool) -> None:
    members, shards, epochs, rounds = (40, (20,), 1, 1) if quick else (10_000, (100, 1000, 5000), 20, 3)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 13)).astype(np.float32)
    ensemble = ee.build(lambda key: eqx.nn.MLP(13, 1, 50, 1, key=key), members, key=KEY)
    options = {"epochs": epochs, "batch_size": 32, "progress": False, "key": KEY}
    data = x, x[:, 0]
    alone = lambda: ee.fit(ensemble, loss, OPTIMISER, data, **options)
    alone()
    for name, open_executor in EXECUTORS.items():
        for shard in shards:
            with open_executor() as executor:
                counting = Counting(executor)
                run = ft.partial(ee.fleet.fit, counting, ensemble, loss, OPTIMISER, data, shard=shard, **options)
                run()
                counting.num_bytes = 0
                pairs = [(_seconds(run), _seconds(alone)) for _ in range(rounds)]
            question = f"{name}, shards of {shard}"
            report.rows.append(ratio_row(question, f"{name} / one fit", [ours[0] / one[0] for ours, one in pairs]))
            moved = f", {counting.num_bytes / rounds / 1e6:.0f} MB travelled"
            report.facts[question] = f"{_text(*pairs[0][0])}{moved}; one fit {_text(*pairs[0][1])}"


def _text(wall: float, cpu: float) -> str:
    return f"{wall:.1f} s, {cpu:.1f} CPU s"


def _seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


@contextlib.contextmanager
def _pool() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield pool


EXECUTORS: dict[str, Callable[[], Any]] = {"one thread": lambda: ThreadPoolExecutor(1), "two processes": _pool}


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
