from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from .._check import check_level, check_moments


class Interval(NamedTuple):
    """The ends of an interval for each entry: `lower` and `upper`, of the same shape."""

    lower: Float[Array, "..."]
    upper: Float[Array, "..."]


def gaussian_interval(
    mean: Float[ArrayLike, "*batch"], variance: Float[ArrayLike, "*batch"], *, level: float = 0.9
) -> Interval:
    r"""The central interval of a Gaussian, $\mu \pm \sigma \, \Phi^{-1}((1 + \mathrm{level}) / 2)$.

    For an ensemble pass the result of [`eqx_ensemble.combine.gaussian`][]. Evaluate the interval with
    [`eqx_ensemble.scores.coverage`][].

    **Arguments:**

    - `mean`, `variance`: `(*batch,)`, of one shape; with a `members` axis, one interval per member.
    - `level`: the probability inside, a Python number between 0 and 1.

    **Returns:**

    A named tuple with `.lower` and `.upper`, of the shape of `mean`.

    **Raises:**

    - `TypeError` for arrays that are not floating-point.
    - `ValueError` for mismatched shapes, negative variances (where concrete), and a level outside (0, 1).

    ```python
    lower, upper = ee.uncertainty.gaussian_interval(
        jnp.array([0.0]), jnp.array([1.0]), level=0.95
    )
    lower, upper  # [-1.96], [1.96]
    ```
    """
    from statistics import NormalDist  # here, because it takes a thirtieth of this library's import time

    name = "uncertainty.gaussian_interval"
    check_level(name, level)
    means, variances = check_moments(name, mean, variance, members=False)
    # The small tail is exact in floating point; one minus the tail is not.
    return _interval(means, variances, -NormalDist().inv_cdf((1 - level) / 2))


@jax.jit
def _interval(
    mean: Float[Array, "*batch"], variance: Float[Array, "*batch"], quantile: float | Float[Array, ""]
) -> Interval:
    half = jnp.sqrt(variance) * quantile
    return Interval(mean - half, mean + half)
