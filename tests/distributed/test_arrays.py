"""Arrays and decisions that are the same in all processes."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

from ..children import finish_together


def test_everything_in_two_processes():
    finish_together(pathlib.Path(__file__).parent / "together.py")


def test_arrays_of_one_process():
    keys = jax.random.split(jax.random.key(0), 2)
    tree = {"x": jnp.arange(3.0), "keys": keys, "rest": ("a", jnp.sin, 1)}
    got = ee.distributed.to_host(tree)
    assert isinstance(got["x"], np.ndarray)
    np.testing.assert_array_equal(got["keys"], jax.random.key_data(keys))
    assert got["rest"] == tree["rest"]


@pytest.mark.parametrize("value", [True, False, -(2**63), 0.1, np.int8(3), np.float64(0.1), jnp.float32(2)])
def test_decisions_of_one_process(value):
    got = ee.distributed.broadcast_from_first(value)
    assert got == (value if isinstance(value, bool | int | float) else value.item())
    assert type(got) in (bool, int, float)


BAD = {
    "a traced array": (
        lambda: jax.jit(lambda x: ee.distributed.to_host({"a": x}))(1.0),
        TypeError,
        "`distributed.to_host` copies arrays to the host, and the leaf at `['a']` is traced: call it outside `jax.jit`",
    ),
    "a decision that is a text": (
        lambda: ee.distributed.broadcast_from_first("yes"),
        TypeError,
        "`distributed.broadcast_from_first` needs a bool, an int of at most 64 bits or a float in process 0, got a "
        "str.\nEncode it as a number.",
    ),
    "a decision too large": (
        lambda: ee.distributed.broadcast_from_first(2**63),
        TypeError,
        "in process 0, got an int.",
    ),
    "two decisions": (
        lambda: ee.distributed.broadcast_from_first(np.ones(2)),
        TypeError,
        "in process 0, got a ndarray.",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_message(unhooked, name):
    call, kind, text = BAD[name]
    with pytest.raises(kind, match=re.escape(text)):
        call()
