from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import check_regression
from ._check_chaining import check_chained, check_chaining, check_thresholds
from ._crps import check_estimator, crps_of_points
from ._reduce import Reduction
from ._row_weights import check_rows


def threshold_weighted_crps(
    samples: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    lower: Real[ArrayLike, "..."] | None = None,
    upper: Real[ArrayLike, "..."] | None = None,
    chaining: Callable[[Array], Array] | None = None,
    estimator: Literal["nrg", "fair"] = "nrg",
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Threshold-weighted CRPS of the members' point predictions, for a range of values; lower is better.

    $\int w(z) (F(z) - [z \ge y])^2 dz$, which is [`eqx_ensemble.scores.crps`][] of $v(x_m)$ and $v(y)$ with the
    chaining function $v$, an antiderivative of the weight $w \ge 0$. For thresholds, $w$ is one between them and zero
    elsewhere, and $v$ clips. It is proper, unlike the CRPS restricted to rows with extreme targets.

    **Arguments:**

    - `samples`: `(members, *batch)`, one number per member and entry.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `lower`, `upper`: the thresholds, each a scalar or `(*batch,)`; unbounded if not given.
    - `chaining`: $v$, instead of thresholds: an elementwise function that JAX can trace, such as
        `lambda z: jax.nn.softplus(z - 3)`. It must be nondecreasing, which is not checked.
    - `estimator`: `"nrg"` or `"fair"`, as for [`eqx_ensemble.scores.crps`][].
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Only with `"nrg"`.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry, NaN for ignored ones.

    **Returns:**

    A scalar, or `(*batch,)`; at most the CRPS if $w \le 1$. Scores for different thresholds are not comparable.

    **Raises:**

    As [`eqx_ensemble.scores.crps`][], and `ValueError` for neither or both of thresholds and `chaining`, thresholds
    that are NaN or in the wrong order (where concrete), and a chaining function that changes shapes.

    ```python
    samples, targets = jnp.array([[0.0], [4.0]]), jnp.array([1.0])
    # values above 2 only: of 2 and 4 for a target of 2, 1 - 0.5
    ee.scores.threshold_weighted_crps(samples, targets, lower=2.0)
    ```

    ??? cite
        [Evaluating Forecasts for High-Impact Events Using Transformed Kernel
        Scores](https://doi.org/10.1137/22M1532184); thresholds after [Comparing Density Forecasts Using Threshold- and
        Quantile-Weighted Scoring Rules](https://doi.org/10.1198/jbes.2010.08110)

        ```bibtex
        @article{allen2023evaluating,
            author={Sam Allen and David Ginsbourger and Johanna Ziegel},
            title={Evaluating Forecasts for High-Impact Events Using Transformed Kernel Scores},
            journal={SIAM/ASA Journal on Uncertainty Quantification},
            year={2023},
        }
        ```
    """
    name = "scores.threshold_weighted_crps"
    points, observed = check_regression(name, targets, members=True, samples=samples)
    convex = check_estimator(name, estimator, points, weights)
    rows = check_rows(name, row_weights, mask, observed.shape, points.dtype)
    check_chaining(name, chaining, lower, upper)
    # Ignored rows are set to one, where most chaining functions and their gradients are finite.
    points, observed = rows.blank(points, before=1, fill=1), rows.blank(observed, fill=1)
    if chaining is None:
        low, high = check_thresholds(name, lower, upper, observed, rows.known)
        of_members = [x[None] if x.ndim else x for x in (low, high)]
        points, observed = jnp.clip(points, *of_members), jnp.clip(observed, low, high)
    else:
        points, observed = check_chained(name, chaining, points), check_chained(name, chaining, observed)
    return crps_of_points(name, points, observed, rows, convex, estimator, reduction)
