"""Memory of many members over workers: 100,000 are trained by shards, saved where they are made, and combined.

No process holds them all: a function makes the members of a shard on its worker, `save` leaves them there, and
`fleet.predict` reads them shard by shard and merges parts of a mixture. The peaks are those of resident memory
(`VmHWM`), which counts the libraries that processes share once for each. They are measured by processes that do nothing
else; the peak of Python with JAX, before any member is there, is given beside them.
"""

import functools as ft
import multiprocessing
import pathlib
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Report, Row, script

import eqx_ensemble as ee

LIMIT = 1e9


def make(key: Any) -> eqx.nn.MLP:
    return eqx.nn.MLP(13, 1, 16, 1, key=key)


def build(ids: np.ndarray) -> Any:
    return ee.build(make, ids=ids, key=jax.random.key(0))


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def measure(quick: bool) -> Report:
    members, shard, workers = (40, 10, 1) if quick else (100_000, 1000, 1)
    x = np.random.default_rng(0).normal(size=(512, 13)).astype(np.float32)
    report = Report("Memory of a fleet")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (members, shard, workers, x, pathlib.Path(folder))
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as pool:  # a caller that does nothing else
            found = pool.submit(_call, *arguments).result()
        with ProcessPoolExecutor(1, context) as pool:
            bare = pool.submit(_start).result()
        on_disk = sum(path.stat().st_size for path in pathlib.Path(folder).rglob("*") if path.is_file())
    report.facts |= {word: text for word, text in found.items() if isinstance(text, str)}
    report.facts["files"] = f"{on_disk / 1e6:.0f} MB"
    report.facts["Python with JAX and this library"] = f"{bare / 1e6:.0f} MB for each process"
    total = found["caller"] + sum(found["workers"])
    report.facts["peaks"] = f"caller {found['caller'] / 1e6:.0f} MB, " + ", ".join(
        f"worker {peak / 1e6:.0f} MB" for peak in found["workers"]
    )
    question = f"{members:,} members by shards of {shard:,}, {workers} worker"
    report.rows.append(Row(question, "peak memory of all processes / 1 GB", total / LIMIT, None, None, None, "<= 1"))
    return report


def _call(members: int, shard: int, workers: int, x: np.ndarray, folder: pathlib.Path) -> dict[str, Any]:
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    found: dict[str, Any] = {}
    with pool:
        options = {"epochs": 3, "batch_size": 32, "history": "last", "progress": False, "key": jax.random.key(0)}
        run, seconds = _seconds(
            lambda: ee.fleet.fit(
                pool, build, loss, optax.adam(1e-2), (x, x[:, 0]), ids=range(members), shard=shard, workers=workers,
                save=folder / "run", **options,
            )
        )  # fmt: skip
        found["training"] = f"{seconds:.1f} s"
        combinations = {
            "moments of the mixture": ee.combine.moments,
            "its quantiles": ee.combine.QuantileSketch((0.05, 0.5, 0.95)),
        }
        for name, combine in combinations.items():
            out, seconds = _seconds(
                ft.partial(ee.fleet.predict, pool, run, x, combine=combine, workers=workers, progress=False)
            )
            jax.block_until_ready(out)
            found[name] = f"{seconds:.1f} s"
        found["workers"] = [pool.submit(_peak).result() for _ in range(workers)]
    found["caller"] = _peak()
    return found


def _seconds(call: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    return call(), time.perf_counter() - begun


def _start() -> int:
    jax.block_until_ready(jnp.zeros(()) + 1)
    return _peak()


def _peak() -> int:
    """The peak of this process's resident memory, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    script(measure)
