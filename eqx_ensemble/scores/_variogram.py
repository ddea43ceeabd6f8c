from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import as_column, check_regression
from .._weighting import blank_unweighted
from ._check import check_known_weights, check_outputs, check_reduction
from ._check_outputs import check_order, check_pair_weights
from ._crps import check_estimator
from ._reduce import Reduction, reduce
from ._row_weights import check_rows
from ._scoringrules import import_scoringrules, scoringrules_config, without_gradient


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
    r"""Variogram score of the members' predictions of several outputs, taken as samples; lower is better.

    $\sum_{ij} w_{ij} (|y_i - y_j|^p - \sum_m w_m |x_{mi} - x_{mj}|^p)^2$ over all ordered pairs of outputs, of order
    $p$. It measures dependence between outputs better than [`eqx_ensemble.scores.energy_score`][], and does not see an
    offset common to all outputs: report another score of each output too. Computed by `scoringrules` (`pip install
    'eqx_ensemble[scores]'`), which allocates an array `(*batch, members, out, out)`.

    **Arguments:**

    - `samples`: `(members, *batch, out)`.
    - `targets`: `(*batch, out)`; nothing is broadcast.
    - `order`: $p$, a number above zero; 0.5, 1 and 2 are usual.
    - `pair_weights`: $w_{ij}$, `(out, out)`, zero or more, such as the inverse distances of stations; one if not given.
    - `estimator`: `"nrg"`, or `"fair"`, which is unbiased for the distribution that the members are drawn from, in
        memory `(*batch, members, members, out, out)`.
    - `weights`: convex weights over members, `(members,)`, concrete; divided by their sum. A member of weight
        zero is left out. Only with `"nrg"`.
    - `row_weights`: weights of rows `(*batch,)`, finite and zero or more; only their ratios matter. A row of weight 2
        counts twice, one of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for one value per row.

    **Returns:**

    A scalar, or `(*batch,)`. It has no gradient.

    **Raises:**

    As [`eqx_ensemble.scores.energy_score`][], and `ValueError` for an order that is not above zero, and for invalid
    weights of pairs.

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
    points, observed = check_regression(name, targets, members=True, samples=samples)
    check_outputs(name, points)
    check_known_weights(name, weights)
    convex = check_estimator(name, estimator, points, weights)
    power = check_order(name, order)
    pairs = check_pair_weights(name, pair_weights, points.shape[-1], points.dtype)
    rows = check_rows(name, row_weights, mask, observed.shape[:-1], points.dtype)
    check_reduction(name, reduction, observed.shape[:-1])

    def score(points: Array, observed: Array) -> Array:
        expanded = None
        if convex is not None:
            expanded = jnp.broadcast_to(as_column(convex, points.ndim - 1), points.shape[:-1])
        wide = None if pairs is None else jnp.broadcast_to(pairs, (*observed.shape, observed.shape[-1]))
        with scoringrules_config():
            options = {"w": wide, "m_axis": 0, "ens_w": expanded, "p": power, "estimator": estimator}
            return rules.vs_ensemble(observed, points, backend="jax", **options).astype(points.dtype)

    points = rows.blank(blank_unweighted(points, convex), before=1)
    return reduce(without_gradient(name, score)(points, rows.blank(observed)), reduction, rows.weights)
