from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest


def _bits(leaf) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _assert_same(a, b) -> None:
    """Equal leaves, arrays bit for bit with shape and dtype. Treedefs of separate builds may compare unequal."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if eqx.is_array(x) or eqx.is_array(y):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert _bits(x).tobytes() == _bits(y).tobytes()
        elif isinstance(x, (bool, int, float, complex, str)):
            assert type(x) is type(y)
            assert repr(x) == repr(y)


@pytest.fixture(scope="session")
def assert_same() -> Callable:
    return _assert_same
