"""Arrays and decisions that are the same in all processes."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

from ..children import finish_together


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("value", "kind"), [("yes", "str"), (2**63 * 2, "int"), (np.ones(2), "ndarray"), (None, "`None`")]
)
def test_no_decision(unhooked, value, kind):
    with pytest.raises(TypeError, match=rf"needs a bool, an int of at most 64 bits or a float, got (a|an)? ?{kind}"):
        ee.distributed.broadcast_from_first(value)
