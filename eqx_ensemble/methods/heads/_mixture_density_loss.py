from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from ..._check import check_mask, check_regression, check_variance
from ..._weighting import blank_masked
from ...scores._check import check_reduction
from ...scores._gaussian import log_density
from ...scores._reduce import Reduction, reduce
from ._mixture_density import MixtureDensity, check_density


def mixture_density_loss(
    parameters: MixtureDensity,
    targets: Real[ArrayLike, "*batch"],
    *,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of a mixture density network: the negative log-density of the targets, in nats.

    $-\log \sum_k \pi_k \, \mathcal{N}(y; \mu_k, \sigma_k^2)$ for each entry, computed in log space, so that components
    with negligible weight keep their gradient. For the mixture over all members see
    [`eqx_ensemble.methods.heads.mixture_components`][].

    **Arguments:**

    - `parameters`: those of ONE member, [`eqx_ensemble.methods.heads.MixtureDensity`][] of arrays
        `(*batch, components)`.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry.

    **Returns:**

    A scalar, or `(*batch,)`. Several outputs per row are separate entries, each with its own mixture.

    **Raises:**

    - `TypeError` for parameters of another type, or not floating-point.
    - `ValueError` for shapes that do not match, and for variances that are not above zero (where concrete).

    ```python
    parameters = ee.methods.heads.mixture_density(jnp.zeros((4, 6)))
    ee.methods.heads.mixture_density_loss(parameters, jnp.zeros(4))  # 0.736
    ```

    ??? cite
        [Mixture Density Networks](https://publications.aston.ac.uk/id/eprint/373/)
    """
    name = "methods.heads.mixture_density_loss"
    logits, mean, variance = check_density(name, parameters)
    _, observed = check_regression(name, targets, members=False, parameters=mean[..., 0])
    kept = check_mask(name, mask, observed.shape)
    check_variance(
        name, parameters.variance, positive=True, mask=None if mask is None else jnp.asarray(mask)[..., None]
    )
    check_reduction(name, reduction, observed.shape)
    dtype = observed.dtype  # float64 where the targets are
    arrays = zip((logits, mean, variance), (0, 0, 1), strict=True)
    known = (blank_masked(x.astype(dtype), kept, fill=fill) for x, fill in arrays)
    return _loss(MixtureDensity(*known), blank_masked(observed, kept), kept, reduction)


@partial(jax.jit, static_argnames="reduction")
def _loss(
    parameters: MixtureDensity,
    targets: Float[Array, "*batch"],
    mask: Bool[Array, "*batch"] | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    every = jnp.broadcast_to(targets[..., None], parameters.mean.shape)
    logs = jax.nn.log_softmax(parameters.logits, axis=-1) + log_density(parameters.mean, parameters.variance, every)
    return reduce(-jax.nn.logsumexp(logs, axis=-1), reduction, mask)
