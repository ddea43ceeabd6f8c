import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from ..._check import check_array, check_mask, check_nonnegative, check_number, check_positive_int
from ..._weighting import blank_masked
from ...scores._check import check_reduction
from ...scores._reduce import Reduction, reduce
from ...uncertainty._check import check_temperature
from ._check import check_classes, check_smoothing


def distribution_loss(
    logits: Float[ArrayLike, "*batch classes"],
    teacher: Float[ArrayLike, "*batch members classes"],
    *,
    temperature: Real[ArrayLike, ""] = 1.0,
    smoothing: float = 1e-4,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of a student that predicts the distribution of an ensemble's probabilities, as a Dirichlet distribution.

    $-T^2 \frac1M \sum_m \log \mathrm{Dir}(\pi_m; \alpha)$ in nats (times $T^2$), with the student's concentration
    $\alpha = e^{z / T}$, and the teachers' probabilities $\pi_m = \mathrm{softmax}(z_m / T)$, smoothed towards uniform
    by `smoothing`. It is a negative log-density and may be negative. At the optimum $\psi(\sum_j \alpha_j) -
    \psi(\alpha_k) + \frac1M \sum_m \log \pi_{mk} = 0$.

    The student separates disagreement between members from noise: `jnp.exp(logits)` is a concentration for
    [`eqx_ensemble.methods.heads.decompose_dirichlet`][], and `logits` are also the logits of the mean probabilities.
    The log-probabilities of unlikely classes dominate the loss of confident members; annealing the temperature from 10
    to 1 ([`eqx_ensemble.methods.distillation.temperature_annealing`][]) makes it easier to learn from them. A small
    concentration at a high temperature is a large one at a low temperature, since $\alpha = e^{z / T}$: train long
    enough at 1.

    **Arguments:**

    - `logits`: the logits of ONE student, `(*batch, classes)`.
    - `teacher`: the logits or log-probabilities of at least two teachers, `(*batch, members, classes)`, from
        [`eqx_ensemble.methods.distillation.targets`][]. The likelihood of one teacher, or of several equal ones, is
        unbounded.
    - `temperature`: $T$, above zero; it may be a hyper-parameter.
    - `smoothing`: from 0 to below 1. With 0, the loss is not finite if a teacher gives a class zero probability.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for one value per row.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    - `TypeError` for logits that are not floating-point.
    - `ValueError` for shapes that do not match, fewer than two teachers, and a temperature or smoothing out of range
        (where concrete).

    ```python
    teacher = jnp.log(jnp.array([[[0.7, 0.3], [0.5, 0.5]]]))  # one row, two members
    student = jnp.log(jnp.array([[3.0, 2.0]]))
    ee.methods.distillation.distribution_loss(student, teacher)  # -0.487
    ```

    ??? cite

        [Ensemble Distribution Distillation](https://arxiv.org/abs/1905.00076), Malinin, Mlodozeniec and Gales, 2020.
    """
    name = "methods.distillation.distribution_loss"
    student, teachers = check_classes(name, logits, teacher, least=2)
    kept = check_mask(name, mask, student.shape[:-1])
    check_reduction(name, reduction, student.shape[:-1])
    scale = check_temperature(name, temperature, student.dtype)
    uniform = check_smoothing(name, smoothing)
    student, teachers = blank_masked(student, kept), blank_masked(teachers, kept, before=1)
    return _loss(student, teachers, scale, kept, uniform, reduction)


def temperature_annealing(
    step: Real[ArrayLike, "..."], num_steps: int, *, start: float | int = 10.0
) -> Float[Array, "..."]:
    r"""A temperature that decreases linearly to 1: $1 + (T_0 - 1) \max(0, 1 - t / n)$.

    **Arguments:**

    - `step`: $t$, the epoch or step, counted from 0; it may be traced.
    - `num_steps`: $n$, the epoch or step at which it reaches 1.
    - `start`: $T_0$, at least 1.

    **Returns:**

    An array of the shape of `step`.

    **Raises:**

    `TypeError` or `ValueError` for a negative `step` (where concrete), for `num_steps` that is not a positive integer,
    and for a `start` below 1.

    ```python
    # [10, 5.5, 1]
    ee.methods.distillation.temperature_annealing(jnp.array([0, 10, 30]), 20)
    ```

    ??? cite

        [Ensemble Distribution Distillation](https://arxiv.org/abs/1905.00076), Malinin, Mlodozeniec and Gales, 2020.
    """
    name = "methods.distillation.temperature_annealing"
    length = check_positive_int(num_steps, "num_steps", name=name)
    first = check_number(start, "start", name=name, least=1)
    array = check_array(name, "step", step)
    check_nonnegative(name, "step", step, fix="Epochs and steps count from 0.")
    dtype = array.dtype if jnp.issubdtype(array.dtype, jnp.floating) else jnp.float32
    return 1 + (first - 1) * jnp.maximum(0, 1 - array.astype(dtype) / length)


@partial(jax.jit, static_argnames=("smoothing", "reduction"))
def _loss(
    student: Float[Array, "*batch classes"],
    teachers: Float[Array, "members *batch classes"],
    temperature: Float[Array, ""],
    mask: Bool[Array, "*batch"] | None,
    smoothing: float,
    reduction: Reduction,
) -> Float[Array, "..."]:
    logs = _smooth(jax.nn.log_softmax(teachers / temperature, axis=-1), smoothing)
    rows = _negative_log_density(student / temperature, jnp.mean(logs, axis=0))
    return reduce(temperature**2 * rows, reduction, mask)


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
