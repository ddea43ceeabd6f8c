from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import Evaluated, Optimum, array_function
from .._brief import brief_repr
from .._check import value_error
from ._arguments import Mode, sign_of


class Regret(NamedTuple):
    """Regret after each step, of one shape: `simple`, of the best step so far, and `cumulative`, summed over steps."""

    simple: Float[Array, "*batch steps"]
    cumulative: Float[Array, "*batch steps"]

    __repr__ = brief_repr


@array_function
def regret(values: Evaluated, optimum: Optimum, *, mode: Mode) -> Regret:
    """How much worse than the optimum the evaluated values are, after each step.

    **Arguments:**

    - `values`: noise-free values or rewards `(*batch, steps)`, such as `(seeds, steps)`, in the order of evaluation.
    - `optimum`: the best value there is: one number, one per run `(*batch,)`, or, for contextual bandits, one per step.
    - `mode`: `"max"` if larger values are better, or `"min"`.

    **Returns:**

    [`eqx_ensemble.acquire.Regret`][] of arrays `(*batch, steps)`.

    ```python
    curves = ee.acquire.regret(jnp.array([1.0, 3.0, 2.0]), 4.0, mode="max")
    curves.simple, curves.cumulative  # [3.0, 1.0, 1.0], [3.0, 4.0, 6.0]
    ```
    """
    if optimum.shape not in ((), values.shape[:-1], values.shape):
        got = f"expected {values.shape}, {values.shape[:-1]} or (), got {optimum.shape}"
        raise value_error("one `optimum`, or one per run or step", got, "It is the best value there is.")
    if optimum.ndim and optimum.ndim < values.ndim:
        optimum = optimum[..., None]
    lost = sign_of(mode) * (optimum - values)
    return Regret(jax.lax.cummin(lost, axis=lost.ndim - 1), jnp.cumsum(lost, axis=-1))
