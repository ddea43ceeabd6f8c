"""Adapters: many members that fine-tune one base model; their time and bytes, and how well they predict shifted data.

`row` is one row through twelve layers, where reading the weights takes the time. `bytes` and `transformer` are those of
a random transformer: weights and moments of Adam, a training step, a prediction. `quality` is in `_fine_tuning.py`.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import _fine_tuning
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Contender, Report, Timing, compared, interleaved, ratio_row, script
from _models import Transformer, mlp

import eqx_ensemble as ee
from eqx_ensemble._cores import num_cores

PARTS = ("row", "bytes", "transformer", "quality")
RANK, COUNTS = 8, (1, 4, 16, 64)
ADAM = optax.adam(1e-4)
KEY = jax.random.key(0)


def measure(quick: bool, parts: Sequence[str]) -> Report:
    report = Report("Adapters of one base")
    report.facts["cores"] = str(num_cores())
    for part in parts:
        {"row": _row, "bytes": _bytes, "transformer": _transformer, "quality": _fine_tuning.report_quality}[part](
            report, quick=quick
        )
    return report


def _row(report: Report, *, quick: bool) -> None:
    """Members of one base beside a hand-written `vmap` of the same products, whole copies, and the base alone."""
    width, copies, counts = (16, 2, (1, 4)) if quick else (1024, 8, COUNTS)
    base, x = mlp([width] * 13, KEY), jax.random.normal(KEY, (width,))
    plain, call = eqx.filter_jit(lambda model, x: model(x)), eqx.filter_jit(lambda ensemble, x: ensemble(x))
    ways: dict[str, Callable[[], Any]] = {"the base": lambda: plain(base, x)}
    for n in counts:
        ensemble = _random_up(ee.methods.adapters.low_rank(base, n, rank=RANK, key=KEY))
        ways[f"{n}, call"] = lambda e=ensemble: call(e, x)
        ways[f"{n}, predict"] = lambda e=ensemble: ee.predict(e, x[None])
        ways[f"{n}, vmap"] = ft.partial(_by_hand, [m for m in _matrices(ensemble)], x)
        found, expected = call(ensemble, x), ways[f"{n}, vmap"]()
        if not np.allclose(found, expected, atol=1e-4):
            raise AssertionError(f"{n} members are not those by hand: {np.abs(found - expected).max():.1e} apart")
    whole = ee.stack([base] * copies)
    ways[f"{copies} whole copies, call"] = lambda: call(whole, x)
    repeats = 2 if quick else 5
    repeated = lambda run: lambda: [jax.block_until_ready(run()) for _ in range(repeats)][-1]
    contenders = [Contender(name, repeated(run), repeats) for name, run in ways.items()]
    times = interleaved(contenders, rounds=3 if quick else 25)
    report.timings += times.values()
    report.facts["one row: fastest milliseconds"] = _fastest(times)
    for n in counts[1:]:
        for way in ("call", "predict", "vmap"):
            target = "<= 2" if n == 16 and way != "vmap" else ""
            question = f"one row, {n} members: {way}"
            report.rows.append(compared(question, times[f"{n}, {way}"], times[f"1, {way}"], target=target))
    for name in (f"{copies} whole copies, call", "1, call"):
        report.rows.append(compared(f"one row: {name}", times[name], times["the base"]))


def _matrices(ensemble: ee.Ensemble) -> Any:
    """Weight, bias, `down` and `up` of every layer."""
    return ((layer.layer.weight, layer.bias, layer.down, layer.up) for layer in ensemble.stacked.layers)


@eqx.filter_jit
def _by_hand(layers: Any, x: jax.Array) -> jax.Array:
    """What one would write: the members' matrices are mapped, the weights are not."""

    def of_member(own: Any) -> jax.Array:
        hidden = x
        for i, ((weight, bias, _, _), (down, up)) in enumerate(zip(layers, own, strict=True)):
            hidden = weight @ hidden + up @ (down @ hidden) + bias
            hidden = jax.nn.relu(hidden) if i < len(layers) - 1 else hidden
        return hidden

    return jax.vmap(of_member)([(down, up) for _, _, down, up in layers])


def _random_up(ensemble: Any) -> Any:
    """Adapters as after training: `up` is zero before."""
    fill = lambda x: 0.1 * jax.random.normal(KEY, x.shape)
    return eqx.tree_at(lambda e: [layer.up for layer in e.stacked.layers], ensemble, replace_fn=fill)


def _bytes(report: Report, *, quick: bool) -> None:
    """Weights and both moments of Adam, of all that is stored in training."""
    for name, (width, depth) in {"20 million": (32, 2)}.items() if quick else _SIZES.items():
        base = Transformer(width, depth, key=KEY)
        one = 3 * _num_bytes(base)
        report.facts[f"{name} weights: the base"] = f"{one // 12:,} weights; {one / 1e6:.0f} MB with Adam's state"
        for n in COUNTS:
            for where in (None, eqx.nn.MultiheadAttention):
                ensemble = ee.methods.adapters.low_rank(base, n, rank=RANK, where=where, key=KEY)
                own = 3 * _num_bytes(ee.train.init(ensemble, ADAM, key=KEY).params)
                layers = "all layers" if where is None else "attention alone"
                target = "<= 1.2" if n == 16 else ""
                ratio = (_num_bytes(base) + own) / one
                question = f"{name} weights, {n} members, {layers}: bytes in training"
                report.rows.append(ratio_row(question, "adapters / one whole model", [ratio], target=target))
                report.rows.append(ratio_row(question, f"adapters / {n} whole models", [ratio / n]))


_SIZES = {"20 million": (512, 6), "100 million": (1024, 8)}


def _num_bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x))


def _transformer(report: Report, *, quick: bool) -> None:
    """A step on two sequences of sixteen bytes; a prediction for one. Whole models: as many as memory allows."""
    width, depth = (32, 2) if quick else _SIZES["20 million"]
    base = Transformer(width, depth, key=KEY)
    batch = jax.random.randint(KEY, (2, 17), 0, 256)
    steps, predictions = [], []
    for n, is_whole in [(n, False) for n in COUNTS[: 2 if quick else 4]] + [(1, True), (4, True)]:
        if is_whole:
            ensemble = ee.stack([base] * n)
        else:
            ensemble = ee.methods.adapters.low_rank(base, n, rank=RANK, key=KEY)
        name = f"{n} whole" if is_whole else f"{n} members"
        state, step = ee.train.init(ensemble, ADAM, key=KEY), ee.train.make_step(_next_byte, ADAM)
        steps.append(Contender(f"a step, {name}", lambda s=state, f=step: f(s, batch)[1].loss))
        predictions.append(Contender(f"a prediction, {name}", lambda e=ensemble: ee.predict(e, batch[:1, :16])))
    for what, contenders in (("a step", steps), ("a prediction", predictions)):
        times = interleaved(contenders, rounds=3 if quick or what == "a step" else 9)
        report.timings += times.values()
        report.facts[f"transformer, fastest milliseconds of {what}"] = _fastest(times)
        names = list(times)
        for name in names[1:]:
            report.rows.append(compared(f"transformer: {name}", times[name], times[names[0]]))
        report.rows.append(compared(f"transformer: {what}, one member", times[names[0]], times[names[-2]]))


def _next_byte(model: Any, batch: jax.Array, key: Any) -> jax.Array:
    logits = jax.vmap(model)(batch[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]))


def _fastest(times: dict[str, Timing]) -> str:
    return ", ".join(f"{name} {1e3 * time.wall.min():.3g}" for name, time in times.items())


if __name__ == "__main__":
    script(measure, parts=PARTS, cores=0)
