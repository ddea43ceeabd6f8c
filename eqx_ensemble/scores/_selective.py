from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from ._check_rows import check_selection


class RiskCoverage(NamedTuple):
    """The mean loss of the rows that are predicted, `risk`, when this share of all rows is, `coverage`: `(rows,)`."""

    coverage: Float[Array, " rows"]
    risk: Float[Array, " rows"]


def risk_coverage(
    uncertainty: Float[ArrayLike, "*batch"],
    losses: Real[ArrayLike, "*batch"],
    *,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> RiskCoverage:
    """The risk-coverage curve of selective prediction: how good are predictions if the least certain are refused?

    Point `k` is the mean loss of the `k + 1` rows of lowest uncertainty. Rows that tie are taken in random order: the
    risk is its expectation, which does not depend on the order in which they were passed.

    **Arguments:**

    - `uncertainty`: one number per row `(*batch,)`, higher is less certain.
    - `losses`: `(*batch,)`, such as the scores of the rows, `scores.nll(logits, labels, reduction="none")`, or one
        minus their `scores.accuracy`.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    A named tuple with `.coverage`, rising to 1, and `.risk`, each `(rows,)`; with a mask the last point is repeated.
    NaN where a row that counts has a NaN.

    **Raises:**

    - `TypeError` for uncertainties that are not floating-point, or a mask that is not boolean.
    - `ValueError` for shapes that differ, and no rows.

    ```python
    uncertainty, wrong = jnp.array([0.1, 0.7, 0.3, 0.9]), jnp.array([0.0, 0.0, 0.0, 1.0])
    ee.scores.risk_coverage(uncertainty, wrong)  # risk [0, 0, 0, 0.25]
    ```

    ??? cite
        [Selective Classification for Deep Neural Networks](https://arxiv.org/abs/1705.08500)

        ```bibtex
        @inproceedings{geifman2017selective,
            author={Yonatan Geifman and Ran El-Yaniv},
            title={Selective Classification for Deep Neural Networks},
            booktitle={Advances in Neural Information Processing Systems},
            year={2017},
        }
        ```
    """
    return _risk_coverage(*check_selection("scores.risk_coverage", uncertainty, losses, mask))


def aurc(
    uncertainty: Float[ArrayLike, "*batch"],
    losses: Real[ArrayLike, "*batch"],
    *,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    r"""Area under the risk-coverage curve, $\frac1n \sum_{k=1}^n \mathrm{risk}_k$; lower is better.

    In the unit of the loss. It judges the ranking and the predictions at once: for the ranking alone see
    [`eqx_ensemble.scores.excess_aurc`][].

    **Arguments:**

    - `uncertainty`, `losses`, `mask`: as for [`eqx_ensemble.scores.risk_coverage`][].

    **Returns:**

    A scalar. Where all rows tie, it is the mean loss.

    **Raises:**

    As [`eqx_ensemble.scores.risk_coverage`][].

    ```python
    uncertainty, wrong = jnp.array([0.1, 0.7, 0.3, 0.9]), jnp.array([0.0, 0.0, 0.0, 1.0])
    ee.scores.aurc(uncertainty, wrong)  # 0.25 / 4 = 0.0625
    ```

    ??? cite
        [Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers](https://arxiv.org/abs/1805.08206)

        ```bibtex
        @inproceedings{geifman2019bias,
            author={Yonatan Geifman and Guy Uziel and Ran El-Yaniv},
            title={Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers},
            booktitle={International Conference on Learning Representations},
            year={2019},
        }
        ```
    """
    return _aurc(*check_selection("scores.aurc", uncertainty, losses, mask))


def excess_aurc(
    uncertainty: Float[ArrayLike, "*batch"],
    losses: Real[ArrayLike, "*batch"],
    *,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    """The area under the risk-coverage curve above that of the best ranking there is, the one by the losses: E-AURC.

    Zero for a perfect ranking. The best area is that of these very rows, not its limit for many of them.

    **Arguments:**

    - `uncertainty`, `losses`, `mask`: as for [`eqx_ensemble.scores.risk_coverage`][].

    **Returns:**

    A scalar of zero or more, in the unit of the loss. What all losses have in common costs no precision.

    **Raises:**

    As [`eqx_ensemble.scores.risk_coverage`][].

    ```python
    uncertainty, wrong = jnp.array([0.1, 0.7, 0.3, 0.9]), jnp.array([1.0, 0.0, 0.0, 0.0])
    ee.scores.excess_aurc(uncertainty, wrong)  # (1 + 1/2 + 1/3 + 1/4) / 4 - 0.25 / 4 = 0.458
    ```

    ??? cite
        [Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers](https://arxiv.org/abs/1805.08206)
    """
    return _excess_aurc(*check_selection("scores.excess_aurc", uncertainty, losses, mask))


@jax.jit
def _risk_coverage(
    uncertainty: Float[Array, " rows"], losses: Float[Array, " rows"], counted: Bool[Array, " rows"]
) -> RiskCoverage:
    uncertainty = jnp.where(counted, uncertainty, jnp.inf)
    # Rows that do not count come last, also behind rows of infinite uncertainty.
    order = jnp.lexsort((uncertainty, ~counted))
    ranked, kept = uncertainty[order], counted[order]
    losses = jnp.where(kept, losses[order], 0)
    # The expectation over random orders: every row of those that tie has their mean loss.
    new = (ranked[1:] != ranked[:-1]) | (kept[1:] != kept[:-1])
    group = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(new, dtype=jnp.int32)])
    per_group = lambda x: jax.ops.segment_sum(x, group, num_segments=group.size)[group]
    expected = per_group(losses) / per_group(jnp.ones(losses.shape, jnp.int32)).astype(losses.dtype)
    number = jnp.minimum(jnp.arange(1, group.size + 1), jnp.sum(kept)).astype(losses.dtype)
    risk = jnp.cumsum(jnp.where(kept, expected, 0)) / number
    broken = jnp.any(jnp.isnan(ranked) & kept)
    return RiskCoverage(number / jnp.sum(kept).astype(losses.dtype), jnp.where(broken, jnp.nan, risk))


@jax.jit
def _aurc(
    uncertainty: Float[Array, " rows"], losses: Float[Array, " rows"], counted: Bool[Array, " rows"]
) -> Float[Array, ""]:
    return _area(_risk_coverage(uncertainty, losses, counted).risk, counted)


@jax.jit
def _excess_aurc(
    uncertainty: Float[Array, " rows"], losses: Float[Array, " rows"], counted: Bool[Array, " rows"]
) -> Float[Array, ""]:
    counted_losses = jnp.where(counted, losses, 0)
    centred = counted_losses - jnp.sum(counted_losses) / jnp.sum(counted).astype(losses.dtype)
    found = _risk_coverage(uncertainty, centred, counted).risk
    best = _risk_coverage(centred, centred, counted).risk
    return jnp.maximum(_area(found - best, counted), 0)


def _area(risk: Float[Array, " rows"], counted: Bool[Array, " rows"]) -> Float[Array, ""]:
    """The mean over the points of rows that count, which are the first."""
    number = jnp.sum(counted)
    return jnp.sum(jnp.where(jnp.arange(risk.size) < number, risk, 0)) / number.astype(risk.dtype)
