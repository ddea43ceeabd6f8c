from typing import Literal

from jaxtyping import Array, ArrayLike, Bool, Float, Real

from ._multivariate import check_vectors, score_vectors
from ._reduce import Reduction
from ._scoringrules import import_scoringrules


def energy_score(
    samples: Float[ArrayLike, "members *batch out"],
    targets: Real[ArrayLike, "*batch out"],
    *,
    estimator: Literal["nrg", "fair"] = "nrg",
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Energy score of the members' multi-output predictions as samples; lower is better.

    $\sum_m w_m \lVert x_m - y \rVert - \frac12 \sum_{mn} w_m w_n \lVert x_m - x_n \rVert$ with Euclidean norms over
    outputs, which must have the same unit: a generalisation of [`eqx_ensemble.scores.crps`][] to vectors. Computed by
    `scoringrules` (`pip install 'eqx_ensemble[scores]'`), which allocates an array `(*batch, members, members, out)`.

    **Arguments:**

    - `samples`: `(members, *batch, out)`.
    - `targets`: `(*batch, out)`; nothing is broadcast.
    - `estimator`: `"nrg"`, or `"fair"`, whose last sum is divided by $M (M - 1)$ instead of $M^2$; report which one was
        used.
    - `weights`: convex weights over members, `(members,)`, concrete; divided by their sum. Members of weight zero are
        ignored. Only with `"nrg"`.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for one value per row, NaN for ignored rows.

    **Returns:**

    A scalar, or `(*batch,)`. It is not differentiable.

    **Raises:**

    - `ImportError` without scoringrules.
    - `TypeError` for samples that are not floating-point.
    - `ValueError` for mismatched shapes, invalid or traced weights, and `"fair"` with weights or with fewer than two
        members.
    - `NotImplementedError` when differentiated.

    ```python
    samples, targets = jnp.array([[[0.0, 0.0]], [[6.0, 8.0]]]), jnp.array([[3.0, 4.0]])
    ee.scores.energy_score(samples, targets)  # 5 - 10 / 4 = 2.5
    ```

    ??? cite
        [Strictly Proper Scoring Rules, Prediction, and Estimation](https://doi.org/10.1198/016214506000001437)
    """
    name = "scores.energy_score"
    rules = import_scoringrules(name)
    vectors = check_vectors(name, samples, targets, weights, row_weights, mask, estimator, reduction)
    options = {"m_axis": 0, "estimator": estimator, "backend": "jax"}
    rule = lambda y, x, weights: rules.es_ensemble(y, x, ens_w=weights, **options)
    return score_vectors(name, rule, vectors, reduction)
