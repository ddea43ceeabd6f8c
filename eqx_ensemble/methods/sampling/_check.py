from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._caller import caller
from ..._check import check_counter, check_number, is_traced, kind_text
from ..._foreign import as_numpy
from ..._leaf_text import leaf_text
from ..._pytree import PyTree


def _check_scalar(value: Any, argument: str) -> Any:
    """Raises unless `value` is one real number. Returns it as a Python number, unless it is traced."""
    if is_traced(value):
        if value.ndim or not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
            raise TypeError(f"`{caller()}` needs one number `{argument}` per member, got {leaf_text(value)}.")
        return value
    if isinstance(value, jax.Array | np.ndarray) and value.ndim == 0 and value.dtype != bool:
        value = value.item()
    return check_number(value, argument)


def check_rate(value: Any, argument: str, *, schedules: bool = True) -> Any:
    """Raises unless `value` is a number of at least 0, or a schedule. Returns it."""
    if schedules and callable(value):
        return value
    value = _check_scalar(value, argument)
    if not is_traced(value) and value < 0:
        raise ValueError(f"`{caller()}` needs `{argument}` to be at least 0, got {value!r}.")
    return value


def check_num_rows(value: Any) -> Any:
    """Raises unless `value` is above 0; a traced one is not checked."""
    value = _check_scalar(value, "num_rows")
    if not is_traced(value) and value <= 0:
        raise ValueError(
            f"`{caller()}` needs `num_rows` to be above 0, got {value!r}: the number of rows that a member is trained "
            "on."
        )
    return value


def check_fraction(value: Any, argument: str, *, allow: int) -> Any:
    """Raises unless `value` is between 0 and 1, exclusive except for `allow`. Returns it."""
    value = _check_scalar(value, argument)
    if not is_traced(value) and not (0 < value < 1 or value == allow):
        wanted = "above 0 and at most 1" if allow else "at least 0 and below 1"
        raise ValueError(f"`{caller()}` needs `{argument}` to be {wanted}, got {value!r}.")
    return value


def check_eps(value: Any) -> Any:
    """Raises unless `value` is above 0."""
    value = _check_scalar(value, "eps")
    if not is_traced(value) and value <= 0:
        raise ValueError(f"`{caller()}` needs `eps` to be above 0, got {value!r}.")
    return value


def check_adapt_steps(value: Any) -> Any:
    """Raises unless `value` is `None` or a number of steps."""
    if value is None:
        return None
    if is_traced(value):
        if value.ndim or not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"`{caller()}` needs an integer `adapt_steps` per member, got {leaf_text(value)}.")
        return value
    return check_counter(value, "adapt_steps")


def check_explore(value: Any) -> float:
    """Raises unless `value` is from 0 to below 1. Returns it."""
    number = check_number(value, "explore", least=0, most=1)
    if number == 1:
        raise ValueError(f"`{caller()}` needs `explore` below 1, got {value!r}: no step would be left to sample in.")
    return number


def check_weights(params: PyTree) -> None:
    """Raises for weights whose dtype does not allow sampling."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        where, dtype = jax.tree_util.keystr(path), jnp.asarray(x).dtype
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 32:
            why = "a complex Gaussian has more than one covariance"
            if jnp.issubdtype(dtype, jnp.floating):
                why = "small steps and their noise would be rounded away"
            raise TypeError(
                f"`{caller()}` needs weights in float32 or float64, got {dtype} at `{where}`: {why}.\nCast inside the "
                "loss where it should compute in fewer bits, or leave the weights out with `trainable=`."
            )


def check_values(values: Any) -> np.ndarray:
    """Raises unless `values` is an array of real numbers with members. Returns it in double precision."""
    if is_traced(values):
        raise TypeError(f"`{caller()}` cannot be called inside `jax.jit`: ArviZ computes with NumPy.")
    array = as_numpy(values, "values")
    is_real = array.dtype.kind in "iub" or jnp.issubdtype(array.dtype, jnp.floating)
    if array.ndim == 0 or not is_real:
        raise TypeError(
            f"`{caller()}` needs an array of real numbers `(members, ...)` as `values`, got {kind_text(values)}."
        )
    return array.astype(np.float64)


def check_chains(chains: Any, num_samples: int) -> tuple[np.ndarray, int]:
    """Raises unless all chains have the same length.

    **Returns:** the indices that sort samples by chain, and the number of chains.
    """
    array = as_numpy(chains, "chains")
    if array.dtype.kind not in "iu" or array.shape != (num_samples,):
        raise TypeError(
            f"`{caller()}` needs one integer for each sample as `chains` ({num_samples},), got {array.dtype} of shape "
            f"{array.shape}.\nOf snapshots: `ensemble.ids // size`."
        )
    found, lengths = np.unique(array, return_counts=True)
    if len(set(lengths.tolist())) > 1:
        listed = ", ".join(f"{chain}: {length}" for chain, length in zip(found, lengths, strict=True))
        raise ValueError(
            f"`{caller()}` needs chains with as many samples each, got {listed}.\nA member that stopped or diverged "
            "has fewer: leave it out, or the first samples of the others."
        )
    length = max(lengths.tolist(), default=0)
    if length < 4:
        raise ValueError(f"`{caller()}` needs chains of at least 4 samples, got {length}.")
    return np.argsort(array, kind="stable"), len(found)
