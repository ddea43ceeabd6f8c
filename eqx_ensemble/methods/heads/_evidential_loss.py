from functools import partial

import jax
import jax.numpy as jnp
from jax.scipy.special import betaln
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from ..._check import check_mask, check_regression
from ..._weighting import blank_masked
from ...scores._check import check_reduction
from ...scores._reduce import Reduction, reduce
from ._check import check_coefficient, check_parameters
from ._evidential import NormalInverseGamma, check_ranges


def evidential_loss(
    parameters: NormalInverseGamma,
    targets: Real[ArrayLike, "*batch"],
    *,
    coefficient: Real[ArrayLike, ""] = 0.01,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of evidential regression: a negative log-likelihood, in nats, plus a penalty on evidence for wrong means.

    Integrating out mean and variance gives a Student t distribution with $2 \alpha$ degrees of freedom, location $m$
    and squared scale $\beta (1 + \nu) / (\nu \alpha)$. The penalty is $\lambda |y - m| (2 \nu + \alpha)$. With
    `coefficient=0` it is the negative log-likelihood of the Student t prediction.

    **Arguments:**

    - `parameters`: those of ONE member, [`eqx_ensemble.methods.heads.NormalInverseGamma`][] of arrays `(*batch,)`.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `coefficient`: $\lambda$, zero or more; by default the authors' value. It depends on the unit of the targets:
        standardise them. It may be a hyper-parameter.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    - `TypeError` for parameters of another type, or not floating-point.
    - `ValueError` for shapes that differ, and for parameters or a coefficient out of range (where concrete).

    ```python
    parameters = ee.methods.heads.normal_inverse_gamma(jnp.zeros((4, 4)))
    ee.methods.heads.evidential_loss(parameters, jnp.ones(4))  # 1.590
    ```

    ??? cite
        [Deep Evidential Regression](https://arxiv.org/abs/1910.02600)
    """
    name = "methods.heads.evidential_loss"
    check_parameters(name, parameters, NormalInverseGamma, "normal_inverse_gamma")
    *arrays, observed = check_regression(name, targets, members=False, **parameters._asdict())
    kept = check_mask(name, mask, observed.shape)
    check_ranges(name, parameters, mask=mask)
    penalty = check_coefficient(name, "coefficient", coefficient, observed.dtype)
    check_reduction(name, reduction, observed.shape)
    known = NormalInverseGamma(*(blank_masked(x, kept, fill=2) for x in arrays))
    return _loss(known, blank_masked(observed, kept), penalty, kept, reduction)


@partial(jax.jit, static_argnames="reduction")
def _loss(
    parameters: NormalInverseGamma,
    targets: Float[Array, "*batch"],
    coefficient: Float[Array, ""],
    mask: Bool[Array, "*batch"] | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    mean, nu, alpha, beta = parameters
    error = targets - mean
    width = 2 * beta * (1 + 1 / nu)
    # `betaln` instead of a difference of two log-gammas, which are large for much evidence.
    likelihood = betaln(alpha, jnp.full_like(alpha, 0.5)) + 0.5 * jnp.log(width)
    likelihood += (alpha + 0.5) * jnp.log1p(error**2 / width)
    return reduce(likelihood + coefficient * jnp.abs(error) * (2 * nu + alpha), reduction, mask)
