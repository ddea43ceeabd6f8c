import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from ..._check import check_array, check_labels, check_mask, check_nonnegative, check_positive_int, check_word
from ..._weighting import at_label, blank_masked, is_class
from ...scores._check import check_reduction
from ...scores._reduce import Reduction, reduce
from ._check import check_coefficient
from ._dirichlet import check_concentration, check_positive

Risk = Literal["squared", "digamma"]


def dirichlet_loss(
    concentration: Float[ArrayLike, "*batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    kl_weight: Real[ArrayLike, ""],
    risk: Risk = "squared",
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of evidential classification: a Bayes risk, plus a penalty on evidence for wrong classes.

    With $S = \sum_k \alpha_k$ and one-hot $y$, the risk is the mean over the Dirichlet distribution of the squared
    error, $\sum_k (y_k - \alpha_k / S)^2 + \alpha_k (S - \alpha_k) / (S^2 (S + 1))$, or of the cross-entropy in nats,
    $\psi(S) - \psi(\alpha_y)$. The penalty is the KL divergence of $\mathrm{Dir}(y + (1 - y) \alpha)$, without the
    evidence for the label, from the uniform distribution, in nats.

    **Arguments:**

    - `concentration`: that of ONE member, `(*batch, classes)`, from [`eqx_ensemble.methods.heads.dirichlet`][].
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `kl_weight`: the weight of the penalty, zero or more; the authors anneal it from 0 to 1 over the first epochs
        ([`eqx_ensemble.methods.heads.kl_annealing`][]). Without it, evidence for wrong classes is hardly penalised. It
        may be a hyper-parameter.
    - `risk`: `"squared"`, the authors' choice, or `"digamma"`.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for one value per row.

    **Returns:**

    A scalar, or `(*batch,)`. Under tracing, a row with a label out of range is NaN.

    **Raises:**

    - `TypeError` for a concentration that is not floating-point, or labels that are not integers.
    - `ValueError` for shapes that do not match, values out of range (where concrete), and an unknown risk.

    ```python
    concentration = ee.methods.heads.dirichlet(jnp.zeros((4, 3)))
    labels = jnp.array([0, 1, 2, 0])
    ee.methods.heads.dirichlet_loss(concentration, labels, kl_weight=1.0)  # 0.971
    ```

    ??? cite
        [Evidential Deep Learning to Quantify Classification Uncertainty](https://arxiv.org/abs/1806.01768)
    """
    name = "methods.heads.dirichlet_loss"
    check_word(risk, "risk", ("squared", "digamma"), name=name)
    checked = check_concentration(name, concentration)
    kept = check_mask(name, mask, checked.shape[:-1])
    known = check_labels(name, labels, checked, mask, argument="concentration", members=False)
    check_positive(name, concentration, mask=mask)
    weight = check_coefficient(name, "kl_weight", kl_weight, checked.dtype)
    check_reduction(name, reduction, known.shape)
    return _loss(blank_masked(checked, kept, fill=1), blank_masked(known, kept), weight, kept, risk, reduction)


def kl_annealing(step: Real[ArrayLike, "..."], num_steps: int) -> Float[Array, "..."]:
    r"""The weight of the penalty of evidential classification, annealed linearly from 0 to 1: $\min(1, t / T)$.

    **Arguments:**

    - `step`: $t$, the epoch or step, counted from 0; it may be traced.
    - `num_steps`: $T$; the authors use 10 epochs.

    **Returns:**

    An array of the shape of `step`.

    **Raises:**

    `TypeError` or `ValueError` for a negative `step` (where concrete), and for `num_steps` that is not a positive
    integer.

    ```python
    ee.methods.heads.kl_annealing(jnp.array([0, 5, 20]), 10)  # [0.0, 0.5, 1.0]
    ```

    ??? cite
        [Evidential Deep Learning to Quantify Classification Uncertainty](https://arxiv.org/abs/1806.01768)
    """
    name = "methods.heads.kl_annealing"
    length = check_positive_int(num_steps, "num_steps", name=name)
    array = check_array(name, "step", step)
    check_nonnegative(name, "step", step, fix="Epochs and steps count from 0.")
    dtype = array.dtype if jnp.issubdtype(array.dtype, jnp.floating) else jnp.float32
    return jnp.minimum(array.astype(dtype) / length, 1)


@partial(jax.jit, static_argnames=("risk", "reduction"))
def _loss(
    concentration: Float[Array, "*batch classes"],
    labels: Integer[Array, "*batch"],
    kl_weight: Float[Array, ""],
    mask: Bool[Array, "*batch"] | None,
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
    return reduce(rows + kl_weight * _divergence(jnp.where(one_hot, 1, concentration)), reduction, mask)


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
