"""A call of `fit` as texts, the same in other processes: equal for equal calls, different for others."""

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
from eqx_ensemble.train import _program

KEY = jax.random.key(0)


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x


def program(factor, names=("a", "b", "c")):
    """A traced program with an object, a set in a static argument and a function that is named anew."""
    scale, chosen = Scale(factor), frozenset(names)
    inner = jax.jit(lambda x, *, chosen: jnp.sin(x), static_argnames="chosen")
    return jax.make_jaxpr(lambda x: jax.nn.relu(scale(inner(x, chosen=chosen)) + np.arange(3.0)))(jnp.ones(3))


def test_programs_differ_by_what_they_compute():
    assert _program.program_text(program(0.5)) == _program.program_text(program(0.5))
    assert _program.program_text(program(0.5)) != _program.program_text(program(0.25))


@pytest.mark.slow
def test_another_process_gives_the_same_text():
    """Its addresses are others, and so are the orders of its sets."""
    command = "from tests.train import test_texts as t; print(t._program.program_text(t.program(0.5)))"
    said = {
        subprocess.run(
            [sys.executable, "-c", command], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "12"
    }
    assert len(said) == 1


NUMBERS = st.integers(-(2**31), 2**31 - 1)
KINDS = (int, np.int32, np.int64, np.asarray, lambda n: jnp.asarray(n, jnp.int32))


@given(NUMBERS, NUMBERS, st.sampled_from(KINDS), st.sampled_from(KINDS))
def test_a_number_is_the_same_in_every_kind(a, b, kind, other):
    assert (_program.option_text(kind(a)) == _program.option_text(other(b))) == (a == b)


@pytest.mark.parametrize("value", [None, True, "freeze", 0.1, [1, 2], np.arange(20)])
def test_what_is_not_alike_differs(value):
    others = [None, False, "raise", 0.2, [1, 3], np.arange(1, 21), np.arange(19)]
    assert all(_program.option_text(value) != _program.option_text(other) for other in others if other is not value)


def test_keys_of_both_kinds_and_their_values():
    assert _program.option_text(jax.random.key(7)) == _program.option_text(jax.random.PRNGKey(7)) == "[0, 7]"


ENSEMBLE = ee.build(lambda key: eqx.nn.Linear(1, 1, key=key), 2, key=KEY)
DATA = jnp.ones((4, 1)), jnp.zeros((4, 1))
FLOAT = "float64" if jax.config.read("jax_enable_x64") else "float32"
SAVED = {
    "data": DATA,
    "validation": DATA,
    "hyper": {"lr": jnp.array([0.1, 0.2])},
    "patience": np.int64(2),
    "stop": ee.train.Stopping(target=np.float64(1e-9), steps=np.array([3, 9])),
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
        ({"key": jax.random.key(3)}, rf"`key`: saved uint32\[2,2] .*, {HEX}, now uint32\[2,2] .*, {HEX}"),
        ({"on_diverge": "raise"}, "`on_diverge`: saved 'freeze', now 'raise'"),
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
    ids=["patience", "steps", "target", "key", "on_diverge", "hyper", "data"],
)
def test_the_error_lists_differences_with_both_values(folder, change, said):
    with pytest.raises(ValueError, match="this call differs from the one that wrote it") as caught:
        fitted(folder, **(SAVED | change))
    differ = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  `")]
    (line,) = differ
    assert re.fullmatch(said, line)


def test_the_same_call_with_other_types_resumes(folder):
    """Lists for arrays, Python's numbers for NumPy's, a function defined again, a legacy key."""
    same = {
        "hyper": {"lr": [0.1, 0.2]},
        "patience": 2,
        "stop": ee.train.Stopping(target=1e-9, steps=[3, 9]),
        "key": jax.random.PRNGKey(0),
    }
    assert len(fitted(folder, **(SAVED | same)).history.loss[0]) == 1
