from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from ._binning import Binning, check_bins, of_top_label
from ._reduce import RowWeights


def mce(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    r"""Maximum calibration error of the mixture's top label, from 0 to 1; lower is better.

    $\max_k |\mathrm{accuracy}_k - \mathrm{confidence}_k|$ over the non-empty bins of [`eqx_ensemble.scores.ece`][].
    Bins with few rows have large gaps by chance: the score is biased upwards, far more than `ece`, and a bin with a
    single wrong row can determine it. Bins of equal mass, and fewer bins, reduce the bias.

    **Arguments:**

    As [`eqx_ensemble.scores.ece`][], without `debiased`.

    **Returns:**

    A scalar. NaN if any row of the mixture is NaN or, while tracing, a label is out of range.

    **Raises:**

    As [`eqx_ensemble.scores.nll`][], and `ValueError` for fewer than one bin.

    ```python
    # two rows of 80 % confidence, one right; one row of 60 %, right
    logits = jnp.log(jnp.array([[[0.8, 0.2], [0.8, 0.2], [0.6, 0.4]]]))
    ee.scores.mce(logits, jnp.array([0, 1, 0]))  # max(|0.5 - 0.8|, |1 - 0.6|) = 0.4
    ```

    ??? cite
        [Obtaining Well Calibrated Probabilities Using Bayesian Binning](https://doi.org/10.1609/aaai.v29i1.9602)

        ```bibtex
        @inproceedings{naeini2015obtaining,
            author={Mahdi Pakdaman Naeini and Gregory F. Cooper and Milos Hauskrecht},
            title={Obtaining Well Calibrated Probabilities Using {B}ayesian Binning},
            booktitle={AAAI Conference on Artificial Intelligence},
            year={2015},
        }
        ```
    """
    checked = check_bins("scores.mce", logits, labels, num_bins, binning, weights, row_weights, mask)
    return _mce(*checked, num_bins, binning)


@partial(jax.jit, static_argnames=("num_bins", "binning"))
def _mce(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    row_weights: RowWeights | None,
    num_bins: int,
    binning: Binning,
) -> Float[Array, ""]:
    bins = of_top_label(logits, labels, weights, row_weights, num_bins, binning)
    return jnp.max(jnp.abs(bins.frequency - bins.probability))  # zero in empty bins
