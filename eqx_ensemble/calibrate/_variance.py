from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._boundary import FiniteTargets, RowWeights, Samples, Variances, Weights, array_function, mean_of_rows
from .._brief import brief_doc
from .._check import as_column, concrete, value_error
from ..combine import Gaussian
from ._pool import Pool, Pooling


class Variance(eqx.Module):
    """Fitted variance scaling.

    **Attributes:**

    - `scale`: the factor of the variances, `(groups,)`; above 1 for overconfident predictions.
    - `pooling`: that of the fit.
    """

    scale: Float[Array, " groups"]
    pooling: Pooling

    __pdoc__ = brief_doc

    @array_function
    def __call__(self, mean: Samples, variance: Variances) -> Gaussian:
        """Means and calibrated variances, `(groups, *batch)`, as `.mean` and `.variance`."""
        means, variances = self.pooling.moments(mean, variance)
        return Gaussian(means, variances * as_column(self.scale, means.ndim).astype(means.dtype))


def _finish(out: Variance, _: dict[str, Any]) -> Variance:
    host = concrete(out.scale)
    if host is not None and (wrong := ~(np.isfinite(host) & (host > 0))).any():
        first = int(np.argmax(wrong))
        whose = f"member {first}: " if out.pooling.pool == "members" else ""
        fix = "Exclude members by `weights`, and rows by `row_weights`. Or are the targets the predictions themselves?"
        got = f"{whose}the factor would be {host[first]}"
        raise value_error("finite means and variances, and targets that differ from the predicted means", got, fix)
    return out


@array_function(finish=_finish)
def variance(
    mean: Samples,
    variance: Variances,
    targets: FiniteTargets,
    *,
    pool: Pool,
    weights: Weights = None,
    row_weights: RowWeights = None,
) -> Variance:
    r"""Variance scaling: variances are multiplied by a factor, fitted to held-out targets by maximum likelihood.

    For a Gaussian, the factor is the mean of $(y - \mu)^2 / \sigma^2$ over all entries. Means are unchanged. For one
    factor per output, fit each output separately.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`, of one shape, for rows that the members were not trained on. Variances
        above zero.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `pool`: `"members"` fits one factor per member; combine them afterwards. `"mixture"` first combines the members by
        [`eqx_ensemble.combine.gaussian`][], whose variance includes their disagreement.
    - `weights`, `row_weights`: as for [`eqx_ensemble.calibrate.temperature`][].

    **Returns:**

    [`eqx_ensemble.calibrate.Variance`][].

    **Raises:**

    - `ValueError` for variances that are not positive, and targets that all equal their means.

    ```python
    mean, variance, targets = jnp.zeros((1, 2)), jnp.ones((1, 2)), jnp.array([2.0, -2.0])
    fitted = ee.calibrate.variance(mean, variance, targets, pool="mixture")
    fitted(mean, variance).variance  # [[4.0, 4.0]]
    ```

    ??? cite
        [Laves et al. 2020](https://arxiv.org/abs/2104.12376)
    """
    pooling = Pooling(weights, pool, jnp.shape(mean)[0])
    means, variances = pooling.moments(mean, variance)
    errors = (targets[None] - means) ** 2 / variances
    scale = jax.vmap(lambda of_group: mean_of_rows(of_group, row_weights))(errors)
    return Variance(scale, pooling)
