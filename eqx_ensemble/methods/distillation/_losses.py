import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from ..._caller import caller
from ..._check import (
    check_floating_arrays,
    check_number,
    check_positive_scalar,
    check_row_weights,
    check_variance,
    promote,
)
from ..._weighting import class_mixture
from ...scores._engine import CheckedRowWeights, Reduction, reduce
from ._targets import check_classes, check_gaussians


def gaussian_loss(
    mean: Float[ArrayLike, "*batch"],
    variance: Float[ArrayLike, "*batch"],
    teacher_mean: Float[ArrayLike, "*batch members"],
    teacher_variance: Float[ArrayLike, "*batch members"],
    *,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of a student that predicts the mean and variance of an ensemble of Gaussian predictions.

    The mean over members of $\mathrm{KL}(\mathcal{N}(\mu_m, \sigma_m^2) \parallel \mathcal{N}(\mu, \sigma^2))$, in
    nats, which the moments of the mixture minimise ([`eqx_ensemble.combine.gaussian`][]).

    **Arguments:**

    - `mean`, `variance`: the predictions of ONE student, `(*batch,)`.
    - `teacher_mean`, `teacher_variance`: `(*batch, members)`, from [`eqx_ensemble.methods.distillation.targets`][].
    - `row_weights`, `reduction`: as for [`eqx_ensemble.scores.nll`][].

    **Returns:** a scalar, or `(*batch,)`.

    ```python
    means, variances = jnp.array([[-1.0, 1.0]]), jnp.array([[1.0, 1.0]])  # one row
    loss = ee.methods.distillation.gaussian_loss
    loss(jnp.array([0.0]), jnp.array([2.0]), means, variances)  # 0.347
    loss(jnp.array([0.0]), jnp.array([1.0]), means, variances)  # 0.5
    ```
    """
    own_mean, own_variance = check_floating_arrays(mean=mean, variance=variance)
    means, variances = check_gaussians(own_mean, teacher_mean, teacher_variance)
    arrays = promote(own_mean, own_variance, means, variances)
    rows = check_row_weights(row_weights, own_mean.shape, arrays[0].dtype, reduction=reduction)
    check_variance(variance, positive=True, rows=rows)
    check_variance(teacher_variance, positive=True, rows=rows.known_along(own_mean.ndim + 1))
    blanked = (rows.blank(x, before=i // 2, fill=i % 2) for i, x in enumerate(arrays))
    return _gaussian_loss(*blanked, rows.weights, reduction)


@partial(jax.jit, static_argnames="reduction")
def _gaussian_loss(
    mean: Float[Array, "*batch"],
    variance: Float[Array, "*batch"],
    teacher_means: Float[Array, " members *batch"],
    teacher_variances: Float[Array, " members *batch"],
    row_weights: CheckedRowWeights | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    ratio = teacher_variances / variance[None]
    squares = (teacher_means - mean[None]) ** 2 / variance[None]
    return reduce(jnp.mean(ratio - 1 - jnp.log(ratio) + squares, axis=0) / 2, reduction, row_weights)


def distribution_loss(
    logits: Float[ArrayLike, "*batch classes"],
    teacher: Float[ArrayLike, "*batch members classes"],
    *,
    temperature: Real[ArrayLike, ""] = 1.0,
    smoothing: float = 1e-4,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of a student that predicts the distribution of an ensemble's probabilities, as a Dirichlet distribution.

    $-T^2 \frac1M \sum_m \log \mathrm{Dir}(\pi_m; \alpha)$ in nats, with the student's concentration $\alpha = e^{z /
    T}$ and the teachers' probabilities $\pi_m = \mathrm{softmax}(z_m / T)$, smoothed towards uniform by `smoothing`. It
    may be negative.

    `jnp.exp(logits)` is a concentration for [`eqx_ensemble.methods.heads.decompose_dirichlet`][], and `logits` are
    logits of the mean probabilities. Anneal the temperature from 10 to 1, as `optax.linear_schedule(10, 1, epochs)`, to
    learn from confident teachers.

    **Arguments:**

    - `logits`: the logits of ONE student, `(*batch, classes)`.
    - `teacher`: the logits or log-probabilities of at least two teachers that differ, `(*batch, members, classes)`,
        from [`eqx_ensemble.methods.distillation.targets`][].
    - `temperature`: $T$, above zero.
    - `smoothing`: from 0 to below 1. With 0, a teacher's zero probability makes the loss infinite.
    - `row_weights`, `reduction`: as for [`eqx_ensemble.scores.nll`][].

    **Returns:** a scalar, or `(*batch,)`.

    ```python
    teacher = jnp.log(jnp.array([[[0.7, 0.3], [0.5, 0.5]]]))  # one row, two members
    student = jnp.log(jnp.array([[3.0, 2.0]]))
    ee.methods.distillation.distribution_loss(student, teacher)  # -0.487
    ```

    ??? cite
        [Malinin et al. 2020](https://arxiv.org/abs/1905.00076)
    """
    student, teachers = check_classes(logits, teacher, least=2)
    rows = check_row_weights(row_weights, student.shape[:-1], student.dtype, reduction=reduction)
    scale = check_positive_scalar("temperature", temperature, student.dtype, fix="1 leaves logits unchanged.")
    if check_number(smoothing, "smoothing", least=0) >= 1:
        raise ValueError(f"`{caller()}` needs `smoothing` below 1, got {smoothing!r}.")
    student, teachers = rows.blank(student), rows.blank(teachers, before=1)
    return _distribution_loss(student, teachers, scale, rows.weights, smoothing, reduction)


@partial(jax.jit, static_argnames=("smoothing", "reduction"))
def _distribution_loss(
    student: Float[Array, "*batch classes"],
    teachers: Float[Array, "members *batch classes"],
    temperature: Float[Array, ""],
    row_weights: CheckedRowWeights | None,
    smoothing: float,
    reduction: Reduction,
) -> Float[Array, "..."]:
    logs = _smooth(jax.nn.log_softmax(teachers / temperature, axis=-1), smoothing)
    rows = _negative_log_density(student / temperature, jnp.mean(logs, axis=0))
    return reduce(temperature**2 * rows, reduction, row_weights)


def _smooth(logs: Float[Array, "..."], smoothing: float) -> Float[Array, "..."]:
    if smoothing == 0:
        return logs
    return jnp.log((1 - smoothing) * jnp.exp(logs) + smoothing / logs.shape[-1])


def _negative_log_density(
    logs: Float[Array, "*batch classes"], mean_log: Float[Array, "*batch classes"]
) -> Float[Array, "*batch"]:
    r"""The negative log-density of $\mathrm{Dir}(e^{logs})$, at a point whose logarithm is `mean_log`.

    Uses Stirling's formula. The large terms of the log-gamma functions are cancelled analytically, because their
    difference has no accurate digits in float32 for large concentrations.
    """
    strength = jax.nn.logsumexp(logs, axis=-1, keepdims=True)
    excess = jnp.sum(jnp.exp(logs) * (logs - strength - mean_log) + mean_log - logs / 2, axis=-1)
    constant = (logs.shape[-1] - 1) * math.log(2 * math.pi) / 2
    return excess + strength[..., 0] / 2 + constant + jnp.sum(_rest(logs), axis=-1) - _rest(strength[..., 0])


def _rest(log: Float[Array, "..."]) -> Float[Array, "..."]:
    """The remainder of Stirling's formula for the log-gamma function at `exp(log)`."""
    is_large = log > math.log(8)
    large = jnp.exp(-jnp.where(is_large, log, math.log(8)))
    series = large * (1 / 12 - large**2 * (1 / 360 - large**2 * (1 / 1260 - large**2 / 1680)))
    small_log: Any = jnp.where(is_large, 0, log)
    small = jnp.exp(small_log)
    exact = gammaln(small + 1) - (small + 0.5) * small_log + small - math.log(2 * math.pi) / 2
    return jnp.where(is_large, series, exact)


def mixture_loss(
    logits: Float[ArrayLike, "*batch classes"],
    teacher: Float[ArrayLike, "*batch members classes"],
    *,
    temperature: Real[ArrayLike, ""] = 1.0,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of a student that predicts the mean probabilities of an ensemble of classifiers.

    $T^2 \, \mathrm{KL}(\bar p \parallel q)$ in nats, with $\bar p = \frac1M \sum_m \mathrm{softmax}(z_m / T)$ of the
    teachers and $q = \mathrm{softmax}(z / T)$ of the student. Disagreement is lost;
    [`eqx_ensemble.methods.distillation.distribution_loss`][] preserves it.

    **Arguments:**

    - `logits`: the logits of ONE student, `(*batch, classes)`.
    - `teacher`: logits or log-probabilities `(*batch, members, classes)`, from
        [`eqx_ensemble.methods.distillation.targets`][].
    - `temperature`: $T$, above zero.
    - `row_weights`, `reduction`: as for [`eqx_ensemble.scores.nll`][].

    **Returns:** a scalar, or `(*batch,)`.

    ```python
    teacher = jnp.log(jnp.array([[[0.9, 0.1], [0.3, 0.7]]]))  # one row, two members
    student = jnp.log(jnp.array([[0.6, 0.4]]))
    ee.methods.distillation.mixture_loss(student, teacher)  # 0
    ```

    ??? cite
        [Hinton et al. 2015](https://arxiv.org/abs/1503.02531)
    """
    student, teachers = check_classes(logits, teacher, least=1)
    rows = check_row_weights(row_weights, student.shape[:-1], student.dtype, reduction=reduction)
    scale = check_positive_scalar("temperature", temperature, student.dtype, fix="1 leaves logits unchanged.")
    return _loss(rows.blank(student), rows.blank(teachers, before=1), scale, rows.weights, reduction)


@partial(jax.jit, static_argnames="reduction")
def _loss(
    student: Float[Array, "*batch classes"],
    teachers: Float[Array, "members *batch classes"],
    temperature: Float[Array, ""],
    row_weights: CheckedRowWeights | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    target = class_mixture(teachers / temperature, None)
    found = jax.nn.log_softmax(student / temperature, axis=-1)
    possible = target > -jnp.inf
    terms = jnp.exp(target) * (jnp.where(possible, target, 0) - jnp.where(possible, found, 0))
    return reduce(temperature**2 * jnp.sum(terms, axis=-1), reduction, row_weights)
