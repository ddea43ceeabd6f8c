from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from ..._check import check_mask
from ..._weighting import blank_masked, class_mixture
from ...scores._check import check_reduction
from ...scores._reduce import Reduction, reduce
from ...uncertainty._check import check_temperature
from ._check import check_classes


def mixture_loss(
    logits: Float[ArrayLike, "*batch classes"],
    teacher: Float[ArrayLike, "*batch members classes"],
    *,
    temperature: Real[ArrayLike, ""] = 1.0,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of a student that predicts the mean probabilities of an ensemble of classifiers.

    $T^2 \, \mathrm{KL}(\bar p \parallel q)$ in nats (times $T^2$), with
    $\bar p = \frac1M \sum_m \mathrm{softmax}(z_m / T)$ of the teachers' logits and $q = \mathrm{softmax}(z / T)$ of the
    student's. It is zero if the student equals the mixture. A temperature above 1 gives more weight to unlikely
    classes; the factor $T^2$ preserves the scale of the gradient. To learn from labels as well, add their `scores.nll`.

    Disagreement between members is lost; [`eqx_ensemble.methods.distillation.distribution_loss`][] preserves it.

    **Arguments:**

    - `logits`: the logits of ONE student, `(*batch, classes)`.
    - `teacher`: the teachers' logits or log-probabilities, `(*batch, members, classes)`, from
        [`eqx_ensemble.methods.distillation.targets`][].
    - `temperature`: $T$, above zero; it may be a hyper-parameter.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for one value per row.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    - `TypeError` for logits that are not floating-point.
    - `ValueError` for shapes that do not match, and for a temperature that is not above zero (where concrete).

    ```python
    teacher = jnp.log(jnp.array([[[0.9, 0.1], [0.3, 0.7]]]))  # one row, two members
    student = jnp.log(jnp.array([[0.6, 0.4]]))
    ee.methods.distillation.mixture_loss(student, teacher)  # 0
    ```

    ??? cite

        [Distilling the Knowledge in a Neural Network](https://arxiv.org/abs/1503.02531), Hinton, Vinyals and Dean,
        2015.
    """
    name = "methods.distillation.mixture_loss"
    student, teachers = check_classes(name, logits, teacher, least=1)
    kept = check_mask(name, mask, student.shape[:-1])
    check_reduction(name, reduction, student.shape[:-1])
    scale = check_temperature(name, temperature, student.dtype)
    return _loss(blank_masked(student, kept), blank_masked(teachers, kept, before=1), scale, kept, reduction)


@partial(jax.jit, static_argnames="reduction")
def _loss(
    student: Float[Array, "*batch classes"],
    teachers: Float[Array, "members *batch classes"],
    temperature: Float[Array, ""],
    mask: Bool[Array, "*batch"] | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    target = class_mixture(teachers / temperature, None)
    found = jax.nn.log_softmax(student / temperature, axis=-1)
    possible = target > -jnp.inf
    terms = jnp.exp(target) * (jnp.where(possible, target, 0) - jnp.where(possible, found, 0))
    return reduce(temperature**2 * jnp.sum(terms, axis=-1), reduction, mask)
