"""When is `vmap` fast? The same function of one member, run for all in the ways that jax offers.

`vmap` wins where one member leaves the machine idle. A Python loop has the cost of one call per member; `lax.map` has
no calls, but does not batch; code batched by hand is what `vmap` generates.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _measure import Contender, Report, compared, interleaved, script

import eqx_ensemble as ee


@dataclasses.dataclass(frozen=True)
class Work:
    """A function of one member's arrays, and the same batched by hand over the leading `members` axis."""

    name: str
    one: Callable[[Any], jax.Array]
    by_hand: Callable[[Any], jax.Array]
    stacked: Any

    @property
    def num_members(self) -> int:
        """The number of members."""
        return jax.tree.leaves(self.stacked)[0].shape[0]


def measure(quick: bool) -> Report:
    report = Report("When vmap is fast")
    num_members = 6 if quick else 64
    for work in _works(num_members, quick=quick):
        ways = _ways(work)
        _check_equal(report, work, ways)
        contenders = [Contender(name, ft.partial(run, work.stacked)) for name, run in ways.items()]
        repeats = 1 if quick else _repeats(ways["vmap"], work.stacked)
        contenders = [_repeated(contender, repeats) for contender in contenders]
        times = interleaved(contenders, rounds=3 if quick else 9)
        for name, timing in times.items():
            report.timings.append(dataclasses.replace(timing, name=f"{work.name}: {name}"))
            if name != "vmap":
                target = ">= 0.9" if name == "by hand" else ""
                report.rows.append(compared(f"{work.name}: {name}", timing, times["vmap"], target=target))
    return report


def _works(num_members: int, *, quick: bool) -> list[Work]:
    works = [_elementwise(num_members, 100)]
    works += [_matvec(num_members, size) for size in ((8,) if quick else (16, 128, 1024))]
    sizes = ((4, 8, 2),) if quick else ((13, 50, 1), (256, 256, 10))
    return works + [_mlp(num_members, 32, *size) for size in sizes]


def _elementwise(num_members: int, size: int) -> Work:
    keys = jax.random.split(jax.random.key(0))
    stacked = tuple(jax.random.normal(key, (num_members, size)) for key in keys)
    fn = lambda pair: jnp.tanh(pair[0] * pair[1]) + pair[0]
    return Work(f"elementwise {size}", fn, fn, stacked)


def _matvec(num_members: int, size: int) -> Work:
    keys = jax.random.split(jax.random.key(1))
    stacked = (jax.random.normal(keys[0], (num_members, size, size)), jax.random.normal(keys[1], (num_members, size)))
    by_hand = lambda pair: jnp.einsum("moi,mi->mo", *pair)
    return Work(f"matrix x vector {size}", lambda pair: pair[0] @ pair[1], by_hand, stacked)


def _mlp(num_members: int, batch: int, inputs: int, width: int, out: int) -> Work:
    """The mean-square gradient of an MLP with one hidden layer."""
    ensemble = ee.build(lambda key: eqx.nn.MLP(inputs, out, width, 1, key=key), num_members, key=jax.random.key(2))
    x = jax.random.normal(jax.random.key(3), (batch, inputs))
    first, second = ensemble.stacked.layers
    stacked = (first.weight, first.bias, second.weight, second.bias)

    def one(weights: Any) -> jax.Array:
        w1, b1, w2, b2 = weights
        return jnp.mean((jax.nn.relu(x @ w1.T + b1) @ w2.T + b2) ** 2)

    def all_members(weights: Any) -> jax.Array:
        w1, b1, w2, b2 = weights
        hidden = jax.nn.relu(jnp.einsum("bi,moi->mbo", x, w1) + b1[:, None])
        return jnp.sum(jnp.mean((jnp.einsum("mbi,moi->mbo", hidden, w2) + b2[:, None]) ** 2, axis=(1, 2)))

    return Work(f"MLP gradient {inputs}-{width}-{out}", jax.grad(one), jax.grad(all_members), stacked)


def _ways(work: Work) -> dict[str, Callable[[Any], Any]]:
    one = jax.jit(work.one)
    parts = ee.tree.unstack(work.stacked)
    planned = lambda plan: jax.jit(lambda stacked: ee.map_members(work.one, plan=plan)(ee.Each(stacked)))
    some = work.num_members // 9 + 3  # does not divide the number of members
    few = work.num_members // 2 + 1
    return {
        "vmap": jax.jit(jax.vmap(work.one)),
        "Python loop of jitted calls": lambda _: [one(part) for part in parts],
        "lax.map": jax.jit(lambda stacked: jax.lax.map(work.one, stacked)),
        "by hand": jax.jit(work.by_hand),
        "ee.plan.Vmap": planned(ee.plan.Vmap()),
        f"ee.plan.Blocks({some})": planned(ee.plan.Blocks(some)),
        f"ee.plan.Blocks({few})": planned(ee.plan.Blocks(few)),
        "ee.plan.Blocks(1)": planned(ee.plan.Blocks(1)),
    }


def _check_equal(report: Report, work: Work, ways: dict[str, Callable[[Any], Any]]) -> None:
    """Results before times: every way must give what `vmap` gives."""
    expected = jax.tree.map(np.asarray, ways["vmap"](work.stacked))
    furthest = {}
    for name, run in ways.items():
        found = run(work.stacked)
        found = ee.tree.stack(found) if isinstance(found, list) else found
        furthest[name] = max(jax.tree.leaves(jax.tree.map(_distance, found, expected)))
        if furthest[name] > 1e-5:
            raise AssertionError(f"{work.name}: `{name}` differs from vmap by {furthest[name]:.1e}")
    blocks = {name: far for name, far in furthest.items() if "Blocks" in name}
    words = ", ".join(f"{name} {'bit for bit' if far == 0 else f'{far:.0e}'}" for name, far in blocks.items())
    report.facts[f"{work.name}: equal to vmap"] = f"all within {max(furthest.values()):.0e}; {words}"


def _distance(found: Any, expected: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(found) - expected)) / np.max(np.abs(expected)))


def _repeats(run: Callable[[Any], Any], stacked: Any) -> int:
    """The number of calls for which the clock's resolution does not matter."""
    contender = Contender("once", lambda: run(stacked))
    once = np.median(interleaved([contender], rounds=5)["once"].wall)
    return max(1, int(0.02 / once))


def _repeated(contender: Contender, repeats: int) -> Contender:
    def run() -> Any:
        for _ in range(repeats):
            last = jax.block_until_ready(contender.run())
        return last

    return Contender(contender.name, run, repeats)


if __name__ == "__main__":
    script(measure)
