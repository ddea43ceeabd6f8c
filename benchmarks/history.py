"""What does the history of many members cost? Bytes that come to the host, and time, under each `history` of `fit`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Contender, Report, compared, interleaved, ratio_row, script

import eqx_ensemble as ee
from eqx_ensemble.train.data._sources import ChunkWork

HISTORIES = ("all", 32, "last")


def measure(quick: bool) -> Report:
    report = Report("History")
    members, steps = (1_000, 32) if quick else (100_000, 128)
    key = jax.random.key(0)
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), members, key=key)
    x = jax.random.normal(key, (64, 2))
    data, optimiser = (x, jnp.sum(x, axis=1, keepdims=True)), optax.sgd(1e-2)
    options = {"steps": steps, "batch_size": 8, "shuffle": "shared", "key": key}
    fit = lambda history: ee.fit(ensemble, _loss, optimiser, data, history=history, **options)
    moved = {}
    for history in HISTORIES:
        with _sizes() as found:
            run = fit(history)
        moved[history] = sum(found)
        kept = run.history.loss.nbytes
        report.facts[f"history={history!r}"] = f"{moved[history]:,} B to the host, {kept:,} B kept, {len(found)} chunks"
    report.facts["members"] = f"{members:,} linear models of 3 weights, {steps} steps"
    times = interleaved([Contender(str(h), lambda h=h: fit(h).status) for h in HISTORIES], rounds=3 if quick else 7)
    report.timings += times.values()
    for history in HISTORIES[1:]:
        ratio = np.array([moved["all"] / moved[history]])
        report.rows.append(ratio_row(f"history={history!r}: bytes to the host", "all / thinned", ratio, target=">= 8"))
        report.rows.append(compared(f"history={history!r}: time", times[str(history)], times["all"]))
    return report


def _loss(model: Any, batch: Any, key: Any) -> Any:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@contextmanager
def _sizes() -> Iterator[list[int]]:
    """The bytes of the results of the chunks that run in this context, as the host receives them."""
    unpack, sizes = ChunkWork.unpack, []

    def sized(self: Any, results: Any, carry: Any) -> Any:
        sizes.append(sum(np.asarray(x).nbytes for x in jax.tree.leaves(results)))
        return unpack(self, results, carry)

    ChunkWork.unpack = sized
    try:
        yield sizes
    finally:
        ChunkWork.unpack = unpack


if __name__ == "__main__":
    script(measure)
