from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._leaves import is_key


def is_typed_key(key: Any) -> bool:
    """Whether `key` is an array of new-style typed keys."""
    return is_key(key)


def _is_legacy(key: Any) -> bool:
    return isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32 and key.ndim >= 1 and key.shape[-1] == 2


def check_key(key: Any, *, name: str) -> None:
    """One threefry key, typed or legacy."""
    shape = _key_shape(key, name=name, wanted="one key")
    if shape != ():
        raise TypeError(
            f"`{name}` needs one key as `key`, got {'x'.join(map(str, shape))} keys.\n"
            "It makes the members' keys itself; keys of your own go to `build(make, keys=keys)`."
        )


def many_keys(keys: Any, *, name: str) -> int:
    """A vector of threefry keys; its length is returned."""
    shape = _key_shape(keys, name=name, wanted="one key per member")
    if len(shape) != 1:
        got = "one single key" if shape == () else f"keys of shape {shape}"
        raise TypeError(
            f"`{name}` needs one key per member as `keys`, shape (members,); got {got}.\n"
            "One key for all is passed with the number of members: `build(make, num_members, key=key)`."
        )
    if shape[0] == 0:
        raise ValueError(f"`{name}` needs at least one key, got none.")
    return shape[0]


def _key_shape(key: Any, *, name: str, wanted: str) -> tuple[int, ...]:
    if key is None:
        raise TypeError(f"`{name}` needs {wanted}: for example `key=jax.random.key(0)`.")
    if is_typed_key(key):
        implementation = str(jax.random.key_impl(key))
        if implementation != "threefry2x32":
            raise TypeError(
                f"`{name}` needs a threefry key, got one of {implementation!r}: other generators draw differently "
                "under `jax.vmap`, so a member would depend on its neighbours.\n"
                "Use `jax.random.key(seed, impl='threefry2x32')`."
            )
        return key.shape
    if _is_legacy(key):
        return key.shape[:-1]
    if isinstance(key, int):
        raise TypeError(f"`{name}` needs {wanted}, got the integer {key}.\nMake a key of it: `jax.random.key({key})`.")
    described = f"{key.dtype}{list(key.shape)}" if isinstance(key, jax.Array | np.ndarray) else repr(key)
    raise TypeError(f"`{name}` needs {wanted} from `jax.random.key(seed)`, got {described}.")
