from jaxtyping import Array, ArrayLike, Bool, Float

from .._check import check_mask
from ._check_risk import (
    check_drop_values,
    check_loss_values,
    check_losses,
    check_risk,
    check_steps,
    warn_of_no_threshold,
)
from ._risk import first_on_grid, first_step, largest_total


def risk_control(
    losses: Float[ArrayLike, "rows thresholds"],
    thresholds: Float[ArrayLike, " thresholds"],
    *,
    risk: float,
    bound: float = 1.0,
    mask: Bool[ArrayLike, " rows"] | None = None,
) -> Float[Array, ""]:
    r"""Conformal risk control: the smallest threshold at which the expected loss of a new row is at most `risk`.

    For losses $L_i(\lambda) \le B$ that do not increase with the threshold, such as the fraction of labels missed by
    sets that grow with it, the result is the smallest $\lambda$ of the grid with

    $$\frac{\sum_i L_i(\lambda) + B}{n + 1} \le \mathrm{risk}.$$

    If the new row is exchangeable with the held-out rows, its expected loss at this threshold is at most `risk`, on
    average over held-out and new rows, for any model and distribution. The term $B$ is necessary. A loss of 0 for a
    label inside its set and 1 outside gives [`eqx_ensemble.conformal.quantile`][] at level 1 - risk. For losses that
    are step functions, [`eqx_ensemble.conformal.risk_control_steps`][] needs no grid.

    **Arguments:**

    - `losses`: `(rows, thresholds)`, the loss of each held-out row at each threshold.
    - `thresholds`: `(thresholds,)`, increasing.
    - `risk`: the largest expected loss, a Python number between 0 and `bound`.
    - `bound`: $B$, the largest possible loss of a row.
    - `mask`: booleans `(rows,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    A scalar; infinite if no threshold qualifies. While tracing, NaN if a loss is NaN.

    **Raises:**

    - `TypeError` for losses or thresholds that are not floating-point.
    - `ValueError` for mismatched shapes, thresholds that do not increase, losses that increase, exceed `bound` or are
        NaN (where concrete), and a risk that is not between 0 and `bound`. Warns if no threshold qualifies.

    ```python
    # the fraction of two true labels that are missed if classes from a probability of 1 - threshold are taken
    probabilities = jnp.linspace(0.1, 1.0, 40).reshape(20, 2)
    thresholds = jnp.linspace(0.0, 1.0, 11)
    missed = probabilities[:, :, None] < 1 - thresholds[None, None]
    ee.conformal.risk_control(
        jnp.mean(missed.astype(float), axis=1), thresholds, risk=0.2
    )
    ```

    ??? cite
        [Conformal Risk Control](https://arxiv.org/abs/2208.02814)

        ```bibtex
        @inproceedings{angelopoulos2024conformal,
            author={Anastasios N. Angelopoulos and Stephen Bates and Adam Fisch and Lihua Lei and Tal Schuster},
            title={Conformal Risk Control},
            booktitle={International Conference on Learning Representations},
            year={2024},
        }
        ```
    """
    name = "conformal.risk_control"
    table, grid = check_losses(name, losses, thresholds)
    kept = check_mask(name, mask, table.shape[:1])
    check_risk(name, risk, bound)
    check_loss_values(name, losses, bound, mask)
    most = largest_total(risk, bound, table.shape[0], kept, table.dtype)
    found = first_on_grid(table, grid, kept, most)
    warn_of_no_threshold(name, found, risk, bound, table.shape[0], mask)
    return found


def risk_control_steps(
    steps: Float[ArrayLike, "rows steps"],
    drops: Float[ArrayLike, "rows steps"],
    *,
    risk: float,
    bound: float = 1.0,
    mask: Bool[ArrayLike, " rows"] | None = None,
) -> Float[Array, ""]:
    r"""Conformal risk control for losses that are step functions of the threshold: exact, without a grid.

    The loss of row $i$ is $L_i(\lambda) = \sum_j d_{ij} [\lambda < s_{ij}]$: it drops by $d_{ij}$ when the threshold
    reaches $s_{ij}$, and is zero after the last step. The result is the smallest threshold with $(\sum_i L_i(\lambda) +
    B) / (n + 1) \le \mathrm{risk}$, as for [`eqx_ensemble.conformal.risk_control`][].

    **Arguments:**

    - `steps`: `(rows, steps)`, the thresholds at which the loss drops; for multi-label rows the scores of the true
        labels.
    - `drops`: `(rows, steps)`, the non-negative size of each drop; zero for rows with fewer steps.
    - `risk`, `bound`, `mask`: as for [`eqx_ensemble.conformal.risk_control`][].

    **Returns:**

    A scalar; infinite if no threshold qualifies, minus infinity if all do. While tracing, NaN if a step or drop is NaN.

    **Raises:**

    - `TypeError` for steps or drops that are not floating-point.
    - `ValueError` for mismatched shapes, for NaN, negative drops, and drops of a row that sum to more than `bound`
        (where concrete), and for a risk that is not between 0 and `bound`. Warns if no threshold qualifies.

    ```python
    # a label is missed while the threshold is below its score: the split-conformal quantile
    scores = jnp.arange(1.0, 10.0)
    # the eighth score, 8
    ee.conformal.risk_control_steps(scores[:, None], jnp.ones((9, 1)), risk=0.2)
    ee.conformal.quantile(scores, level=0.8)
    ```

    ??? cite
        [Conformal Risk Control](https://arxiv.org/abs/2208.02814)
    """
    name = "conformal.risk_control_steps"
    at, heights = check_steps(name, steps, drops)
    kept = check_mask(name, mask, at.shape[:1])
    check_risk(name, risk, bound)
    check_drop_values(name, steps, drops, bound, mask)
    most = largest_total(risk, bound, at.shape[0], kept, at.dtype)
    found = first_step(at, heights, kept, most)
    warn_of_no_threshold(name, found, risk, bound, at.shape[0], mask)
    return found
