from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._check import check_flag
from ._binning import Binning, check_bins, of_top_label
from ._reduce import RowWeights

_SINGLE = 1e-4  # tolerance for an effective number of rows that rounds to more than one


def squared_calibration_error(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    num_bins: int = 15,
    binning: Binning = "mass",
    debiased: bool = True,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    r"""Mean squared calibration error of the mixture's top label, unbiased for the given bins; lower is better.

    $\sum_k \frac{n_k}{n} \left((a_k - c_k)^2 - \frac{a_k (1 - a_k)}{n_k - 1}\right)$ with the accuracy $a_k$ and the
    mean confidence $c_k$ of bin $k$. The last term is the expected contribution of label noise. Without it
    (`debiased=False`), even a perfectly calibrated model has a positive error, which vanishes only with many rows.

    **Arguments:**

    - `binning`: `"mass"`, bins with equal numbers of rows, or `"width"`; see [`eqx_ensemble.scores.ece`][].
    - `debiased`: whether to subtract the expected excess. Bins with a single row then count as zero.
    - the other arguments: as for [`eqx_ensemble.scores.ece`][].

    **Returns:**

    A scalar, a squared probability; it may be negative if the model is well calibrated. The l2 calibration error is
    `jnp.sqrt(jnp.maximum(x, 0))`.

    **Raises:**

    As [`eqx_ensemble.scores.nll`][], and `ValueError` for fewer than one bin.

    ```python
    logits = jnp.log(jnp.array([[[0.8, 0.2], [0.8, 0.2]]]))
    ee.scores.squared_calibration_error(logits, jnp.array([0, 1]), debiased=False)
    # 0.3**2 = 0.09
    ee.scores.squared_calibration_error(logits, jnp.array([0, 1]))  # 0.09 - 0.25 = -0.16
    ```

    ??? cite
        [Verified Uncertainty Calibration](https://arxiv.org/abs/1909.10155)

        ```bibtex
        @inproceedings{kumar2019verified,
            author={Ananya Kumar and Percy Liang and Tengyu Ma},
            title={Verified Uncertainty Calibration},
            booktitle={Advances in Neural Information Processing Systems},
            year={2019},
        }
        ```
    """
    checked = check_bins(
        "scores.squared_calibration_error", logits, labels, num_bins, binning, weights, row_weights, mask
    )
    debiased = check_flag(debiased, "debiased", name="scores.squared_calibration_error")
    return _squared_calibration_error(*checked, num_bins, binning, debiased)


@partial(jax.jit, static_argnames=("num_bins", "binning", "debiased"))
def _squared_calibration_error(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    row_weights: RowWeights | None,
    num_bins: int,
    binning: Binning,
    debiased: bool,  # noqa: FBT001
) -> Float[Array, ""]:
    bins = of_top_label(logits, labels, weights, row_weights, num_bins, binning)
    errors = (bins.frequency - bins.probability) ** 2
    if debiased:
        single = bins.effective < 1 + _SINGLE
        noise = bins.frequency * (1 - bins.frequency) / jnp.where(single, 1, bins.effective - 1)
        errors = jnp.where(single, 0 * errors, errors - noise)  # times zero: NaN stays NaN
    return jnp.sum(bins.count * errors) / jnp.sum(bins.count)
