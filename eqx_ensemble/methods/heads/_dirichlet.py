import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from ..._check import (
    ALL_ROWS,
    CountedRows,
    check_floating,
    check_labels,
    check_logits,
    check_row_weights,
    check_word,
    promote,
    value_error,
)
from ..._weighting import at_label, is_class
from ...scores._engine import CheckedRowWeights, Reduction, reduce
from ...uncertainty import Decomposition
from ._check import check_above, check_coefficient


def dirichlet(logits: Float[ArrayLike, "*batch classes"]) -> Float[Array, "*batch classes"]:
    r"""The head of evidential classification: maps the outputs of a last layer to a Dirichlet distribution.

    $\alpha_k = e_k + 1$, where the evidence $e_k$ is the softplus of the output.

    **Returns:** the concentration, `(*batch, classes)`. Its logarithm are logits, as for `ee.scores.nll`.

    ```python
    ee.methods.heads.dirichlet(jnp.array([0.0, 5.0]))  # [1.693, 6.007]
    ```

    ??? cite
        [Sensoy et al. 2018](https://arxiv.org/abs/1806.01768)
    """
    return jax.nn.softplus(check_logits(logits, members=False)) + 1


def vacuity(concentration: Float[ArrayLike, "*batch classes"]) -> Float[Array, "*batch"]:
    """The uncertainty of evidential classification, $K / S$: the number of classes over the total concentration.

    Maps `(*batch, classes)` to `(*batch,)`: 1 without evidence, however that is distributed over classes.

    ```python
    ee.methods.heads.vacuity(jnp.array([1.0, 7.0]))  # 0.25
    ```

    ??? cite
        [Sensoy et al. 2018](https://arxiv.org/abs/1806.01768)
    """
    checked = check_concentration(concentration)
    check_positive(concentration)
    return checked.shape[-1] / jnp.sum(checked, axis=-1)


def decompose_dirichlet(concentration: Float[ArrayLike, "*batch classes"]) -> Decomposition:
    r"""Decomposes the entropy of the predicted class, in nats, under a Dirichlet distribution of its probabilities.

    `total` is the entropy of the mean probabilities; `aleatoric` the mean entropy, $\sum_k \frac{\alpha_k}{S} (\psi(S +
    1) - \psi(\alpha_k + 1))$; `epistemic` the difference, the mutual information. Use it at most to rank rows.

    **Returns:** [`eqx_ensemble.uncertainty.Decomposition`][], each part `(*batch,)`.

    ```python
    ee.methods.heads.decompose_dirichlet(jnp.array([1.0, 1.0]))  # 0.693 = 0.5 + 0.193
    ```

    ??? cite
        [Bengs et al. 2022](https://arxiv.org/abs/2203.06102)
    """
    checked = check_concentration(concentration)
    check_positive(concentration)
    strength = jnp.sum(checked, axis=-1, keepdims=True)
    mean = checked / strength
    total = -jnp.sum(mean * jnp.log(mean), axis=-1)
    aleatoric = jnp.sum(mean * (digamma(strength + 1) - digamma(checked + 1)), axis=-1)
    # With much evidence, the difference of the two entropies is small and may round below zero.
    epistemic = jnp.maximum(total - aleatoric, 0)
    return Decomposition(total, total - epistemic, epistemic)


def check_concentration(concentration: ArrayLike) -> Array:
    """Raises unless `concentration` is `(*batch, classes)`. Returns it; `check_positive` checks its values."""
    array = check_floating("concentration", concentration)
    if array.ndim < 1 or array.shape[-1] < 2:
        needs = "`concentration` of shape (*batch, classes), of at least two classes"
        raise value_error(needs, f"got shape {array.shape}", "The classes are the last axis.")
    return promote(array)[0]


def check_positive(concentration: ArrayLike, rows: CountedRows = ALL_ROWS) -> None:
    """Raises unless the parameters of Dirichlet distributions are above zero (if concrete)."""
    fix = "Outputs of a last layer? `methods.heads.dirichlet` maps them to a concentration."
    check_above("concentration", concentration, 0, fix=fix, rows=rows)


Risk = Literal["squared", "digamma"]


def dirichlet_loss(
    concentration: Float[ArrayLike, "*batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    kl_weight: Real[ArrayLike, ""],
    risk: Risk = "squared",
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of evidential classification: a Bayes risk, plus a penalty on evidence for wrong classes.

    With $S = \sum_k \alpha_k$ and one-hot $y$, the risk is the mean squared error under the Dirichlet distribution,
    $\sum_k (y_k - \alpha_k / S)^2 + \alpha_k (S - \alpha_k) / (S^2 (S + 1))$, or the mean cross-entropy in nats,
    $\psi(S) - \psi(\alpha_y)$. The penalty is the KL divergence of $\mathrm{Dir}(y + (1 - y) \alpha)$ from the uniform
    distribution.

    **Arguments:**

    - `concentration`: `(*batch, classes)`, from [`eqx_ensemble.methods.heads.dirichlet`][].
    - `labels`: integers `(*batch,)`. Under tracing, a row with a label out of range is NaN.
    - `kl_weight`: the weight of the penalty, zero or more. The authors raise it from 0 to 1 within 10 epochs:
        `optax.linear_schedule(0, 1, steps)`.
    - `risk`: `"squared"`, the authors' choice, or `"digamma"`.

    ```python
    concentration = ee.methods.heads.dirichlet(jnp.zeros((4, 3)))
    labels = jnp.array([0, 1, 2, 0])
    ee.methods.heads.dirichlet_loss(concentration, labels, kl_weight=1.0)  # 0.971
    ```

    ??? cite
        [Sensoy et al. 2018](https://arxiv.org/abs/1806.01768)
    """
    check_word(risk, "risk", ("squared", "digamma"))
    checked = check_concentration(concentration)
    rows = check_row_weights(row_weights, checked.shape[:-1], checked.dtype, reduction=reduction)
    known = check_labels(labels, checked, rows, argument="concentration", members=False)
    check_positive(concentration, rows)
    weight = check_coefficient("kl_weight", kl_weight, checked.dtype)
    return _loss(rows.blank(checked, fill=1), rows.blank(known), weight, rows.weights, risk, reduction)


@partial(jax.jit, static_argnames=("risk", "reduction"))
def _loss(
    concentration: Float[Array, "*batch classes"],
    labels: Integer[Array, "*batch"],
    kl_weight: Float[Array, ""],
    row_weights: CheckedRowWeights | None,
    risk: Risk,
    reduction: Reduction,
) -> Float[Array, "..."]:
    strength = jnp.sum(concentration, axis=-1)
    one_hot = jax.nn.one_hot(labels, concentration.shape[-1], dtype=bool)
    if risk == "digamma":
        rows = digamma(strength) - digamma(at_label(concentration, labels))
    else:
        mean = concentration / strength[..., None]
        rows = jnp.sum(jnp.where(one_hot, 1 - mean, mean) ** 2 + mean * (1 - mean) / (strength[..., None] + 1), axis=-1)
        rows = jnp.where(is_class(labels, concentration.shape[-1]), rows, jnp.nan)
    return reduce(rows + kl_weight * _divergence(jnp.where(one_hot, 1, concentration)), reduction, row_weights)


def _divergence(concentration: Float[Array, "*batch classes"]) -> Float[Array, "*batch"]:
    """KL divergence of Dirichlet distributions from the uniform one."""
    num_classes = concentration.shape[-1]
    parts = jnp.sum(_part(concentration, 1), axis=-1)
    return _part(jnp.sum(concentration, axis=-1), num_classes) - parts - math.lgamma(num_classes)


def _part(x: Float[Array, "..."], count: int) -> Float[Array, "..."]:
    r"""$\log \Gamma(x) - (x - count) \psi(x) + x$, of which the divergence is a sum.

    Uses Stirling's series. Terms that grow with $x$ are cancelled analytically, because their difference has no
    accurate digits in float32 for large concentrations.
    """
    is_large = x > 16
    large, small = jnp.where(is_large, x, 16), jnp.where(is_large, 16, x)
    inverse = 1 / large
    series = inverse * (1 / 6 - inverse**2 * (1 / 90 - inverse**2 * (1 - inverse**2) / 210))
    grown = count * digamma(large) + series - jnp.log(large) / 2 + (1 + math.log(2 * math.pi)) / 2
    return jnp.where(is_large, grown, gammaln(small) - (small - count) * digamma(small) + small)
