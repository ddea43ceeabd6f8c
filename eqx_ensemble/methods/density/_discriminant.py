import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer

from ..._weighting import blank_masked
from ._check import check_classes, check_factors, check_features, check_new_features, check_ridge
from ._moments import centre_rows, class_means, factor, one_hot_rows, squared_distance


class GaussianDiscriminant(eqx.Module):
    """A fitted Gaussian per class over the hidden units of each member; call it on features of the same members.

    **Attributes:**

    - `centre`: `(members, hidden)`, the mean of all rows.
    - `means`: `(members, classes, hidden)`, the class means relative to `centre`.
    - `factors`: `(members, classes, hidden, hidden)`, lower Cholesky factors of the covariances.
    - `log_priors`: `(classes,)`, the logarithms of the class frequencies.
    """

    centre: Float[Array, "members hidden"]
    means: Float[Array, "members classes hidden"]
    factors: Float[Array, "members classes hidden hidden"]
    log_priors: Float[Array, " classes"]

    def __call__(self, features: Float[ArrayLike, "members batch hidden"]) -> Float[Array, "members batch"]:
        """The log-density under each member, in nats; lower is more unusual."""
        checked = check_new_features("methods.density.GaussianDiscriminant", features, self.centre)
        return jax.nn.logsumexp(_log_joint(self, checked), axis=1)

    def log_joint(self, features: Float[ArrayLike, "members batch hidden"]) -> Float[Array, "members classes batch"]:
        """The log joint density of features and class; its softmax over classes is the class posterior."""
        return _log_joint(self, check_new_features("methods.density.GaussianDiscriminant", features, self.centre))


def gaussian_discriminant(
    features: Float[ArrayLike, "members batch hidden"],
    labels: Integer[ArrayLike, " batch"],
    *,
    num_classes: int,
    ridge: float | int = 0.0,
    mask: Bool[ArrayLike, " batch"] | None = None,
) -> GaussianDiscriminant:
    r"""Fits a Gaussian per class to the hidden units of each member: Gaussian discriminant analysis, as in DDU.

    The density of a row is $\sum_c \pi_c\, \mathcal{N}(h; \mu_c, \Sigma_c)$ with the class frequencies, means and
    covariances (`ddof=1`). Rows unlike the training data have a low density, even where the softmax is confident. Each
    member has its own density; combine their log-densities with [`eqx_ensemble.combine.log_mixture`][]. DDU trains the
    network with bounded spectral norms; without a bound, rows far from the training data may have similar hidden units.

    **Arguments:**

    - `features`: inputs of the last layer for the training rows, `(members, batch, hidden)`, from
        [`eqx_ensemble.predict`][] with `fn`.
    - `labels`: integers `(batch,)` from 0 to classes - 1.
    - `num_classes`: the number of classes. Each needs at least two rows, and without `ridge` more rows than hidden
        units.
    - `ridge`: added to the variances. Hidden units that are constant in a class, such as inactive ReLU units, need a
        positive ridge.
    - `mask`: booleans `(batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:** [`eqx_ensemble.methods.density.GaussianDiscriminant`][].

    **Raises:** `TypeError` or `ValueError` for inconsistent arguments, a class with fewer than two rows, and singular
    covariances (where concrete; otherwise the result is NaN).

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 4, 1, key=key), 4, key=key)
    hidden = lambda model, x: jnp.tanh(model.layers[0](x))
    x = jax.random.normal(key, (100, 3))
    features = ee.predict(ensemble, x, fn=hidden)
    density = ee.methods.density.gaussian_discriminant(features, jnp.arange(100) % 2, num_classes=2)
    density(ee.predict(ensemble, 3 * x, fn=hidden)).shape  # (4, 100)
    ```

    ??? cite
        [Deep Deterministic Uncertainty: A New Simple Baseline](https://arxiv.org/abs/2102.11582), Mukhoti et al., 2023.
    """
    name = "methods.density.gaussian_discriminant"
    checked, kept = check_features(name, features, mask)
    known = check_classes(name, labels, checked, num_classes, mask)
    level = check_ridge(name, ridge, checked.dtype)
    counted = one_hot_rows(blank_masked(known, kept), kept, num_classes, checked.dtype)
    fit_member = lambda x: _fit(x, counted, level)
    centre, means, factors = jax.vmap(fit_member)(blank_masked(checked, kept, before=1))
    check_factors(name, factors)
    counts = jnp.sum(counted, axis=0)
    return GaussianDiscriminant(centre, means, factors, jnp.log(counts / jnp.sum(counts)))


@jax.jit
def _fit(features: Array, counted: Array, ridge: Array) -> tuple[Array, Array, Array]:
    """The centre, means and factors of one member."""
    deviations, centre = centre_rows(features, jnp.sum(counted, axis=1))
    means = class_means(deviations, counted)
    largest = jnp.max(jnp.abs(features), axis=0)
    one = lambda of: factor(deviations - of[0][None], of[1], 1, ridge, largest)
    return centre, means, jax.lax.map(one, (means, counted.T))


@jax.jit
def _log_joint(fitted: GaussianDiscriminant, features: Array) -> Float[Array, "members classes batch"]:
    def of_class(away: Array, mean: Array, lower: Array, log_prior: Array) -> Array:
        half_log_det = jnp.sum(jnp.log(jnp.diagonal(lower)))
        constant = log_prior - half_log_det - lower.shape[0] / 2 * math.log(2 * math.pi)
        return constant - squared_distance(away - mean[None], lower) / 2

    def of_member(features: Array, centre: Array, means: Array, factors: Array) -> Array:
        away = features - centre[None]
        return jax.lax.map(lambda of: of_class(away, *of), (means, factors, fitted.log_priors))

    return jax.vmap(of_member)(features, fitted.centre, fitted.means, fitted.factors)
