import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import as_column, check_regression
from ._check import check_reduction, check_two_members
from ._reduce import Reduction, reduce
from ._row_weights import check_rows
from ._scoringrules import import_scoringrules, scoringrules_config


def dawid_sebastiani(
    samples: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Dawid-Sebastiani score of the mean and the variance of the members' point predictions; lower is better.

    $(y - \mu)^2 / \sigma^2 + \log \sigma^2$ with the members' mean $\mu$ and variance $\sigma^2$ (ddof 1). It depends
    on these two moments only, and is twice the negative log-density of their Gaussian minus $\log 2 \pi$. For members
    that predict variances use [`eqx_ensemble.scores.nll_gaussian`][] with [`eqx_ensemble.combine.gaussian`][]. Computed
    by `scoringrules` (`pip install 'eqx_ensemble[scores]'`).

    **Arguments:**

    - `samples`: `(members, *batch)`, one number per member and entry; at least two members, equally weighted.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry, NaN for ignored ones.

    **Returns:**

    A scalar, or `(*batch,)`. Not finite where all members are equal.

    **Raises:**

    - `ImportError` without scoringrules.
    - `TypeError` for samples that are not floating-point.
    - `ValueError` for mismatched shapes, and for fewer than two members.

    ```python
    ee.scores.dawid_sebastiani(jnp.array([[0.0], [2.0]]), jnp.array([1.0]))
    # log(2) = 0.693
    ```

    ??? cite
        [Coherent Dispersion Criteria for Optimal Experimental Design](https://doi.org/10.1214/aos/1018031101)

        ```bibtex
        @article{dawid1999coherent,
            author={A. Philip Dawid and Paola Sebastiani},
            title={Coherent Dispersion Criteria for Optimal Experimental Design},
            journal={The Annals of Statistics},
            year={1999},
        }
        ```
    """
    name = "scores.dawid_sebastiani"
    rules = import_scoringrules(name)
    points, observed = check_regression(name, targets, members=True, samples=samples)
    check_two_members(name, points.shape[0])
    rows = check_rows(name, row_weights, mask, observed.shape, points.dtype)
    check_reduction(name, reduction, observed.shape)
    # Ignored rows are overwritten with 0, 1, 2...: equal members would give a NaN gradient.
    numbers = jnp.arange(points.shape[0], dtype=points.dtype)
    # Errors, not values: the mean of large numbers would lose precision.
    errors = points - observed[None]
    errors = rows.blank(errors, before=1, fill=as_column(numbers, points.ndim))
    with scoringrules_config():
        each = rules.dssuv_ensemble(jnp.zeros_like(observed), errors, m_axis=0, backend="jax")
    return reduce(each, reduction, rows.weights)
