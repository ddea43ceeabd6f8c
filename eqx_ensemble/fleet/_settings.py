"""The JAX settings that affect results, carried from the caller to workers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

_CONTEXTS = {
    "jax_enable_x64": jax.enable_x64,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
}


def settings() -> dict[str, Any]:
    """The settings of this thread."""
    return {name: getattr(jax.config, name) for name in _CONTEXTS}


@contextlib.contextmanager
def use_settings(given: dict[str, Any]) -> Iterator[None]:
    """Applies settings to this thread inside `with`."""
    with contextlib.ExitStack() as stack:
        for name, value in given.items():
            if getattr(jax.config, name) != value:
                stack.enter_context(_CONTEXTS[name](value))
        yield
