"""A call of `fit` as texts, the same in other processes: equal for equal calls, different for others."""

import functools as ft
import itertools
import os
import re
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
from eqx_ensemble.train import Revive, _texts
from eqx_ensemble.train.host import _saver

KEY = jax.random.key(0)
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
        "a partial function": Revive(perturb=ft.partial(scaled, 0.3)),
        "another partial function": Revive(perturb=ft.partial(scaled, 0.4)),
        "an object": Revive(perturb=Plain(0.31)),
        "another object": Revive(perturb=Plain(0.41)),
        "a Module": Revive(perturb=Scaled(0.32)),
        "another Module": Revive(perturb=Scaled(0.42)),
        "afresh": Revive(linear(3), perturb=None),
        "afresh and wider": Revive(linear(4), perturb=None),
    }


def texts():
    return {name: _saver._revive_text(how, HYPER) for name, how in ways().items()}


def test_ways_to_revive_differ_by_what_they_do():
    first, again = texts(), texts()
    assert first == again
    assert all(" at 0x" not in text for text in first.values())
    for a, b in itertools.combinations(first, 2):
        assert first[a] != first[b], (a, b)
    assert _saver._revive_text(Revive(perturb=Plain(0.5)), HYPER) == first["0.5"]


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
FLOAT = "float64" if jax.config.read("jax_enable_x64") else "float32"
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


HEX = "[0-9a-f]{64}"
REVIVED = rf"'?Revive\(make=None, perturb={HEX}, most=3\)'?"


def array(kind, values):
    return rf"{FLOAT}{re.escape(f'{kind} {values}')}, {HEX}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"patience": 50}, "`patience`: saved 2, now 50"),
        ({"stop": ee.train.Stopping(steps=np.int32(4), target=1e-9)}, r"`stop.steps`: saved \[3, 9], now \[4, 4]"),
        (
            {"stop": ee.train.Stopping(steps=[3, 9], target=0.25)},
            r"`stop.target`: saved \[1e-09, 1e-09], now \[0.25, 0.25]",
        ),
        ({"key": jax.random.key(3)}, r"`key`: saved \[0, 0], now \[0, 3]"),
        ({"on_diverge": Revive(perturb=Plain(0.7))}, f"`on_diverge`: saved {REVIVED}, now {REVIVED}"),
        ({"on_diverge": "freeze"}, f"`on_diverge`: saved {REVIVED}, now 'freeze'"),
        (
            {"hyper": {"lr": jnp.array([0.1, 0.3])}},
            rf"`hyper\['lr'\]`: saved {array('[2]', '[0.1, 0.2]')}, now {array('[2]', '[0.1, 0.3]')}",
        ),
        (
            {"data": (2 * DATA[0], DATA[1])},
            rf"`data\[0\]`: saved {array('[4,1]', '[1.0, 1.0, 1.0, 1.0]')}, "
            rf"now {array('[4,1]', '[2.0, 2.0, 2.0, 2.0]')}",
        ),
    ],
    ids=["patience", "steps", "target", "key", "another Revive", "no Revive", "hyper", "data"],
)
def test_the_error_lists_differences_with_both_values(folder, change, said):
    with pytest.raises(ValueError, match="this call differs from the one that wrote it") as caught:
        fitted(folder, **(SAVED | change))
    differ = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  `")]
    (line,) = [line for line in differ if not line.startswith("`members' keys`")]  # which follow from the key
    assert re.fullmatch(said, line)


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
