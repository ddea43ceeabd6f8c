import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Promotion of dtypes and ranks as optax and scoringrules rely on it, which a user may have made strict."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
