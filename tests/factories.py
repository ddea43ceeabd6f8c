"""Models, each with data and a loss of ONE member, and the loop that trains one alone: plain Equinox and optax."""

import contextlib
import dataclasses
import os
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_ensemble as ee

ROWS = 20


class ConvBatchNorm(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 3, 3, key=k1)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
        self.out = eqx.nn.Linear(3, 2, key=k2)

    def __call__(self, x, state):
        x, state = self.norm(self.conv(x.reshape(1, 5, 5)), state)
        return self.out(jnp.mean(jax.nn.relu(x), axis=(1, 2))), state


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(5, 4, key=k1)
        self.out = eqx.nn.Linear(4, 2, key=k2)

    def __call__(self, x):
        hidden, _ = jax.lax.scan(lambda h, token: (self.cell(token, h), None), jnp.zeros(4), x.reshape(5, 5))
        return self.out(hidden)


class Attention(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, 5, dropout_p=0.2, output_size=4, key=k1)
        self.norm = eqx.nn.LayerNorm(4)
        self.dropout = eqx.nn.Dropout(0.3)
        self.out = eqx.nn.Linear(4, 2, key=k2)

    def __call__(self, x, *, key):
        k1, k2 = jax.random.split(key)
        tokens = x.reshape(5, 5)
        mixed = jax.vmap(self.norm)(self.attention(tokens, tokens, tokens, key=k1))
        return self.out(self.dropout(jnp.mean(mixed, axis=0), key=k2))


class _TiedPair(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, x):
        return self.second(jax.nn.tanh(self.first(x)))


class Tied(eqx.Module):
    shared: eqx.nn.Shared
    out: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        pair = _TiedPair(eqx.nn.Linear(25, 25, key=k1), eqx.nn.Linear(25, 25, key=k2))
        self.shared = eqx.nn.Shared(pair, where=lambda p: p.second.weight, get=lambda p: p.first.weight)
        self.out = eqx.nn.Linear(25, 2, key=k3)

    def __call__(self, x):
        return self.out(self.shared()(x))


class IntegersAndKeys(eqx.Module):
    """Draws its noise from a key of its own and permutes its features by a table of its own."""

    linear: eqx.nn.Linear
    noise: jax.Array
    table: jax.Array
    legacy: jax.Array
    name: str
    width: int

    def __init__(self, key):
        k1, self.noise, k3 = jax.random.split(key, 3)
        self.linear = eqx.nn.Linear(25, 2, key=k1)
        self.table = jax.random.permutation(k3, 25)
        self.legacy = jax.random.key_data(k3)
        self.name = "integers and keys"
        self.width = 25

    def __call__(self, x):
        noise = jax.random.normal(self.noise, (self.width,)) + jax.random.normal(self.legacy, (self.width,))
        return self.linear(x[self.table] + 0.1 * noise)


class Callables(eqx.Module):
    first: eqx.nn.Linear
    activations: list[Callable]
    out: eqx.nn.Linear
    scale: Callable

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.first = eqx.nn.Linear(25, 6, key=k1)
        self.activations = [jax.nn.gelu, lambda x: x * jax.nn.sigmoid(x), jnp.tanh]
        self.out = eqx.nn.Linear(6, 2, key=k2)
        self.scale = eqx.nn.Lambda(lambda x: 2 * x)

    def __call__(self, x):
        x = self.first(x)
        for activation in self.activations:
            x = activation(x)
        return self.out(self.scale(x))


def mlp(key):
    return eqx.nn.MLP(25, 2, 8, 2, key=key)


def bfloat16(key):
    return eqx.nn.MLP(25, 2, 8, 1, dtype=jnp.bfloat16, key=key)


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def mse_with_keys(model, batch, key):
    x, y = batch
    out = jax.vmap(lambda x, key: model(x, key=key))(x, jax.random.split(key, len(x)))
    return jnp.mean((out - y) ** 2)


def mse_bfloat16(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x.astype(jnp.bfloat16)).astype(y.dtype) - y) ** 2)


def mse_with_state(model, state, batch, key):
    x, y = batch
    out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    return jnp.mean((out - y) ** 2), state


class Case(NamedTuple):
    """A model to train: `make(key)`, its loss, and how far bits may go apart when members run side by side.

    `eps` is Adam's: a bias in front of a normalisation layer has only rounding noise for a gradient, and the usual
    1e-8 blows it up. The tolerance of bfloat16 is four of its rounding steps: 0.023 was seen after 20 updates.
    """

    make: Callable[..., Any]
    loss: Callable[..., Any] = mse
    eps: float = 1e-8
    rtol: float = 1e-5
    stateful: bool = False


CASES = {
    "mlp": Case(mlp),
    # Statistics of a batch divide by small numbers: 1.0e-5 was seen without optimisation.
    "conv and batch norm": Case(
        eqx.nn.make_with_state(ConvBatchNorm), mse_with_state, eps=1e-3, rtol=3e-5, stateful=True
    ),
    "recurrent": Case(Recurrent),
    "attention and dropout": Case(Attention, mse_with_keys, eps=1e-4),
    "tied weights": Case(Tied),
    "integers and keys": Case(IntegersAndKeys),
    "callables": Case(Callables),
    "bfloat16": Case(bfloat16, mse_bfloat16, rtol=3.2e-2),
}


def data(rows=ROWS, seed=7):
    """Inputs `(rows, 25)` and targets `(rows, 2)` of one regression."""
    kx, ky = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(kx, (rows, 25))
    return x, jnp.stack([jnp.sin(x[:, 0]) + x[:, 1], x[:, 2] * x[:, 3]], axis=1) + 0.1 * jax.random.normal(
        ky, (rows, 2)
    )


@contextlib.contextmanager
def relaxed():
    """The dtype promotion that optax needs; the test suite sets it to strict."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def step_key(key, member, step, purpose="loss"):
    """The key of one member at one step: that of the member, then purpose and step."""
    for number in (zlib.crc32(b"fit"), int(member), zlib.crc32(purpose.encode()), int(step)):
        key = jax.random.fold_in(key, number)
    return key


class Alone:
    """One model trained alone, one Python step at a time."""

    def __init__(self, loss, optimiser, *, stateful=False, trainable=eqx.is_inexact_array):
        self.trainable = trainable
        self.optimiser = optax.with_extra_args_support(optimiser)

        def value(params, frozen, state, batch, key):
            model = eqx.combine(params, frozen)
            return loss(model, state, batch, key) if stateful else (loss(model, batch, key), None)

        @eqx.filter_jit
        def step(params, frozen, opt_state, state, batch, key):
            (loss_value, state), grads = eqx.filter_value_and_grad(value, has_aux=True)(
                params, frozen, state, batch, key
            )
            value_fn = lambda p: value(p, frozen, state, batch, key)[0]
            with relaxed():
                updates, new_opt_state = self.optimiser.update(
                    grads, opt_state, params, value=loss_value, grad=grads, value_fn=value_fn
                )
                new_params = eqx.apply_updates(params, updates)
            return new_params, new_opt_state, state, loss_value

        self.step = step
        self.value = eqx.filter_jit(value)

    def init(self, model):
        with relaxed():
            return self.optimiser.init(eqx.filter(model, self.trainable))

    def __call__(self, model, batches, keys, *, state=None, opt_state=None):
        """Trains on the batches with the keys. Returns the model, its state and the losses before each step."""
        params, frozen = eqx.partition(model, self.trainable)
        opt_state = self.init(model) if opt_state is None else opt_state
        losses = []
        for batch, key in zip(batches, keys, strict=True):
            params, opt_state, state, loss = self.step(params, frozen, opt_state, state, batch, key)
            losses.append(loss)
        return eqx.combine(params, frozen), state, np.array(losses)


def in_order(data, batch_size, steps, rows=None):
    """The first `steps` batches of the data in the order of its rows, again and again."""
    count = len(jax.tree.leaves(data)[0]) if rows is None else len(rows)
    rows = np.arange(count) if rows is None else np.asarray(rows)
    stream = np.resize(rows, steps * batch_size).reshape(steps, batch_size)
    return [jax.tree.map(lambda x, own=own: x[own], data) for own in stream]


def numbers(tree):
    """The array leaves of a tree on the host, keys as their data, with their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(eqx.filter(tree, eqx.is_array))[0]
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return {jax.tree_util.keystr(path): np.asarray(raw(x)) for path, x in leaves}


def distance(got, expected):
    """The worst difference of two trees, relative to the largest number of each leaf; infinite where not finite."""
    got, expected = numbers(got), numbers(expected)
    assert list(got) == list(expected)
    assert got, "there is nothing to compare"
    worst = 0.0
    for path, x in got.items():
        y = expected[path]
        assert x.shape == y.shape, path
        assert x.dtype == y.dtype, path
        if x.size == 0 or np.array_equal(x, y):
            continue
        x, y = x.astype(np.float64), y.astype(np.float64)
        gap = np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-30)
        worst = max(worst, gap if np.isfinite(gap) else np.inf)
    return worst


def assert_close(got, expected, rtol):
    """Two trees agree: relative to the largest number of each leaf."""
    found = distance(got, expected)
    assert found <= rtol, f"relative distance {found:.2g}, at most {rtol:.2g} allowed"


def assert_same(got, expected):
    """Two trees agree in every bit."""
    got, expected = numbers(got), numbers(expected)
    assert list(got) == list(expected)
    for path, x in got.items():
        np.testing.assert_array_equal(x, expected[path], err_msg=path)
        assert x.dtype == expected[path].dtype


def assert_same_where_optimised(got, expected):
    """Two trees agree in every bit, if XLA compiles as it does for users.

    With little optimisation its loops follow the number of members, and a sum may be one rounding away in each step.
    """
    exact = "optimization_level=0" not in os.environ.get("XLA_FLAGS", "")
    got, expected = numbers(got), numbers(expected)
    assert list(got) == list(expected)
    for path, x in got.items():
        if exact or not np.issubdtype(x.dtype, np.floating):
            np.testing.assert_array_equal(x, expected[path], err_msg=path)
        else:
            np.testing.assert_allclose(x, expected[path], rtol=1e-5, atol=1e-6, err_msg=path)
        assert x.dtype == expected[path].dtype


def grouped(options):
    """The options of `fit`, from ones that random calls and tables list one by one."""
    left, group = dict(options), lambda *words: {word: left.pop(word) for word in words if word in left}
    judged = group("score", "mode", "min_delta", "smooth")
    if judged and left.get("validation") is not None:
        left["validation"] = ee.train.Validation(left["validation"], **judged)
    if stops := {word.removeprefix("max_"): x for word, x in group("target", "max_steps", "max_seconds").items()}:
        left["stop"] = ee.train.Stopping(**stops)
    every = left.pop("checkpoint_every", None)
    if every is not None and left.get("checkpoint") is not None:
        left["checkpoint"] = ee.train.Checkpoint(left["checkpoint"], every)
    if (every := left.pop("callback_every", None)) is not None:
        callbacks = left.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
        left["callbacks"] = [ee.train.every(every, callback) for callback in callbacks]
    if (scan := left.pop("scan", None)) is not None:
        plan = left.get("plan") or ee.plan.Vmap()
        left["plan"] = dataclasses.replace(plan, scan=scan)
    return left
