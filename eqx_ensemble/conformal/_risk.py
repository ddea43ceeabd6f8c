from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._boundary import BoundedLosses, RowFilter, Thresholds, array_function
from .._caller import caller
from .._check import concrete, value_error
from .._warnings import warn
from ._quantile import fraction


def _finish(out: Array, given: dict[str, Any]) -> Array:
    host = concrete(out)
    if host is not None and host == np.inf:
        fix = "Hold out more rows, add thresholds of lower losses, or allow a higher risk."
        warn(f"`{caller()}`: no threshold has a risk of {given['risk']:g} or less; the result is infinite. {fix}")
    return out


@array_function(finish=_finish)
def risk_control(
    losses: BoundedLosses,
    thresholds: Thresholds,
    *,
    risk: float,
    bound: float = 1.0,
    row_weights: RowFilter = None,
) -> Float[Array, ""]:
    r"""Conformal risk control: the smallest threshold at which the expected loss of a new row is at most `risk`.

    For losses $L_i(\lambda) \le B$ that do not increase with the threshold, such as the fraction of labels missed by
    sets that grow with it, the result is the smallest $\lambda$ of the grid with

    $$\frac{\sum_i L_i(\lambda) + B}{n + 1} \le \mathrm{risk}.$$

    Of losses that do increase, the largest from each threshold on is taken.

    **Arguments:**

    - `losses`: `(rows, thresholds)`, the loss of each held-out row at each threshold.
    - `thresholds`: `(thresholds,)`.
    - `risk`: between 0 and `bound`.
    - `bound`: $B$, the largest possible loss of a row.

    **Returns:** a scalar; infinite, with a warning, if no threshold qualifies.

    ```python
    # the fraction of two true labels missed by the classes with a probability of 1 - threshold
    probabilities = jnp.linspace(0.1, 1.0, 40).reshape(20, 2)
    thresholds = jnp.linspace(0.0, 1.0, 11)
    missed = probabilities[:, :, None] < 1 - thresholds[None, None]
    ee.conformal.risk_control(missed.mean(axis=1), thresholds, risk=0.2)
    ```

    ??? cite
        [Angelopoulos et al., ICLR 2024](https://arxiv.org/abs/2208.02814)
    """
    if not 0 < risk < bound:
        raise value_error("a `risk` between 0 and `bound`", f"got {risk} and {bound}", "It is an expected loss.")
    order = jnp.argsort(thresholds)
    largest = jax.lax.cummax(losses[:, order], axis=1, reverse=True)
    # The largest sum of losses that qualifies, for each number of rows, in exact arithmetic.
    exact, num_rows = fraction(risk / bound), losses.shape[0]
    most = (np.arange(1, num_rows + 2) * exact.numerator - exact.denominator) / exact.denominator * bound
    count = num_rows if row_weights is None else jnp.sum(row_weights)
    total = jnp.sum(largest, axis=0)  # zero for rows that do not count
    fits = total <= jnp.asarray(most, losses.dtype)[count]
    return jnp.where(jnp.any(jnp.isnan(total)), jnp.nan, jnp.min(jnp.where(fits, thresholds[order], jnp.inf)))
