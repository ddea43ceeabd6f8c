"""`predict` of few and of many rows beside one plain jitted `vmap` over all rows."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _measure import Report, compared, interleaved, repeated, script
from _problems import tiny

import eqx_ensemble as ee

ROWS = (1, 64, 32_768)


def measure(quick: bool) -> Report:
    report = Report("Prediction")
    ensemble = tiny(quick=quick).ensemble()
    for count in ROWS[:2] if quick else ROWS:
        x = jax.random.normal(jax.random.key(1), (count, 13))
        ways = _ways(ensemble, x)
        ours, plain, *_ = (np.asarray(run()) for run in ways.values())
        far = np.max(np.abs(ours - plain)) / np.max(np.abs(plain))
        if far > 1e-5:
            raise AssertionError(f"`predict` differs from vmap by {far:.1e}")
        size, calls = f"{ensemble.num_members} tiny members, {count:,} rows", 2 if quick else max(1, 200 // count)
        contenders = [repeated(f"{size}: {name}", run, calls) for name, run in ways.items()]
        times = interleaved(contenders, rounds=3 if quick else 15)
        report.timings += times.values()
        own, plain, mean, plain_mean = times.values()
        target = "<= 1.5" if count < 1000 else "<= 0.6"
        report.rows += [
            compared(f"{size}: all", own, plain, target=target),
            compared(f"{size}: mean", mean, plain_mean),
        ]
    return report


def _ways(ensemble: ee.Ensemble, x: jax.Array) -> dict[str, Callable[[], Any]]:
    return {
        "predict": lambda: ee.predict(ensemble, x, progress=False),
        "jitted vmap": lambda: _all_rows(ensemble, x),
        "predict, mean": lambda: ee.predict(ensemble, x, combine=ee.combine.mean, progress=False),
        "jitted vmap and mean": lambda: _mean(ensemble, x),
    }


@eqx.filter_jit
def _all_rows(ensemble: ee.Ensemble, x: jax.Array) -> jax.Array:
    return eqx.filter_vmap(lambda model, x: jax.vmap(model)(x), in_axes=(eqx.if_array(0), None))(ensemble.stacked, x)


@eqx.filter_jit
def _mean(ensemble: ee.Ensemble, x: jax.Array) -> jax.Array:
    return jnp.mean(_all_rows(ensemble, x), axis=0)


if __name__ == "__main__":
    script(measure, cores=0)
