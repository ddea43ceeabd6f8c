from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import check_level, check_moments, check_values, check_weights
from .._combination import by_order
from .._weighting import quantile_in_order
from ._check import check_levels


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


def quantile(
    values: Float[ArrayLike, "members ..."],
    levels: Real[ArrayLike, "..."],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, "..."]:
    r"""Quantiles over members of their values as a weighted sample, entry by entry.

    The value at which the cumulative weight reaches the level; the midpoint to the next value if it equals the level.
    This is NumPy's `"averaged_inverted_cdf"` (definition 2 of Hyndman and Fan), which extends to weights: a member of
    weight 2 counts as two members. The linear interpolation of `jnp.quantile(values, levels, axis=0)` does not.

    **Arguments:**

    - `values`: floating-point, `(members, ...)`. For quantiles of a mixture of Gaussians see
        [`eqx_ensemble.uncertainty.gaussian_mixture_quantile`][].
    - `levels`: a number from 0 to 1, or several `(levels,)`.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Members of weight zero are ignored.

    **Returns:**

    `(...)` for one level, `(levels, ...)` for several; NaN where a member is NaN.

    **Raises:**

    - `TypeError` for values that are not floating-point.
    - `ValueError` for levels outside [0, 1] (where concrete), values without members, and invalid weights.

    ```python
    values = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    ee.uncertainty.quantile(values, jnp.array([0.25, 0.9]))  # [[1.5], [4.0]]
    ```

    ??? cite
        [Sample Quantiles in Statistical Packages](https://doi.org/10.1080/00031305.1996.10473566)

        ```bibtex
        @article{hyndman1996sample,
            author={Rob J. Hyndman and Yanan Fan},
            title={Sample Quantiles in Statistical Packages},
            journal={The American Statistician},
            year={1996},
        }
        ```
    """
    name = "uncertainty.quantile"
    checked = check_values(name, "values", values)
    wanted, over = check_levels(name, levels, checked.dtype, ends=True)
    return _quantiles(checked, wanted, over, check_weights(name, weights, checked.shape[0], checked.dtype))


def interval(
    values: Float[ArrayLike, "members ..."],
    *,
    level: float = 0.9,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Interval:
    r"""The central interval of the members' values as a weighted sample, entry by entry.

    From the quantile of level $(1 - \mathrm{level}) / 2$ to that of $(1 + \mathrm{level}) / 2$, by the estimator of
    [`eqx_ensemble.uncertainty.quantile`][]. It covers the members' values, without noise: for members that predict a
    variance see [`eqx_ensemble.uncertainty.gaussian_mixture_interval`][]. For fewer than `2 / (1 - level)` equally
    weighted members it is their full range.

    **Arguments:**

    - `values`: floating-point, `(members, ...)`.
    - `level`: the probability inside, a Python number between 0 and 1.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Members of weight zero are ignored.

    **Returns:**

    A named tuple with `.lower` and `.upper`, of the shape of one member's values.

    **Raises:**

    As [`eqx_ensemble.uncertainty.quantile`][].

    ```python
    values = jnp.arange(10.0)[:, None]
    ee.uncertainty.interval(values, level=0.5)  # [2.0], [7.0]
    ```
    """
    name = "uncertainty.interval"
    checked = check_values(name, "values", values)
    check_level(name, level)
    convex = check_weights(name, weights, checked.shape[0], checked.dtype)
    tail = (1 - level) / 2
    below, over = (jnp.asarray(levels, checked.dtype) for levels in ([tail, 1 - tail], [1 - tail, tail]))
    return Interval(*_quantiles(checked, below, over, convex))


def _quantiles(
    values: Float[Array, "members ..."],
    levels: Float[Array, "*levels"],
    over: Float[Array, "*levels"],
    weights: Float[Array, " members"] | None,
) -> Float[Array, "..."]:
    found = by_order(_quantile, values, weights, (levels, over))
    return jnp.moveaxis(found, -1, 0) if levels.ndim else found


def _quantile(
    ordered: Float[Array, "members ..."], own: Float[Array, "members ..."] | None, wanted: tuple[Array, Array]
) -> Float[Array, "..."]:
    levels, over = wanted
    one = lambda level, over: quantile_in_order(ordered, own, level, over)
    found = jax.vmap(one, out_axes=-1)(levels, over) if levels.ndim else one(levels, over)
    unknown = jnp.isnan(ordered[-1])
    return jnp.where(unknown[..., None] if levels.ndim else unknown, jnp.nan, found)
