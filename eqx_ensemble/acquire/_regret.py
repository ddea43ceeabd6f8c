from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._brief import brief_repr
from .._check import check_array, check_no_nan, promote, type_error, value_error
from ._check import Mode, check_sign


class Regret(NamedTuple):
    """Regret after each step, of one shape: `simple`, of the best step so far, and `cumulative`, summed over steps."""

    simple: Float[Array, "*batch steps"]
    cumulative: Float[Array, "*batch steps"]

    __repr__ = brief_repr


def regret(values: Real[ArrayLike, "*batch steps"], optimum: Real[ArrayLike, "..."], *, mode: Mode) -> Regret:
    sign = check_sign(mode)
    seen, ideal = _check_real("values", values), _check_real("optimum", optimum)
    if seen.ndim < 1 or seen.shape[-1] < 1:
        raise value_error("`values` of at least one step, `(*batch, steps)`", f"got shape {seen.shape}", "Steps last.")
    if ideal.shape not in ((), seen.shape[:-1], seen.shape):
        got = f"expected {seen.shape}, {seen.shape[:-1]} or (), got {ideal.shape}"
        raise value_error("one `optimum`, or one per run or step", got, "It is the best value there is.")
    check_no_nan("values", values)
    check_no_nan("optimum", optimum)
    seen, ideal = promote(seen, ideal)
    if ideal.ndim and ideal.ndim < seen.ndim:
        ideal = ideal[..., None]
    lost = sign * (ideal - seen)
    return Regret(jax.lax.cummin(lost, axis=lost.ndim - 1), jnp.cumsum(lost, axis=-1))


def _check_real(argument: str, values: ArrayLike) -> Array:
    array = check_array(argument, values)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise type_error(f"real `{argument}`", f"got dtype {array.dtype}", "Take a real part or a modulus.")
    return array
