from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._caller import caller
from ._leaves import is_key


class MemberMismatchError(ValueError):
    """Members that cannot share one stacked tree: they differ in structure, shape, dtype or a static value."""


class CheckpointCorruptError(ValueError):
    """A damaged checkpoint: bits have changed, or a file is truncated or missing.

    **Attributes:** `file`, the damaged file; `leaf` and `member`, the path of the damaged leaf in the tree and the
    position of the damaged member, or `None` if the damage is not in one.
    """

    def __init__(self, message: str, file: str = "", leaf: str | None = None, member: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.leaf = leaf
        self.member = member


def _is_legacy(key: Any) -> bool:
    return isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32 and key.ndim >= 1 and key.shape[-1] == 2


def check_key(key: Any) -> None:
    """Raises unless `key` is one threefry key, typed or legacy."""
    shape = check_key_shape(key, wanted="one key")
    if shape != ():
        raise TypeError(
            f"`{caller()}` needs one key as `key`, got {'x'.join(map(str, shape))} keys.\n"
            "It makes the members' keys itself."
        )


def check_key_shape(key: Any, *, wanted: str) -> tuple[int, ...]:
    """Raises for anything but threefry keys, typed or legacy. Returns their shape: `()` for one key."""
    if key is None:
        raise TypeError(f"`{caller()}` needs {wanted}: for example `key=jax.random.key(0)`.")
    if is_key(key):
        implementation = str(jax.random.key_impl(key))
        if implementation != "threefry2x32":
            raise TypeError(
                f"`{caller()}` needs a threefry key, got one of {implementation!r}: other generators draw differently "
                "under `jax.vmap`, so a member would depend on its neighbours.\n"
                "Use `jax.random.key(seed, impl='threefry2x32')`."
            )
        return key.shape
    if _is_legacy(key):
        return key.shape[:-1]
    if isinstance(key, int):
        raise TypeError(
            f"`{caller()}` needs {wanted}, got the integer {key}.\nMake a key of it: `jax.random.key({key})`."
        )
    raise TypeError(f"`{caller()}` needs {wanted} from `jax.random.key(seed)`, got {_array_text(key)}.")


def _array_text(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array | np.ndarray) else repr(value)
