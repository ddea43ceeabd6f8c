from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from ._check_outputs import check_order, check_pair_weights
from ._multivariate import check_vectors, score_vectors
from ._reduce import Reduction
from ._scoringrules import import_scoringrules


def variogram_score(
    samples: Float[ArrayLike, "members *batch out"],
    targets: Real[ArrayLike, "*batch out"],
    *,
    order: float | int = 0.5,
    pair_weights: Real[ArrayLike, "out out"] | None = None,
    estimator: Literal["nrg", "fair"] = "nrg",
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Variogram score of the members' multi-output predictions as samples; lower is better.

    $\sum_{ij} w_{ij} (|y_i - y_j|^p - \sum_m w_m |x_{mi} - x_{mj}|^p)^2$ over all ordered pairs of outputs, with order
    $p$. It measures dependence between outputs better than [`eqx_ensemble.scores.energy_score`][], but ignores an
    offset common to all outputs: also report a univariate score. Computed by `scoringrules`
    (`pip install 'eqx_ensemble[scores]'`), which allocates an array `(*batch, members, out, out)`.

    **Arguments:**

    - `samples`: `(members, *batch, out)`.
    - `targets`: `(*batch, out)`; nothing is broadcast.
    - `order`: $p$, a positive number; 0.5, 1 and 2 are usual.
    - `pair_weights`: $w_{ij}$, non-negative, `(out, out)`, such as inverse distances between stations; one if not
        given.
    - `estimator`: `"nrg"`, or `"fair"`, which is unbiased for the distribution that members are drawn from, and
        allocates `(*batch, members, members, out, out)`.
    - `weights`: convex weights over members, `(members,)`, concrete; divided by their sum. Members of weight zero are
        ignored. Only with `"nrg"`.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for one value per row, NaN for ignored rows.

    **Returns:**

    A scalar, or `(*batch,)`. It is not differentiable.

    **Raises:**

    As [`eqx_ensemble.scores.energy_score`][], and `ValueError` for an order that is not positive, and invalid pair
    weights.

    ```python
    samples, targets = jnp.array([[[0.0, 1.0]], [[0.0, 9.0]]]), jnp.array([[0.0, 4.0]])
    # both pairs: 2 * (2 - (1 + 3) / 2)**2 = 0
    ee.scores.variogram_score(samples, targets)
    ```

    ??? cite
        [Variogram-Based Proper Scoring Rules for Probabilistic Forecasts of Multivariate
        Quantities](https://doi.org/10.1175/MWR-D-14-00269.1)

        ```bibtex
        @article{scheuerer2015variogram,
            author={Michael Scheuerer and Thomas M. Hamill},
            title={Variogram-Based Proper Scoring Rules for Probabilistic Forecasts of Multivariate Quantities},
            journal={Monthly Weather Review},
            year={2015},
        }
        ```
    """
    name = "scores.variogram_score"
    rules = import_scoringrules(name)
    vectors = check_vectors(name, samples, targets, weights, row_weights, mask, estimator, reduction)
    points, observed = vectors.samples, vectors.targets
    pairs = check_pair_weights(name, pair_weights, points.shape[-1], points.dtype)
    wide = None if pairs is None else jnp.broadcast_to(pairs, (*observed.shape, observed.shape[-1]))
    options = {"w": wide, "m_axis": 0, "p": check_order(name, order), "estimator": estimator, "backend": "jax"}
    rule = lambda y, x, weights: rules.vs_ensemble(y, x, ens_w=weights, **options)
    return score_vectors(name, rule, vectors, reduction)
