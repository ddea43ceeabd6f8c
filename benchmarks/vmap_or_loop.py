"""When is `vmap` fast? The same function of one member, run for all in the ways that jax offers.

`vmap` wins where one member leaves the machine idle. A Python loop has the cost of one call per member; `lax.map` has
no calls, but does not batch; code batched by hand is what `vmap` generates.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import Contender, Report, compared, interleaved, repeated, script
from _problems import mlp

import eqx_ensemble as ee


@dataclasses.dataclass(frozen=True)
class Work:
    """A function of one member's arrays, and the same batched by hand over the leading `members` axis."""

    name: str
    one: Callable[[Any], jax.Array]
    by_hand: Callable[[Any], jax.Array]
    stacked: Any


def measure(quick: bool) -> Report:
    report, count = Report("When vmap is fast"), 6 if quick else 64
    works = [_elementwise(count, 100)]
    works += [_matvec(count, size) for size in ((8,) if quick else (16, 1024))]
    works += [_mlp(count, 32, *size) for size in (((4, 8, 2),) if quick else ((13, 50, 1), (256, 256, 10)))]
    for work in works:
        ways = _ways(work)
        _check_equal(work, ways)
        once = np.median(interleaved([Contender("vmap", ways["vmap"])], rounds=3)["vmap"].wall)
        calls = 1 if quick else max(1, int(0.02 / once))  # calls for which the clock's resolution does not matter
        contenders = [repeated(name, run, calls) for name, run in ways.items()]
        times = interleaved(contenders, rounds=3 if quick else 9)
        for name, timing in times.items():
            report.timings.append(dataclasses.replace(timing, name=f"{work.name}: {name}"))
            if name != "vmap":
                target = ">= 0.9" if name == "by hand" else ""
                report.rows.append(compared(f"{work.name}: {name}", timing, times["vmap"], target=target))
    return report


def _elementwise(count: int, size: int) -> Work:
    stacked = tuple(jax.random.normal(key, (count, size)) for key in jax.random.split(jax.random.key(0)))
    fn = lambda pair: jnp.tanh(pair[0] * pair[1]) + pair[0]
    return Work(f"elementwise {size}", fn, fn, stacked)


def _matvec(count: int, size: int) -> Work:
    keys = jax.random.split(jax.random.key(1))
    stacked = (jax.random.normal(keys[0], (count, size, size)), jax.random.normal(keys[1], (count, size)))
    by_hand = lambda pair: jnp.einsum("moi,mi->mo", *pair)
    return Work(f"matrix x vector {size}", lambda pair: pair[0] @ pair[1], by_hand, stacked)


def _mlp(count: int, batch: int, inputs: int, width: int, out: int) -> Work:
    """The mean-square gradient of an MLP with one hidden layer."""
    ensemble = ee.build(ft.partial(mlp, (inputs, width, out)), count, key=jax.random.key(2))
    x = jax.random.normal(jax.random.key(3), (batch, inputs))
    first, second = ensemble.stacked.layers

    def one(weights: Any) -> jax.Array:
        w1, b1, w2, b2 = weights
        return jnp.mean((jax.nn.relu(x @ w1.T + b1) @ w2.T + b2) ** 2)

    def all_members(weights: Any) -> jax.Array:
        w1, b1, w2, b2 = weights
        hidden = jax.nn.relu(jnp.einsum("bi,moi->mbo", x, w1) + b1[:, None])
        return jnp.sum(jnp.mean((jnp.einsum("mbi,moi->mbo", hidden, w2) + b2[:, None]) ** 2, axis=(1, 2)))

    stacked = (first.weight, first.bias, second.weight, second.bias)
    return Work(f"MLP gradient {inputs}-{width}-{out}", jax.grad(one), jax.grad(all_members), stacked)


def _ways(work: Work) -> dict[str, Callable[[], Any]]:
    one, parts = jax.jit(work.one), ee.tree.unstack(work.stacked)
    of_all = lambda fn: ft.partial(jax.jit(fn), work.stacked)
    planned = lambda plan: of_all(lambda stacked: ee.map_members(work.one, plan=plan)(ee.Each(stacked)))
    return {
        "vmap": of_all(jax.vmap(work.one)),
        "Python loop of jitted calls": lambda: [one(part) for part in parts],
        "lax.map": of_all(lambda stacked: jax.lax.map(work.one, stacked)),
        "by hand": of_all(work.by_hand),
        "ee.plan.Vmap": planned(ee.plan.Vmap()),
        "ee.plan.Blocks(4)": planned(ee.plan.Blocks(4)),
    }


def _check_equal(work: Work, ways: dict[str, Callable[[], Any]]) -> None:
    """Results before times: every way must give what `vmap` gives."""
    expected = jax.tree.leaves(ways["vmap"]())
    for name, run in ways.items():
        found = run()
        found = jax.tree.leaves(ee.tree.stack(found) if isinstance(found, list) else found)
        far = max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in zip(found, expected, strict=True))
        if far > 1e-5:
            raise AssertionError(f"{work.name}: `{name}` differs from vmap by {far:.1e}")


if __name__ == "__main__":
    script(measure)
