"""A call of `fit` as texts, the same in other processes: equal for equal calls, different for others."""

import functools as ft
import itertools
import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import config as jaxtyping_config

import eqx_ensemble as ee
from eqx_ensemble.train import Revive
from eqx_ensemble.train.resume import _code_texts as _texts
from eqx_ensemble.train.resume import _identity

KEY = jax.random.key(0)
SCALE = 3.0
HYPER = {"lr": jnp.ones(2)}


class Scaled(eqx.Module):
    factor: float

    def __call__(self, hyper, key):
        return {"lr": hyper["lr"] * self.factor}


class Plain:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, hyper, key):
        return {"lr": hyper["lr"] * self.factor}


def scaled(factor, hyper, key):
    return {"lr": hyper["lr"] * factor}


def looks(factor):
    """A function that no compiler can trace."""
    return lambda hyper, key: {"lr": hyper["lr"] * (factor if float(hyper["lr"]) > 0 else 1.0)}


def by_global(hyper, key):
    return {"lr": hyper["lr"] * SCALE} if float(hyper["lr"]) > 0 else hyper


def on_host(fn):
    """A function that calls another one on the host, and a check of Equinox, whose error names the lines above it."""

    def perturb(hyper, key):
        lr = eqx.error_if(hyper["lr"], hyper["lr"] < 0, "negative")
        return {"lr": jax.pure_callback(fn, jax.ShapeDtypeStruct(lr.shape, lr.dtype), lr)}

    return perturb


def in_equinox(fn):
    like = jax.ShapeDtypeStruct((), jnp.float32)
    return lambda hyper, key: {"lr": eqx.filter_pure_callback(fn, hyper["lr"], result_shape_dtypes=like)}


class Host(eqx.Module):
    factor: float

    def __call__(self, x):
        return np.asarray(x * self.factor)


def ways():
    """Ways to revive members, all different; created at every call, so that no address is the same."""
    linear = lambda width: lambda key: eqx.nn.Linear(width, 1, key=key)
    return {
        "a clone": Revive(),
        "a clone, twice": Revive(most=2),
        "kept": Revive(perturb=None),
        "0.5": Revive(perturb=lambda hyper, key: {"lr": hyper["lr"] * 0.5}),
        "0.7": Revive(perturb=lambda hyper, key: {"lr": hyper["lr"] * 0.7}),
        "a constant": Revive(perturb=lambda hyper, key: {"lr": 0.5}),
        "another constant": Revive(perturb=lambda hyper, key: {"lr": 0.7}),
        "a partial function": Revive(perturb=ft.partial(scaled, 0.5)),
        "another partial function": Revive(perturb=ft.partial(scaled, 0.7)),
        "an object": Revive(perturb=Plain(0.5)),
        "another object": Revive(perturb=Plain(0.7)),
        "a Module": Revive(perturb=Scaled(0.5)),
        "another Module": Revive(perturb=Scaled(0.7)),
        "looks": Revive(perturb=looks(0.5)),
        "looks otherwise": Revive(perturb=looks(0.7)),
        "looks at NumPy": Revive(perturb=looks(np.arange(3.0))),
        "looks and reads a global": Revive(perturb=by_global),
        "looks, a partial function": Revive(perturb=ft.partial(lambda f, h, k: {"lr": float(h["lr"]) * f}, 0.5)),
        "looks at a set": Revive(
            perturb=lambda h, k: h if str(float(h["lr"])) in {"a", "b", "c", "d"} else {"lr": 1.0}
        ),
        "on the host": Revive(perturb=on_host(lambda x: np.asarray(x * 0.5))),
        "on the host, otherwise": Revive(perturb=on_host(lambda x: np.asarray(x * 0.7))),
        "on the host, a partial function": Revive(perturb=on_host(ft.partial(np.multiply, 0.5))),
        "on the host, another partial function": Revive(perturb=on_host(ft.partial(np.multiply, 0.7))),
        "on the host, a Module": Revive(perturb=on_host(Host(0.5))),
        "on the host, another Module": Revive(perturb=on_host(Host(0.7))),
        "on the host, by Equinox": Revive(perturb=in_equinox(lambda x: np.asarray(x * 0.5))),
        "on the host, otherwise by Equinox": Revive(perturb=in_equinox(lambda x: np.asarray(x * 0.7))),
        "afresh": Revive(linear(3), perturb=None),
        "afresh and wider": Revive(linear(4), perturb=None),
        "afresh, a partial function": Revive(ft.partial(eqx.nn.Linear, 3, 1), perturb=None),
        "afresh, a wider partial function": Revive(ft.partial(eqx.nn.Linear, 4, 1), perturb=None),
        "afresh, drawn by NumPy": Revive(lambda key: eqx.nn.Linear(int(jnp.asarray(3)), 1, key=key), perturb=None),
    }


def texts():
    return {name: _identity._revive_text(how, HYPER) for name, how in ways().items()}


def test_ways_to_revive_differ_by_what_they_do():
    first, again = texts(), texts()
    assert first == again
    assert all(" at 0x" not in text for text in first.values())
    for a, b in itertools.combinations(first, 2):
        assert first[a] != first[b], (a, b)


def test_a_global_that_a_function_reads(monkeypatch):
    before = texts()
    monkeypatch.setitem(globals(), "SCALE", 4.0)
    assert {name for name, text in texts().items() if text != before[name]} == {"looks and reads a global"}


@pytest.mark.slow
def test_another_process_gives_the_same_text():
    """Its addresses are others, and so are the orders of its sets."""
    program = "from tests.train import test_texts as t; print(t.texts())"
    said = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "12"
    }
    assert len(said) == 1


NUMBERS = st.integers(-(2**31), 2**31 - 1)
KINDS = (int, np.int32, np.int64, np.asarray, lambda n: jnp.asarray(n, jnp.int32))


@given(NUMBERS, NUMBERS, st.sampled_from(KINDS), st.sampled_from(KINDS))
def test_a_number_is_the_same_in_every_kind(a, b, kind, other):
    assert (_texts.option_text(kind(a)) == _texts.option_text(other(b))) == (a == b)


@pytest.mark.parametrize("value", [None, True, "freeze", 0.1, [1, 2], np.arange(20)])
def test_what_is_not_alike_differs(value):
    others = [None, False, "revive", 0.2, [1, 3], np.arange(1, 21), np.arange(19)]
    assert all(_texts.option_text(value) != _texts.option_text(other) for other in others if other is not value)


def test_keys_of_both_kinds_and_their_values():
    assert _texts.option_text(jax.random.key(7)) == _texts.option_text(jax.random.PRNGKey(7)) == "[0, 7]"


ENSEMBLE = ee.build(lambda key: eqx.nn.Linear(1, 1, key=key), 2, key=KEY)
DATA = jnp.ones((4, 1)), jnp.zeros((4, 1))
FLOAT = "f64" if jax.config.read("jax_enable_x64") else "f32"
SAVED = {
    "data": DATA,
    "validation": DATA,
    "hyper": {"lr": jnp.array([0.1, 0.2])},
    "patience": np.int64(2),
    "stop": ee.train.Stopping(target=np.float64(1e-9), steps=np.array([3, 9])),
    "on_diverge": Revive(perturb=Plain(0.5)),
    "key": KEY,
}


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def fitted(folder, data, **options):
    by_lr = lambda hyper: optax.sgd(hyper["lr"])
    return ee.fit(ENSEMBLE, mse, by_lr, data, epochs=1, checkpoint=folder, progress=False, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a run is saved; without run-time type checks, as users run, so that NumPy's scalars pass."""
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    folder = tmp_path_factory.mktemp("saved") / "a"
    fitted(folder, **SAVED)
    yield folder
    jaxtyping_config.update("jaxtyping_disable", before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"patience": 50}, "`patience`: saved 2, now 50"),
        ({"stop": ee.train.Stopping(steps=np.int32(4), target=1e-9)}, "`stop.steps`: saved [3, 9], now [4, 4]"),
        (
            {"stop": ee.train.Stopping(steps=[3, 9], target=0.25)},
            "`stop.target`: saved [1e-09, 1e-09], now [0.25, 0.25]",
        ),
        ({"key": jax.random.key(3)}, "`key`: saved [0, 0], now [0, 3]"),
        (
            {"on_diverge": Revive(perturb=Plain(0.7))},
            "`on_diverge`: Revive(make=None, perturb=Plain, most=3), not the same as saved",
        ),
        ({"on_diverge": "freeze"}, "`on_diverge`: saved Revive(make=None, perturb=Plain, most=3), now 'freeze'"),
        (
            {"hyper": {"lr": jnp.array([0.1, 0.3])}},
            f"`hyper['lr']`: saved {FLOAT}[2] [0.1, 0.2], now {FLOAT}[2] [0.1, 0.3]",
        ),
        (
            {"data": (2 * DATA[0], DATA[1])},
            f"`data[0]`: saved {FLOAT}[4,1] [1.0, 1.0, 1.0, 1.0], now {FLOAT}[4,1] [2.0, 2.0, 2.0, 2.0]",
        ),
    ],
)
def test_the_error_lists_differences_with_both_values(folder, change, said):
    with pytest.raises(ValueError, match="this call differs from the one that wrote it") as caught:
        fitted(folder, **(SAVED | change))
    differ = {line for line in str(caught.value).splitlines() if line.startswith("  `")}
    assert differ - {"  `members' keys`: not the same as saved"} == {f"  {said}"}  # which follow from the key


def test_the_same_call_with_other_types_resumes(folder):
    """Lists for arrays, Python's numbers for NumPy's, a function defined again, a legacy key."""
    same = {
        "hyper": {"lr": [0.1, 0.2]},
        "patience": 2,
        "stop": ee.train.Stopping(target=1e-9, steps=[3, 9]),
        "on_diverge": Revive(perturb=Plain(0.5)),
        "key": jax.random.PRNGKey(0),
    }
    assert len(fitted(folder, **(SAVED | same)).history.loss[0]) == 1


def test_a_run_with_another_host_function_is_refused(tmp_path):
    def call(factor):
        host = lambda x: np.float32(factor) * x

        @jax.custom_jvp
        def scaled(x):
            return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")

        scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0]))
        loss = lambda model, batch, key: scaled(jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2))
        options = {"steps": 2, "batch_size": 2, "progress": False, "checkpoint": tmp_path}
        return ee.fit(ENSEMBLE, loss, optax.sgd(0.1), DATA, key=KEY, **options)

    call(0.5)
    call(0.5)
    with pytest.raises(ValueError, match="`loss`: not the same as saved"):
        call(0.7)
