"""Distillation of an ensemble into one model or a smaller ensemble: targets from its predictions, and losses."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jaxtyping import Array, Float

from .._boundary import array_function, kinds
from .._check import value_error
from .._ensemble import Ensemble
from .._leaves import is_traced
from .._marks import Each
from .._predict import predict
from .._pytree import PyTree
from .._weighting import class_mixture

__all__ = ["distribution_loss", "gaussian_loss", "mixture_loss", "split_targets", "targets"]


def targets(ensemble: Ensemble[Any], x: PyTree, **options: Any) -> PyTree:
    """The predictions of all members with the rows first, for the data of [`eqx_ensemble.fit`][].

    No labels are needed: rows that the ensemble was not trained on are more informative.

    **Arguments:**

    - `ensemble`: the teachers.
    - `x`: the inputs, a PyTree of arrays `(rows, ...)`.
    - `options`: of [`eqx_ensemble.predict`][], except `combine` and `weights`: the losses combine the teachers.

    **Returns:** the predictions, each array `(rows, members, ...)`.

    **Raises:** `ValueError` for members with NaN predictions (where concrete).

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 16, 2, key=key), 4, key=key)
    ee.methods.distillation.targets(ensemble, jnp.ones((10, 3))).shape  # (10, 4, 2)
    ```
    """
    found = predict(ensemble, x, **options)
    leaves = [x for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.floating) and not is_traced(x)]
    diverged = np.any([jnp.isnan(x).reshape(len(x), -1).any(axis=1) for x in leaves], axis=0)
    if diverged.any():
        fix = "Leave out members that diverged: `run.ensemble[run.status == ee.train.Status.OK]`."
        got = f"got NaN from members {np.flatnonzero(diverged).tolist()}"
        raise value_error("teachers whose predictions are not NaN", got, fix)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)


def split_targets(predictions: PyTree, num_students: int) -> PyTree:
    """Divides the teachers evenly among the students of a smaller ensemble, in order.

    If all students learnt from all teachers, they would agree, and the teachers' disagreement would be lost.

    **Arguments:**

    - `predictions`: from [`eqx_ensemble.methods.distillation.targets`][], arrays `(rows, members, ...)`.
    - `num_students`: the number of students, a divisor of the number of teachers.

    **Returns:** each array an [`eqx_ensemble.Each`][] `(students, rows, members / students, ...)`.

    ```python
    predictions = jnp.zeros((10, 6, 3))  # of six teachers
    ee.methods.distillation.split_targets(predictions, 2).value.shape  # (2, 10, 3, 3)
    ```
    """

    def split(x: Any) -> Each:
        array = jnp.asarray(x)
        groups = array.reshape(len(array), num_students, array.shape[1] // num_students, *array.shape[2:])
        return Each(jnp.moveaxis(groups, 1, 0))

    return jax.tree.map(split, predictions)


@array_function
def mixture_loss(
    logits: kinds.MixedLogits,
    teacher: kinds.Teachers,
    *,
    temperature: kinds.Temperature = 1.0,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
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
    target = class_mixture(jnp.moveaxis(teacher, -2, 0) / temperature, None)
    found = jax.nn.log_softmax(logits / temperature, axis=-1)
    possible = target > -jnp.inf
    terms = jnp.exp(target) * (jnp.where(possible, target, 0) - jnp.where(possible, found, 0))
    return temperature**2 * jnp.sum(terms, axis=-1)


@array_function
def gaussian_loss(
    mean: kinds.Points,
    variance: kinds.Variance,
    teacher_mean: kinds.TeacherMeans,
    teacher_variance: kinds.TeacherVariances,
    *,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
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
    ratio = teacher_variance / variance[..., None]
    squares = (teacher_mean - mean[..., None]) ** 2 / variance[..., None]
    return jnp.mean(ratio - 1 - jnp.log(ratio) + squares, axis=-1) / 2


@array_function
def distribution_loss(
    logits: kinds.MixedLogits,
    teacher: kinds.Teachers,
    *,
    temperature: kinds.Temperature = 1.0,
    smoothing: kinds.Share = 1e-4,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
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
    - `smoothing`: from 0 to 1. With 0, a teacher's zero probability makes the loss infinite.
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
    if teacher.shape[-2] < 2:
        fix = "The Dirichlet likelihood of one teacher is unbounded. Use `methods.distillation.mixture_loss`."
        raise value_error("at least two teachers", f"got {teacher.shape[-2]}", fix)
    logs = jax.nn.log_softmax(teacher / temperature, axis=-1)
    smooth = jnp.logaddexp(logs + jnp.log1p(-smoothing), jnp.log(smoothing / logs.shape[-1]))
    return temperature**2 * _negative_log_density(logits / temperature, jnp.mean(smooth, axis=-2))


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
