from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from ..._check import check_floating_arrays, check_mask, check_variance, promote
from ..._weighting import blank_masked
from ...scores._check import check_reduction
from ...scores._reduce import Reduction, reduce
from ._check import check_gaussians


def gaussian_loss(
    mean: Float[ArrayLike, "*batch"],
    variance: Float[ArrayLike, "*batch"],
    teacher_mean: Float[ArrayLike, "*batch members"],
    teacher_variance: Float[ArrayLike, "*batch members"],
    *,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of a student that predicts the mean and variance of an ensemble of Gaussian predictions.

    The mean over members of $\mathrm{KL}(\mathcal{N}(\mu_m, \sigma_m^2) \parallel \mathcal{N}(\mu, \sigma^2))$, in
    nats. It is minimised by the moments of the mixture ([`eqx_ensemble.combine.gaussian`][]), and its minimum is zero
    if all members agree. The student's variance includes the teachers' disagreement, but does not separate it from
    their noise.

    For point predictions, use the mean square of `prediction - teacher.mean(axis=-1)`.

    **Arguments:**

    - `mean`, `variance`: the predictions of ONE student, `(*batch,)`.
    - `teacher_mean`, `teacher_variance`: the predictions of the teachers, `(*batch, members)`, from
        [`eqx_ensemble.methods.distillation.targets`][].
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for one value per row.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    - `TypeError` for arrays that are not floating-point.
    - `ValueError` for shapes that do not match, and for variances that are not above zero (where concrete).

    ```python
    means, variances = jnp.array([[-1.0, 1.0]]), jnp.array([[1.0, 1.0]])  # one row
    loss = ee.methods.distillation.gaussian_loss
    loss(jnp.array([0.0]), jnp.array([2.0]), means, variances)  # 0.347
    loss(jnp.array([0.0]), jnp.array([1.0]), means, variances)  # 0.5
    ```
    """
    name = "methods.distillation.gaussian_loss"
    own_mean, own_variance = check_floating_arrays(name, mean=mean, variance=variance)
    means, variances = check_gaussians(name, own_mean, teacher_mean, teacher_variance)
    kept = check_mask(name, mask, own_mean.shape)
    check_variance(name, variance, positive=True, mask=mask)
    check_variance(name, teacher_variance, positive=True, mask=None if mask is None else jnp.asarray(mask)[..., None])
    check_reduction(name, reduction, own_mean.shape)
    arrays = promote(own_mean, own_variance, means, variances)
    blanked = (blank_masked(x, kept, before=i // 2, fill=i % 2) for i, x in enumerate(arrays))
    return _loss(*blanked, kept, reduction)


@partial(jax.jit, static_argnames="reduction")
def _loss(
    mean: Float[Array, "*batch"],
    variance: Float[Array, "*batch"],
    teacher_means: Float[Array, " members *batch"],
    teacher_variances: Float[Array, " members *batch"],
    mask: Bool[Array, "*batch"] | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    ratio = teacher_variances / variance[None]
    squares = (teacher_means - mean[None]) ** 2 / variance[None]
    return reduce(jnp.mean(ratio - 1 - jnp.log(ratio) + squares, axis=0) / 2, reduction, mask)
