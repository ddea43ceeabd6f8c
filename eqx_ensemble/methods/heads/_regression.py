from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import betaln
from jax.scipy.stats import norm
from jaxtyping import Array, Float

from ..._boundary import array_function, kinds
from ..._brief import brief_repr
from ..._check import value_error
from ..._leaves import as_column
from ..._weighting import mixture_moments
from ...combine import Gaussian
from ...uncertainty import Decomposition


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

    def __repr__(self) -> str:
        return brief_repr(self)


@array_function
def normal_inverse_gamma(raw: kinds.FourOutputs, *, floor: kinds.Amount = 1e-6) -> NormalInverseGamma:
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
    mean, nu, alpha, beta = jnp.moveaxis(raw, -1, 0)
    positive = lambda x: jax.nn.softplus(x) + floor
    return NormalInverseGamma(mean, positive(nu), positive(alpha) + 1, positive(beta))


@array_function
def decompose_evidential(
    mean: kinds.Points, nu: kinds.Evidence, alpha: kinds.Shape, beta: kinds.Evidence
) -> Decomposition:
    r"""Decomposes the predictive variance of an evidential head, as its authors do.

    `aleatoric` is $\mathrm{E}\,\sigma^2 = \beta / (\alpha - 1)$, `epistemic` $\mathrm{Var}\,\mu = \beta / (\nu (\alpha
    - 1))$, `total` their sum, the variance of the Student t prediction.

    Penalty and initialisation decide the two parts, the data only their sum: use `epistemic` at most to rank rows.
    `ee.uncertainty.decompose_variance(mean, total)`, from disagreement, does not have this flaw.

    **Arguments:**

    - `mean`, `nu`, `alpha`, `beta`: of one shape `(*batch,)`, from
        [`eqx_ensemble.methods.heads.normal_inverse_gamma`][]. The mean has no influence.

    **Returns:** [`eqx_ensemble.uncertainty.Decomposition`][] in the squared unit of the target.

    ```python
    parameters = jnp.array([[0.0], [2.0], [3.0], [1.0]])
    ee.methods.heads.decompose_evidential(*parameters)  # 0.75 = 0.5 + 0.25
    ```

    ??? cite
        [Meinert et al. 2023](https://arxiv.org/abs/2205.10060)
    """
    aleatoric = beta / (alpha - 1)
    epistemic = aleatoric / nu
    return Decomposition(aleatoric + epistemic, aleatoric, epistemic)


@array_function
def evidential_loss(
    mean: kinds.Points,
    nu: kinds.Evidence,
    alpha: kinds.Shape,
    beta: kinds.Evidence,
    targets: kinds.Targets,
    *,
    coefficient: kinds.Amount = 0.01,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of evidential regression: a negative log-likelihood, in nats, plus a penalty on evidence for wrong means.

    The likelihood is a Student t with $2 \alpha$ degrees of freedom, location $m$ and squared scale $\beta (1 + \nu) /
    (\nu \alpha)$; the penalty is $\lambda |y - m| (2 \nu + \alpha)$.

    **Arguments:**

    - `mean`, `nu`, `alpha`, `beta`: `(*batch,)`, from [`eqx_ensemble.methods.heads.normal_inverse_gamma`][].
    - `targets`: `(*batch,)`.
    - `coefficient`: $\lambda$, zero or more; by default the authors' value. It depends on the unit of the targets:
        standardise them.

    ```python
    parameters = ee.methods.heads.normal_inverse_gamma(jnp.zeros((4, 4)))
    ee.methods.heads.evidential_loss(*parameters, jnp.ones(4))  # 1.590
    ```

    ??? cite
        [Amini et al. 2020](https://arxiv.org/abs/1910.02600)
    """
    error = targets - mean
    width = 2 * beta * (1 + 1 / nu)
    # `betaln` instead of a difference of two log-gammas, which are large for much evidence.
    likelihood = betaln(alpha, jnp.full_like(alpha, 0.5)) + 0.5 * jnp.log(width)
    likelihood += (alpha + 0.5) * jnp.log1p(error**2 / width)
    return likelihood + coefficient * jnp.abs(error) * (2 * nu + alpha)


@array_function
def pinball_loss(
    quantiles: kinds.OutputPoints,
    targets: kinds.Targets,
    *,
    levels: kinds.OutputLevels,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of a head that predicts several quantiles: the mean of their pinball scores, in the unit of the target.

    $\frac1L \sum_l \max(\tau_l (y - q_l), (\tau_l - 1) (y - q_l))$. Twice its value at the levels $(l - \frac12) / L$
    approximates the CRPS.

    **Arguments:**

    - `quantiles`: `(*batch, levels)`, the unchanged outputs of a last layer.
    - `targets`: `(*batch,)`.
    - `levels`: `(levels,)`, increasing, between 0 and 1.

    ```python
    quantiles, levels = jnp.array([[0.0, 2.0, 3.0]]), jnp.array([0.1, 0.5, 0.9])
    # (0.1 * 2 + 0.5 * 0 + 0.1 * 1) / 3 = 0.1
    ee.methods.heads.pinball_loss(quantiles, jnp.array([2.0]), levels=levels)
    ```

    ??? cite
        [Koenker and Bassett 1978](https://doi.org/10.2307/1913643)
    """
    error = targets[..., None] - quantiles
    own = jnp.broadcast_to(levels, error.shape)
    return jnp.mean(jnp.where(error < 0, own - 1, own) * error, axis=-1)


@array_function
def sort_quantiles(quantiles: kinds.Outputs) -> Float[Array, "*batch levels"]:
    """Sorts predicted quantiles, which may cross. This never increases the pinball loss of a row.

    Sort predictions, not outputs during training. Combine members level by level. Two levels are an interval, for
    [`eqx_ensemble.conformal.cqr`][] and [`eqx_ensemble.scores.interval_score`][].

    **Returns:** `(*batch, levels)`, like `quantiles`, of increasing levels. A row with a NaN is NaN at every level.

    ```python
    ee.methods.heads.sort_quantiles(jnp.array([1.0, 3.0, 2.0]))  # [1.0, 2.0, 3.0]
    ```

    ??? cite
        [Chernozhukov et al. 2010](https://doi.org/10.3982/ECTA7880)
    """
    unknown = jnp.any(jnp.isnan(quantiles), axis=-1, keepdims=True)
    return jnp.where(unknown, jnp.nan, jnp.sort(quantiles, axis=-1))


class MixtureDensity(NamedTuple):
    """Parameters of a mixture of Gaussians per entry; the last axis holds the components.

    **Attributes:** `logits`, whose softmax gives the weights; `mean` and `variance`, above 0, of each component.
    """

    logits: Float[Array, "... components"]
    mean: Float[Array, "... components"]
    variance: Float[Array, "... components"]

    def __repr__(self) -> str:
        return brief_repr(self)


class MixtureComponents(NamedTuple):
    """The components of all members, as separate members with one weight per row.

    **Attributes:** `mean`, `variance`, `weights`, each `(members * components, *batch)`.
    """

    mean: Float[Array, "components ..."]
    variance: Float[Array, "components ..."]
    weights: Float[Array, "components ..."]

    def __repr__(self) -> str:
        return brief_repr(self)


@array_function
def mixture_density(raw: kinds.Outputs, *, floor: kinds.Amount = 1e-6) -> MixtureDensity:
    """The head of a mixture density network: maps the outputs of a last layer to a mixture of Gaussians.

    The first third are logits of the components, the second their means; variances are the softplus of the last third,
    plus `floor`.

    **Arguments:**

    - `raw`: `(*batch, 3 * components)`.
    - `floor`: zero or more. Without one, a component may collapse onto a target; 1e-3 is usual for standardised
        targets.

    **Returns:** [`eqx_ensemble.methods.heads.MixtureDensity`][], three arrays `(*batch, components)`.

    ```python
    # logits [0, 0], means [-1, 1], variances [0.693, 0.693]
    ee.methods.heads.mixture_density(jnp.array([0.0, 0.0, -1.0, 1.0, 0.0, 0.0]))
    ```

    ??? cite
        [Bishop 1994](https://publications.aston.ac.uk/id/eprint/373/)
    """
    if raw.shape[-1] % 3:
        fix = "The last axis holds logits, means and raw variances of the components."
        raise value_error("`raw` of shape (*batch, 3 * components)", f"got shape {raw.shape}", fix)
    logits, mean, variance = jnp.split(raw, 3, axis=-1)
    return MixtureDensity(logits, mean, jax.nn.softplus(variance) + floor)


@array_function
def mixture_density_moments(
    logits: kinds.OutputLogits, mean: kinds.OutputPoints, variance: kinds.OutputVariances
) -> Gaussian:
    r"""Mean and variance of each mixture: $\sum_k \pi_k \mu_k$, and $\sum_k \pi_k (\sigma_k^2 + (\mu_k - \mu)^2)$.

    With a `members` axis they are per member, for [`eqx_ensemble.combine.gaussian`][] and
    [`eqx_ensemble.uncertainty.decompose_variance`][].

    **Arguments:**

    - `logits`, `mean`, `variance`: `(*batch, components)`, from [`eqx_ensemble.methods.heads.mixture_density`][].

    **Returns:** [`eqx_ensemble.combine.Gaussian`][], without the axis of components.

    ```python
    means = jnp.array([-1.0, 1.0])
    ee.methods.heads.mixture_density_moments(jnp.zeros(2), means, jnp.ones(2))  # mean 0, variance 2
    ```
    """
    first = lambda x: jnp.moveaxis(x, -1, 0)
    return Gaussian(*mixture_moments(first(mean), first(variance), first(jax.nn.softmax(logits, axis=-1))))


@array_function
def mixture_components(
    logits: kinds.Members, mean: kinds.Samples, variance: kinds.Variances, *, weights: kinds.Weights = None
) -> MixtureComponents:
    """The components of the mixture over all members, as Gaussian members with one weight per row.

    `ee.scores.nll_gaussian_mixture(mean, variance, targets, weights=weights)` is the score of the whole ensemble;
    [`eqx_ensemble.combine.gaussian`][] takes them too.

    **Arguments:**

    - `logits`, `mean`, `variance`: those of ALL members, `(members, *batch, components)`.
    - `weights`: weights of the members, `(members,)`, normalised to sum to 1.

    **Returns:** [`eqx_ensemble.methods.heads.MixtureComponents`][].

    ```python
    parameters = jnp.ones((3, 5, 7, 2))  # of five members
    mean, variance, weights = ee.methods.heads.mixture_components(*parameters)  # (10, 7)
    ee.scores.nll_gaussian_mixture(mean, variance, jnp.ones(7), weights=weights)  # 0.919
    ```
    """
    convex = jnp.full(len(mean), 1 / len(mean), mean.dtype) if weights is None else weights
    shares = jax.nn.softmax(logits, axis=-1) * as_column(convex, mean.ndim)
    flat = lambda x: jnp.moveaxis(x, -1, 1).reshape((-1, *x.shape[1:-1]))
    return MixtureComponents(flat(mean), flat(variance), flat(shares))


@array_function
def mixture_density_loss(
    logits: kinds.OutputLogits,
    mean: kinds.OutputPoints,
    variance: kinds.OutputVariances,
    targets: kinds.Targets,
    *,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of a mixture density network: $-\log \sum_k \pi_k \, \mathcal{N}(y; \mu_k, \sigma_k^2)$, in nats.

    For the mixture over all members see [`eqx_ensemble.methods.heads.mixture_components`][].

    **Arguments:**

    - `logits`, `mean`, `variance`: `(*batch, components)`, from [`eqx_ensemble.methods.heads.mixture_density`][].
    - `targets`: `(*batch,)`. Several outputs per row are separate entries, each with its mixture.

    ```python
    parameters = ee.methods.heads.mixture_density(jnp.zeros((4, 6)))
    ee.methods.heads.mixture_density_loss(*parameters, jnp.zeros(4))  # 0.736
    ```

    ??? cite
        [Bishop 1994](https://publications.aston.ac.uk/id/eprint/373/)
    """
    logs = jax.nn.log_softmax(logits, axis=-1) + norm.logpdf(targets[..., None], mean, jnp.sqrt(variance))
    return -jax.nn.logsumexp(logs, axis=-1)
