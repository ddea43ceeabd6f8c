"""Compiled calls return what `equinox.filter_jit` returns, and keep no arrays."""

import functools as ft
import gc
import os
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble import _compiled
from eqx_ensemble._compiled import CompiledCall, key_of
from eqx_ensemble.train.host._loop import Executor

from .factories import assert_same

KEY = jax.random.key(0)
MEMBERS = 4
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((40, 3), np.float32), RNG.standard_normal((40, 1), np.float32)
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)]
ENSEMBLE = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), MEMBERS, key=KEY)


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def noisy(model, batch, key):
    value = mse(model, batch, key) + 0.1 * jax.random.normal(key)
    return value, {"drawn": jax.random.bits(key)}


def with_hyper(model, batch, key, hyper):
    return hyper["weight"] * mse(model, batch, key) + jnp.where(hyper["weight"] > 3, jnp.nan, 0.0)


def printing(model, batch, key):
    jax.debug.callback(lambda: None)
    return mse(model, batch, key)


HYPER = {"weight": np.arange(1, 5, dtype=np.float32)}
CASES = {
    "plain": (mse, {}),
    "uneven batches": (mse, {"batch_size": 7}),
    "shared": (noisy, {"shuffle": "shared", "has_aux": True}),
    "validation": (mse, {"validation": (X[:6], Y[:6]), "patience": 1, "epochs": 6}),
    "hyper": (with_hyper, {"hyper": HYPER}),
    "limits": (mse, {"stop": ee.train.Stopping(steps=[1, 2, 3, 100])}),
    "revive": (with_hyper, {"hyper": HYPER, "on_diverge": ee.train.Revive(perturb=None)}),
    "callbacks": (printing, {}),
    "one after another": (mse, {"plan": ee.plan.Sequential()}),
    "batches": (noisy, {"has_aux": True, "data": BATCHES}),
    "batches, validation": (mse, {"data": BATCHES, "validation": (X[:6], Y[:6]), "patience": 1, "epochs": 6}),
}


def fitted(kind):
    loss, options = CASES[kind]
    options = {"epochs": 3, "data": (X, Y), "optimiser": optax.adam(0.1), "key": KEY} | options
    if isinstance(options["data"], tuple):
        options = {"batch_size": 8} | options
    run = ee.fit(ENSEMBLE, loss, **options)
    return {name: value for name, value in vars(run).items() if name not in ("seconds", "plan")}


@pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")
@pytest.mark.parametrize("kind", CASES)
def test_it_is_filter_jit(kind, monkeypatch):
    run = fitted(kind)
    calls = []

    def plain(self, read, carry=None):
        calls.append(1)
        return eqx.filter_jit(self._fn)(read, carry)

    monkeypatch.setattr(CompiledCall, "__call__", plain)
    expected = fitted(kind)
    assert calls
    assert_same(*(eqx.filter(tree, eqx.is_array_like) for tree in (run, expected)))


class Numbers(eqx.Module):
    x: Any
    other: Any = None


def doubled(read, carry):
    program, inputs, batch = read
    return Numbers(carry.x * inputs.x + batch, carry.other), carry.x + len(repr(program.other))


@pytest.mark.parametrize("donate", [False, True])
def test_constants_and_shapes_have_their_own_programs(donate):
    fn = CompiledCall(doubled, donate=donate, owned=donate)
    inputs = Numbers(jnp.float32(2))
    for other in (1, 1.0, True, -0.0, 0.0, 2):
        for shape in ((), (2,)):
            program, batch = Numbers(jnp.zeros(()), other), np.ones(shape, np.float32)
            carry, out = fn((program, inputs, batch), Numbers(jnp.ones(shape)))
            np.testing.assert_array_equal(out, np.full(shape, 1.0 + len(repr(other))))
            carry, out = fn((program, inputs, batch), carry)
            np.testing.assert_array_equal(carry.x, np.full(shape, 7.0))
            np.testing.assert_array_equal(out, np.full(shape, 3.0 + len(repr(other))))
    assert key_of(Numbers(0, 1)) != key_of(Numbers(0, 1.0))
    assert key_of(Numbers(0, 0.0)) != key_of(Numbers(0, -0.0))
    assert key_of(Numbers(0, 1)) == key_of(Numbers(0, 1))


@pytest.mark.parametrize("other", [None, "text"])
@pytest.mark.parametrize("calls_python", [False, True])
def test_constants_are_returned_and_callbacks_called(calls_python, other):
    called = []

    def fn(read, carry):
        if calls_python:
            jax.debug.callback(lambda: called.append(1))
        after, results = doubled(read, carry)
        return after, (results, other, len(carry.x.shape))

    call, one = CompiledCall(fn), Numbers(jnp.ones(()))
    for _ in range(2):
        carry, results = call((one, one, np.float32(1)), Numbers(jnp.ones(()), other))
        assert carry.other == results[1] == other
        assert carry.x == 2
        assert type(results[2]) is int
    jax.effects_barrier()
    assert len(called) == 2 * calls_python


def test_what_is_changed_in_place_is_seen():
    call = CompiledCall(lambda read, _: (None, read[0].x["a"] + read[0].other[0]))
    numbers = Numbers({"a": jnp.ones(2)}, [1])
    assert call((numbers,))[1].tolist() == [2, 2]
    numbers.x["a"] = jnp.zeros(3)
    assert call((numbers,))[1].tolist() == [1, 1, 1]
    numbers.other[0] = 3
    assert call((numbers,))[1].tolist() == [3, 3, 3]


def test_it_keeps_no_arrays():
    gc.collect()
    before = len(_compiled._remembered)
    fitted("plain")
    gc.collect()
    assert len(_compiled._remembered) == before


def test_a_second_run_begins_at_the_pace_of_the_first(monkeypatch):
    calls, call = [], Executor.call

    def counted(self, work):
        calls.append(work.num_steps)
        return call(self, work)

    monkeypatch.setattr(Executor, "call", counted)
    options = {"batch_size": 20, "epochs": 60, "shuffle": "shared", "key": KEY}
    run = ft.partial(ee.fit, ENSEMBLE, mse, optax.sgd(0.1), (X, Y), **options)
    first, chunks = run(), len(calls)
    assert chunks > 2
    calls.clear()
    again = run()
    assert calls == [120]
    assert_same(again.ensemble, first.ensemble)
    assert_same(again.history, first.history)


@pytest.mark.slow
def test_under_equinox_breakpoints():
    """With this variable Equinox replaces `jax.jit` by a function whose results cannot be traced."""
    program = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import eqx_ensemble as ee
x, y, key, sgd = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32), jax.random.key(0), optax.sgd(0.1)
ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=key)
loss = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)
ee.fit(ensemble, loss, sgd, (x, y), steps=2, key=key)
ee.train.make_step(loss, sgd)(ee.train.init(ensemble, sgd, key=key), (x, y))
print(ee.predict(ensemble, x, combine=ee.combine.mean).shape)
"""
    call = [sys.executable, "-W", "ignore", "-c", program]
    environment = os.environ | {"EQX_ON_ERROR": "breakpoint"}
    assert subprocess.run(call, env=environment, capture_output=True, text=True).stdout == "(8, 1)\n"
