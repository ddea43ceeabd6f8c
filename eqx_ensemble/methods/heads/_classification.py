import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Float

from ..._boundary import array_function, kinds
from ..._weighting import at_label, is_class
from ...uncertainty import Decomposition

Risk = Literal["squared", "digamma"]


@array_function
def dirichlet(logits: kinds.MixedLogits) -> Float[Array, "*batch classes"]:
    r"""The head of evidential classification: maps the outputs of a last layer to a Dirichlet distribution.

    $\alpha_k = e_k + 1$, where the evidence $e_k$ is the softplus of the output.

    **Returns:** the concentration, `(*batch, classes)`. Its logarithm are logits, as for `ee.scores.nll`.

    ```python
    ee.methods.heads.dirichlet(jnp.array([0.0, 5.0]))  # [1.693, 6.007]
    ```

    ??? cite
        [Sensoy et al. 2018](https://arxiv.org/abs/1806.01768)
    """
    return jax.nn.softplus(logits) + 1


@array_function
def vacuity(concentration: kinds.Concentration) -> Float[Array, "*batch"]:
    """The uncertainty of evidential classification, $K / S$: the number of classes over the total concentration.

    Maps `(*batch, classes)` to `(*batch,)`: 1 without evidence, however that is distributed over classes.

    ```python
    ee.methods.heads.vacuity(jnp.array([1.0, 7.0]))  # 0.25
    ```

    ??? cite
        [Sensoy et al. 2018](https://arxiv.org/abs/1806.01768)
    """
    return concentration.shape[-1] / jnp.sum(concentration, axis=-1)


@array_function
def decompose_dirichlet(concentration: kinds.Concentration) -> Decomposition:
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
    strength = jnp.sum(concentration, axis=-1, keepdims=True)
    mean = concentration / strength
    total = -jnp.sum(mean * jnp.log(mean), axis=-1)
    aleatoric = jnp.sum(mean * (digamma(strength + 1) - digamma(concentration + 1)), axis=-1)
    # With much evidence, the difference of the two entropies is small and may round below zero.
    epistemic = jnp.maximum(total - aleatoric, 0)
    return Decomposition(total, total - epistemic, epistemic)


@array_function
def dirichlet_loss(
    concentration: kinds.Concentration,
    labels: kinds.Labels,
    *,
    kl_weight: kinds.Amount,
    risk: Risk = "squared",
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
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
    strength = jnp.sum(concentration, axis=-1)
    one_hot = jax.nn.one_hot(labels, concentration.shape[-1], dtype=bool)
    if risk == "digamma":
        rows = digamma(strength) - digamma(at_label(concentration, labels))
    else:
        mean = concentration / strength[..., None]
        rows = jnp.sum(jnp.where(one_hot, 1 - mean, mean) ** 2 + mean * (1 - mean) / (strength[..., None] + 1), axis=-1)
        rows = jnp.where(is_class(labels, concentration.shape[-1]), rows, jnp.nan)
    return rows + kl_weight * _divergence(jnp.where(one_hot, 1, concentration))


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
