from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import betaln
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from ..._check import ALL_ROWS, CountedRows, check_floating_arrays, check_number, check_regression, check_row_weights
from ...scores._engine import CheckedRowWeights, Reduction, reduce
from ...uncertainty import Decomposition
from ._check import check_above, check_coefficient, check_parameters, check_raw


class NormalInverseGamma(NamedTuple):
    r"""A normal-inverse-gamma distribution over the mean and variance of a target.

    $\sigma^2 \sim \Gamma^{-1}(\alpha, \beta)$ and $\mu \sim \mathcal{N}(m, \sigma^2 / \nu)$, for each entry.

    **Attributes:**

    - `mean`: $m$, the prediction.
    - `nu`: $\nu > 0$, the number of virtual observations of the mean.
    - `alpha`: $\alpha > 1$, so that the expected variance is finite.
    - `beta`: $\beta > 0$, in the squared unit of the target.
    """

    mean: Float[Array, "..."]
    nu: Float[Array, "..."]
    alpha: Float[Array, "..."]
    beta: Float[Array, "..."]


def normal_inverse_gamma(raw: Float[ArrayLike, "*batch 4"], *, floor: float = 1e-6) -> NormalInverseGamma:
    r"""The head of evidential regression: maps four outputs of a last layer to a normal-inverse-gamma distribution.

    $m$ is the first output; $\nu$, $\alpha - 1$ and $\beta$ are the softplus of the others, plus `floor`.

    **Arguments:**

    - `raw`: `(*batch, 4)`.
    - `floor`: zero or more; a positive floor keeps variances finite. The authors use none.

    **Returns:** [`eqx_ensemble.methods.heads.NormalInverseGamma`][], four arrays `(*batch,)`.

    ```python
    ee.methods.heads.normal_inverse_gamma(jnp.zeros(4))  # 0.0, 0.693, 1.693, 0.693
    ```

    ??? cite
        [Amini et al. 2020](https://arxiv.org/abs/1910.02600)
    """
    least = check_number(floor, "floor", least=0)
    array = check_raw(raw, multiple=4, exact=True, parameters="mean, nu, alpha and beta of one target")
    mean, nu, alpha, beta = jnp.moveaxis(array, -1, 0)
    positive = lambda x: jax.nn.softplus(x) + least
    return NormalInverseGamma(mean, positive(nu), positive(alpha) + 1, positive(beta))


def decompose_evidential(parameters: NormalInverseGamma) -> Decomposition:
    r"""Decomposes the predictive variance of an evidential head, as its authors do.

    `aleatoric` is $\mathrm{E}\,\sigma^2 = \beta / (\alpha - 1)$, `epistemic` $\mathrm{Var}\,\mu = \beta / (\nu (\alpha
    - 1))$, `total` their sum, the variance of the Student t prediction.

    Penalty and initialisation decide the two parts, the data only their sum: use `epistemic` at most to rank rows.
    `ee.uncertainty.decompose_variance(parameters.mean, total)`, from disagreement, does not have this flaw.

    **Returns:** [`eqx_ensemble.uncertainty.Decomposition`][] in the squared unit of the target.

    ```python
    parameters = ee.methods.heads.NormalInverseGamma(*jnp.array([[0.0], [2.0], [3.0], [1.0]]))
    ee.methods.heads.decompose_evidential(parameters)  # 0.75 = 0.5 + 0.25
    ```

    ??? cite
        [Meinert et al. 2023](https://arxiv.org/abs/2205.10060)
    """
    check_parameters(parameters, NormalInverseGamma, "normal_inverse_gamma")
    _, nu, alpha, beta = check_floating_arrays(**parameters._asdict())
    check_ranges(parameters)
    aleatoric = beta / (alpha - 1)
    epistemic = aleatoric / nu
    return Decomposition(aleatoric + epistemic, aleatoric, epistemic)


def check_ranges(parameters: NormalInverseGamma, rows: CountedRows = ALL_ROWS) -> None:
    """Raises unless parameters of rows that count define a distribution with finite variance (if concrete)."""
    fix = "Outputs of a last layer? `methods.heads.normal_inverse_gamma` maps them to parameters."
    for argument, bound in {"nu": 0, "alpha": 1, "beta": 0}.items():
        check_above(argument, getattr(parameters, argument), bound, fix=fix, rows=rows)


def evidential_loss(
    parameters: NormalInverseGamma,
    targets: Real[ArrayLike, "*batch"],
    *,
    coefficient: Real[ArrayLike, ""] = 0.01,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of evidential regression: a negative log-likelihood, in nats, plus a penalty on evidence for wrong means.

    The likelihood is a Student t with $2 \alpha$ degrees of freedom, location $m$ and squared scale $\beta (1 + \nu) /
    (\nu \alpha)$; the penalty is $\lambda |y - m| (2 \nu + \alpha)$.

    **Arguments:**

    - `parameters`: [`eqx_ensemble.methods.heads.NormalInverseGamma`][] of arrays `(*batch,)`.
    - `targets`: `(*batch,)`.
    - `coefficient`: $\lambda$, zero or more; by default the authors' value. It depends on the unit of the targets:
        standardise them.

    ```python
    parameters = ee.methods.heads.normal_inverse_gamma(jnp.zeros((4, 4)))
    ee.methods.heads.evidential_loss(parameters, jnp.ones(4))  # 1.590
    ```

    ??? cite
        [Amini et al. 2020](https://arxiv.org/abs/1910.02600)
    """
    check_parameters(parameters, NormalInverseGamma, "normal_inverse_gamma")
    *arrays, observed = check_regression(targets, members=False, **parameters._asdict())
    rows = check_row_weights(row_weights, observed.shape, observed.dtype, reduction=reduction)
    check_ranges(parameters, rows)
    penalty = check_coefficient("coefficient", coefficient, observed.dtype)
    known = NormalInverseGamma(*(rows.blank(x, fill=2) for x in arrays))
    return _loss(known, rows.blank(observed), penalty, rows.weights, reduction)


@partial(jax.jit, static_argnames="reduction")
def _loss(
    parameters: NormalInverseGamma,
    targets: Float[Array, "*batch"],
    coefficient: Float[Array, ""],
    row_weights: CheckedRowWeights | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    mean, nu, alpha, beta = parameters
    error = targets - mean
    width = 2 * beta * (1 + 1 / nu)
    # `betaln` instead of a difference of two log-gammas, which are large for much evidence.
    likelihood = betaln(alpha, jnp.full_like(alpha, 0.5)) + 0.5 * jnp.log(width)
    likelihood += (alpha + 0.5) * jnp.log1p(error**2 / width)
    return reduce(likelihood + coefficient * jnp.abs(error) * (2 * nu + alpha), reduction, row_weights)
