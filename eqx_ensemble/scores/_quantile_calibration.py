from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import check_floating, check_positive_int, check_word, promote
from ._check import check_some_rows, check_unit_interval
from ._reduce import RowWeights, sum_by_segment, total_weight
from ._row_weights import check_rows


def quantile_calibration_error(
    values: Float[ArrayLike, "*batch"],
    *,
    num_levels: int = 99,
    kind: Literal["absolute", "squared"] = "absolute",
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    r"""Distance between predicted and observed quantiles: 0 if calibrated, lower is better.

    For a calibrated forecast, the fraction $\hat p_j$ of targets at or below their predicted quantiles of level $p_j =
    j / (J + 1)$ is $p_j$. Two definitions are in use: `"absolute"` is the mean of $|\hat p_j - p_j|$ (Chung et al.);
    `"squared"` is the sum of $(\hat p_j - p_j)^2$ (Kuleshov et al.), which grows with $J$: report the number of levels.

    **Arguments:**

    - `values`: the probability integral transform of the targets, from 0 to 1, `(*batch,)`: the result of
        [`eqx_ensemble.scores.pit`][] for members that are samples, or of
        [`eqx_ensemble.scores.pit_gaussian_mixture`][]. If those used a mask, pass the same mask here.
    - `num_levels`: the number of levels $J$.
    - `kind`: `"absolute"` or `"squared"`.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    A scalar. NaN if a value that is not ignored is NaN. For $M$ members that are samples, the resolution of levels is
    $1 / M$.

    **Raises:**

    - `TypeError` for values that are not floating-point.
    - `ValueError` for fewer than one level, zero rows, invalid row weights, and values outside [0, 1] (where concrete).

    ```python
    mean, variance = jnp.zeros((1, 1000)), jnp.full((1, 1000), 4.0)  # twice as wide
    values = ee.scores.pit_gaussian_mixture(
        mean, variance, jax.random.normal(key, (1000,))
    )
    ee.scores.quantile_calibration_error(values)  # 0.10
    ```

    ??? cite
        [Beyond Pinball Loss: Quantile Methods for Calibrated Uncertainty
        Quantification](https://arxiv.org/abs/2011.09588); squared after [Accurate Uncertainties for Deep Learning Using
        Calibrated Regression](https://arxiv.org/abs/1807.00263)

        ```bibtex
        @inproceedings{chung2021beyond,
            author={Youngseog Chung and Willie Neiswanger and Ian Char and Jeff Schneider},
            title={Beyond Pinball Loss: Quantile Methods for Calibrated Uncertainty Quantification},
            booktitle={Advances in Neural Information Processing Systems},
            year={2021},
        }
        ```
    """
    name = "scores.quantile_calibration_error"
    (checked,) = promote(check_floating(name, "values", values))
    rows = check_rows(name, row_weights, mask, checked.shape, checked.dtype)
    check_positive_int(num_levels, "num_levels", name=name)
    check_word(kind, "kind", ("absolute", "squared"), name=name)
    check_unit_interval(name, values, rows.known)
    check_some_rows(name, checked.shape)
    return _quantile_calibration_error(rows.blank(checked), rows.weights, int(num_levels), kind)


@partial(jax.jit, static_argnames=("num_levels", "kind"))
def _quantile_calibration_error(
    values: Float[Array, "*batch"],
    row_weights: RowWeights | None,
    num_levels: int,
    kind: Literal["absolute", "squared"],
) -> Float[Array, ""]:
    own = jnp.ones_like(values) if row_weights is None else row_weights.astype(values.dtype)
    levels = jnp.arange(1, num_levels + 1, dtype=values.dtype) / (num_levels + 1)
    # A value counts at all levels from the first that is not below it.
    first = jnp.searchsorted(levels, jnp.ravel(values), side="left")
    at_most = jnp.cumsum(sum_by_segment(jnp.ravel(own), first, num_levels + 1))[:-1]
    gaps = at_most / total_weight(own, values.dtype) - levels
    found = jnp.mean(jnp.abs(gaps)) if kind == "absolute" else jnp.sum(gaps**2)
    return jnp.where(jnp.any(jnp.isnan(values)), jnp.nan, found)
