import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def as_for_users():
    """Other people's programs rely on JAX's default promotion, as do optax and Flax."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
