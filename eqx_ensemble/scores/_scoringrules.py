"""Scores that scoringrules computes, with the `members` axis in front, weights and masks as everywhere here."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Literal, NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import check_level, check_mask, check_regression, check_weights, check_word, missing_extra_message
from .._weighting import blank_masked, blank_unweighted
from ._check import (
    check_fair,
    check_interval,
    check_known_weights,
    check_outputs,
    check_reduction,
    check_two_members,
    no_gradient_message,
)
from ._reduce import Reduction, reduce


def energy_score(
    samples: Float[ArrayLike, "members *batch out"],
    targets: Real[ArrayLike, "*batch out"],
    *,
    estimator: Literal["nrg", "fair"] = "nrg",
    weights: Real[ArrayLike, " members"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Energy score of the members' predictions of several outputs, taken as samples; lower is better.

    $\sum_m w_m \|x_m - y\| - \frac12 \sum_{mn} w_m w_n \|x_m - x_n\|$ with Euclidean norms over the outputs, which need
    one unit: [`eqx_ensemble.scores.crps`][] for vectors. Computed by `scoringrules`
    (`pip install 'eqx_ensemble[scores]'`), which holds an array `(*batch, members, members, out)`.

    **Arguments:**

    - `samples`: `(members, *batch, out)`.
    - `targets`: `(*batch, out)`; nothing is broadcast.
    - `estimator`: `"nrg"`, or `"fair"`, whose last sum is divided by $M (M - 1)$ and not by $M^2$; always say which.
    - `weights`: convex weights over members, `(members,)`, of known values; divided by their sum. A member of weight
        zero is left out. Only with `"nrg"`.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for one value per row.

    **Returns:**

    A scalar, or `(*batch,)`. It has no gradient.

    **Raises:**

    - `ImportError` without scoringrules.
    - `TypeError` for samples that are not floating-point.
    - `ValueError` for shapes that do not fit, for invalid or traced weights, and for `"fair"` with weights or with
        fewer than two members.
    - `NotImplementedError` when it is differentiated.

    ```python
    import jax.numpy as jnp
    from eqx_ensemble import scores

    samples, targets = jnp.array([[[0.0, 0.0]], [[6.0, 8.0]]]), jnp.array([[3.0, 4.0]])
    scores.energy_score(samples, targets)  # 5 - 10 / 4 = 2.5
    ```

    ??? cite
        [Strictly Proper Scoring Rules, Prediction, and Estimation](https://doi.org/10.1198/016214506000001437)
    """
    name = "scores.energy_score"
    rules = _scoringrules(name)
    points, observed = check_regression(name, targets, members=True, samples=samples)
    check_outputs(name, points)
    check_word(estimator, "estimator", ("nrg", "fair"), name=name)
    if estimator == "fair":
        check_fair(name, points.shape[0], weighted=weights is not None)
    check_known_weights(name, weights)
    convex = check_weights(name, weights, points.shape[0], points.dtype)
    kept = check_mask(name, mask, observed.shape[:-1])
    check_reduction(name, reduction, observed.shape[:-1])

    # The gradient of the distance of a member from itself, which scoringrules takes too, is NaN.
    @jax.custom_jvp
    def score(points: Array, observed: Array) -> Array:
        spread = None
        if convex is not None:
            spread = jnp.broadcast_to(jnp.reshape(convex, (-1,) + (1,) * (points.ndim - 2)), points.shape[:-1])
        with _as_they_write():
            options = {"m_axis": 0, "ens_w": spread, "estimator": estimator, "backend": "jax"}
            return rules.es_ensemble(observed, points, **options)

    @score.defjvp
    def refuse(primals: tuple, tangents: tuple) -> NoReturn:
        raise NotImplementedError(no_gradient_message(name))

    points = blank_masked(blank_unweighted(points, convex), kept, before=1)
    return reduce(score(points, blank_masked(observed, kept)), reduction, kept)


def interval_score(
    lower: Float[ArrayLike, "*batch"],
    upper: Float[ArrayLike, "*batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    level: float,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Interval (Winkler) score of central intervals: width, and a price for targets outside; lower is better.

    $(u - l) + \frac{2}{1 - \mathrm{level}} (\max(l - y, 0) + \max(y - u, 0))$, in the unit of the target: the smallest
    on average for the true quantiles, so that it weighs coverage against width. Computed by `scoringrules`
    (`pip install 'eqx_ensemble[scores]'`).

    **Arguments:**

    - `lower`, `upper`: the ends, of one shape; no `members` axis.
    - `targets`: of the same shape; nothing is broadcast.
    - `level`: the probability that the intervals are meant to hold, a Python number between 0 and 1.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry.

    **Returns:**

    A scalar, or `(*batch,)`. Infinite for intervals without an end, which [`eqx_ensemble.conformal.quantile`][] of few
    rows gives, and for infinite targets.

    **Raises:**

    As [`eqx_ensemble.scores.coverage`][], `ValueError` for a level outside 0 to 1, and `ImportError` without
    scoringrules.

    ```python
    import jax.numpy as jnp
    from eqx_ensemble import scores

    scores.interval_score(jnp.zeros(1), jnp.ones(1), jnp.array([1.1]), level=0.8)  # 1 + 0.1 * 2 / 0.2 = 2.0
    ```

    ??? cite
        [Strictly Proper Scoring Rules, Prediction, and Estimation](https://doi.org/10.1198/016214506000001437)
    """
    name = "scores.interval_score"
    rules = _scoringrules(name)
    low, high, observed = check_regression(name, targets, members=False, lower=lower, upper=upper)
    check_level(name, level)
    kept = check_mask(name, mask, observed.shape)
    check_interval(name, lower, upper, mask=mask)
    check_reduction(name, reduction, observed.shape)
    low, high, observed = (blank_masked(x, kept) for x in (low, high, observed))
    # scoringrules multiplies distances by whether they count, and infinity times zero is NaN.
    infinite = jnp.isinf(low) | jnp.isinf(high) | jnp.isinf(observed)
    unknown = jnp.isnan(low) | jnp.isnan(high) | jnp.isnan(observed)
    low, high, observed = (jnp.where(infinite, 0, x) for x in (low, high, observed))
    with _as_they_write():
        rows = rules.interval_score(observed, low, high, 1 - level, backend="jax")
    rows = jnp.where(infinite, jnp.where(unknown, jnp.nan, jnp.inf), jnp.reshape(rows, observed.shape))
    return reduce(rows, reduction, kept)


def pinball(
    quantiles: Float[ArrayLike, "*batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    level: float,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Pinball (quantile) score of predictions of ONE quantile; lower is better.

    $\tau (y - q)$ where the target is above the prediction, $(1 - \tau) (q - y)$ where it is below, with the level
    $\tau$; in the unit of the target. Computed by `scoringrules` (`pip install 'eqx_ensemble[scores]'`).

    **Arguments:**

    - `quantiles`, `targets`: of one shape `(*batch,)`; nothing is broadcast, and there is no `members` axis.
    - `level`: which quantile they are predictions of, a Python number between 0 and 1.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    - `ImportError` without scoringrules.
    - `TypeError` for quantiles that are not floating-point.
    - `ValueError` for shapes that differ, and for a level outside 0 to 1.

    ```python
    import jax.numpy as jnp
    from eqx_ensemble import scores

    scores.pinball(jnp.zeros(2), jnp.array([1.0, -1.0]), level=0.9)  # (0.9 + 0.1) / 2 = 0.5
    ```

    ??? cite
        [Regression Quantiles](https://doi.org/10.2307/1913643)

        ```bibtex
        @article{koenker1978regression,
            author={Roger Koenker and Gilbert Bassett},
            title={Regression Quantiles},
            journal={Econometrica},
            year={1978},
        }
        ```
    """
    name = "scores.pinball"
    rules = _scoringrules(name)
    predicted, observed = check_regression(name, targets, members=False, quantiles=quantiles)
    check_level(name, level)
    kept = check_mask(name, mask, observed.shape)
    check_reduction(name, reduction, observed.shape)
    predicted, observed = blank_masked(predicted, kept), blank_masked(observed, kept)
    with _as_they_write():
        rows = rules.quantile_score(observed, predicted, level, backend="jax")
    return reduce(rows, reduction, kept)


def dawid_sebastiani(
    samples: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Dawid-Sebastiani score of the mean and the variance of the members' point predictions; lower is better.

    $(y - \mu)^2 / \sigma^2 + \log \sigma^2$ with the members' mean $\mu$ and variance $\sigma^2$ (ddof 1): it sees two
    moments only. Of a Gaussian it is twice the negative log-density, less $\log 2 \pi$: for members with variances of
    their own take [`eqx_ensemble.scores.nll_gaussian`][] of [`eqx_ensemble.combine.gaussian`][]. Computed by
    `scoringrules` (`pip install 'eqx_ensemble[scores]'`).

    **Arguments:**

    - `samples`: `(members, *batch)`, one number per member and entry; two members or more, equally weighted.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry.

    **Returns:**

    A scalar, or `(*batch,)`. Where all members agree there is no finite value.

    **Raises:**

    - `ImportError` without scoringrules.
    - `TypeError` for samples that are not floating-point.
    - `ValueError` for shapes that do not fit, and for fewer than two members.

    ```python
    import jax.numpy as jnp
    from eqx_ensemble import scores

    scores.dawid_sebastiani(jnp.array([[0.0], [2.0]]), jnp.array([1.0]))  # log(2) = 0.693
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
    rules = _scoringrules(name)
    points, observed = check_regression(name, targets, members=True, samples=samples)
    check_two_members(name, points.shape[0])
    kept = check_mask(name, mask, observed.shape)
    check_reduction(name, reduction, observed.shape)
    # Rows that are left out hold the members' numbers 0, 1, 2...: equal ones would have a NaN gradient.
    numbers = jnp.arange(points.shape[0], dtype=points.dtype)
    # Errors, not values: the mean of large numbers would be rounded.
    errors = points - observed[None]
    errors = blank_masked(errors, kept, before=1, fill=jnp.reshape(numbers, (-1,) + (1,) * observed.ndim))
    with _as_they_write():
        rows = rules.dssuv_ensemble(jnp.zeros_like(observed), errors, m_axis=0, backend="jax")
    return reduce(rows, reduction, kept)


def _scoringrules(name: str) -> ModuleType:
    try:
        import scoringrules
    except ImportError as error:
        raise ImportError(missing_extra_message(name, "scoringrules", "scores")) from error
    return scoringrules


@contextlib.contextmanager
def _as_they_write() -> Iterator[None]:
    """Dtypes and ranks are promote, and levels and weights can be read while predictions are traced."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.ensure_compile_time_eval():
        yield
