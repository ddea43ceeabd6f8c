import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Enables the promotion of dtypes and ranks that optax and scoringrules need; a user may have made it strict."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
