"""Adapters: many members that tune one base model; and one model of several sub-members: their time and bytes.

`row` is one row through twelve layers, where reading the weights takes the time. `bytes` are those of weights and of
Adam's moments, `transformer` steps and predictions of a random one. How well they predict is in `quality.py`.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Contender, Report, Timing, compared, interleaved, ratio_row, repeated, script
from _problems import mlp

import eqx_ensemble as ee

RANK, COUNTS, SIZES = 8, (1, 4, 16, 64), {"20 million": (512, 6), "100 million": (1024, 8)}
CONVERSIONS = ("batch_ensemble", "tabm", "mimo", "masksembles", "packed_ensemble")
ADAM, KEY = optax.adam(1e-4), jax.random.key(0)


class Layer(eqx.Module):
    """One layer of a transformer, normalised before each part."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, *, key: Any):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(8, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, jnp.tri(len(x), dtype=bool))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    """A language model of bytes: logits of the byte after each."""

    embedding: eqx.nn.Embedding
    layers: list[Layer]
    head: eqx.nn.Linear

    def __init__(self, width: int, depth: int, *, key: Any):
        first, last, *keys = jax.random.split(key, depth + 2)
        self.embedding = eqx.nn.Embedding(256, width, key=first)
        self.layers = [Layer(width, key=k) for k in keys]
        self.head = eqx.nn.Linear(width, 256, key=last)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.vmap(self.embedding)(x)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.head)(x)


def measure(quick: bool, parts: Sequence[str]) -> Report:
    report = Report("Adapters of one base")
    for part in parts:
        PARTS[part](report, quick=quick)
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
        ways[f"{n}, vmap"] = ft.partial(_by_hand, ensemble.stacked.layers, x)
        found, expected = call(ensemble, x), ways[f"{n}, vmap"]()
        if not np.allclose(found, expected, atol=1e-4):
            raise AssertionError(f"{n} members are not those by hand: {np.abs(found - expected).max():.1e} apart")
    whole = ee.stack([base] * copies)
    ways[f"{copies} whole copies, call"] = lambda: call(whole, x)
    contenders = [repeated(name, run, 2 if quick else 5) for name, run in ways.items()]
    times = interleaved(contenders, rounds=3 if quick else 25)
    report.timings += times.values()
    for n in counts[1:]:
        for way in ("call", "predict", "vmap"):
            target = "<= 2" if n == 16 and way != "vmap" else ""
            question = f"one row, {n} members: {way}"
            report.rows.append(compared(question, times[f"{n}, {way}"], times[f"1, {way}"], target=target))
    for name in (f"{copies} whole copies, call", "1, call"):
        report.rows.append(compared(f"one row: {name}", times[name], times["the base"]))


@eqx.filter_jit
def _by_hand(layers: Any, x: jax.Array) -> jax.Array:
    """What one would write: the members' matrices are mapped, the weights are not."""

    def of_member(own: Any) -> jax.Array:
        hidden = x
        for i, (layer, (down, up)) in enumerate(zip(layers, own, strict=True)):
            hidden = layer.layer.weight @ hidden + up @ (down @ hidden) + layer.bias
            hidden = jax.nn.relu(hidden) if i < len(layers) - 1 else hidden
        return hidden

    return jax.vmap(of_member)([(layer.down, layer.up) for layer in layers])


def _random_up(ensemble: Any) -> Any:
    """Adapters as after training: `up` is zero before."""
    fill = lambda x: 0.1 * jax.random.normal(KEY, x.shape)
    return eqx.tree_at(lambda e: [layer.up for layer in e.stacked.layers], ensemble, replace_fn=fill)


def _bytes(report: Report, *, quick: bool) -> None:
    """Weights and both moments of Adam, relative to those of one model that is trained whole."""
    for name, (width, depth) in ({"small": (32, 2)} if quick else SIZES).items():
        base = Transformer(width, depth, key=KEY)
        for n in COUNTS[: 2 if quick else 4]:
            for where in (None, eqx.nn.MultiheadAttention):
                ensemble = ee.methods.adapters.low_rank(base, n, rank=RANK, where=where, key=KEY)
                own = 3 * _num_bytes(ee.train.init(ensemble, ADAM, key=KEY).params)
                ratio = (_num_bytes(base) + own) / (3 * _num_bytes(base))
                question = f"{name} weights, {n} members, {'all layers' if where is None else 'attention alone'}: bytes"
                report.rows.append(ratio_row(question, "adapters / one whole model", [ratio]))
    model = mlp((64, 256, 256, 10), KEY)
    for name in CONVERSIONS:
        ratio = _num_bytes(getattr(ee.methods.efficient, name)(model, 4, key=KEY)) / _num_bytes(model)
        report.rows.append(ratio_row(f"4 sub-members: bytes of {name}", f"{name} / one MLP", [ratio]))


def _num_bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x))


def _transformer(report: Report, *, quick: bool) -> None:
    """A step on two sequences of sixteen bytes; a prediction for one; beside one whole model."""
    base = Transformer(*((32, 2) if quick else SIZES["20 million"]), key=KEY)
    batch = jax.random.randint(KEY, (2, 17), 0, 256)
    ensembles = {f"{n} members": ee.methods.adapters.low_rank(base, n, rank=RANK, key=KEY) for n in (1, 16)}
    ensembles["one whole model"] = ee.stack([base])
    step = ee.train.make_step(_next_byte, ADAM)
    states = {name: ee.train.init(ensemble, ADAM, key=KEY) for name, ensemble in ensembles.items()}
    steps = [Contender(f"a step, {name}", lambda s=state: step(s, batch)[1].loss) for name, state in states.items()]
    predict = lambda ensemble: ee.predict(ensemble, batch[:1, :16])
    predictions = [Contender(f"a prediction, {name}", ft.partial(predict, e)) for name, e in ensembles.items()]
    for contenders in (steps, predictions):
        times: dict[str, Timing] = interleaved(contenders, rounds=3 if quick else 5)
        report.timings += times.values()
        one, several, whole = times.values()
        report.rows += [compared("transformer", above, below) for above, below in ((several, one), (one, whole))]


def _next_byte(model: Any, batch: jax.Array, key: Any) -> jax.Array:
    logits = jax.vmap(model)(batch[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]))


PARTS: dict[str, Callable[..., None]] = {"row": _row, "bytes": _bytes, "transformer": _transformer}

if __name__ == "__main__":
    script(measure, parts=tuple(PARTS), cores=0)
