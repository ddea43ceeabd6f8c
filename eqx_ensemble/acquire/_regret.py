from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from .._brief import brief_repr
from .._check import check_entries, check_no_nan, promote, value_error
from ._check import Mode, check_real, check_sign


class Regret(NamedTuple):
    """Regret after each step, of one shape: `simple`, of the best step so far, and `cumulative`, summed over steps."""

    simple: Float[Array, "*batch steps"]
    cumulative: Float[Array, "*batch steps"]

    __repr__ = brief_repr


def regret(values: Real[ArrayLike, "*batch steps"], optimum: Real[ArrayLike, "..."], *, mode: Mode) -> Regret:
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
    sign = check_sign(mode)
    seen, ideal = check_real("values", values), check_real("optimum", optimum)
    if seen.ndim < 1 or seen.shape[-1] < 1:
        raise value_error("`values` of at least one step, `(*batch, steps)`", f"got shape {seen.shape}", "Steps last.")
    if ideal.shape not in ((), seen.shape[:-1], seen.shape):
        got = f"expected {seen.shape}, {seen.shape[:-1]} or (), got {ideal.shape}"
        raise value_error("one `optimum`, or one per run or step", got, "It is the best value there is.")
    check_no_nan("values", values)
    check_entries("a finite `optimum`", optimum, lambda host: ~np.isfinite(host), "It is the best value there is.")
    seen, ideal = promote(seen, ideal)
    if ideal.ndim and ideal.ndim < seen.ndim:
        ideal = ideal[..., None]
    lost = sign * (ideal - seen)
    return Regret(jax.lax.cummin(lost, axis=lost.ndim - 1), jnp.cumsum(lost, axis=-1))
