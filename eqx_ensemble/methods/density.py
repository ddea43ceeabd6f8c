"""Densities of hidden units: out-of-distribution scores of trained members, without any change of their training."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from .._boundary import array_function, kinds
from .._check import concrete, value_error

__all__ = ["GaussianDiscriminant", "Mahalanobis", "gaussian_discriminant", "mahalanobis"]


class GaussianDiscriminant(eqx.Module):
    """A Gaussian per class over the hidden units of each member; call it on features of the same members.

    **Attributes:**

    - `centre`: `(members, hidden)`, the mean of all rows.
    - `means`: `(members, classes, hidden)`, relative to `centre`.
    - `factors`: `(members, classes, hidden, hidden)`, lower Cholesky factors of the covariances.
    - `log_priors`: `(classes,)`, the logarithms of the class frequencies.
    """

    centre: Float[Array, "members hidden"]
    means: Float[Array, "members classes hidden"]
    factors: Float[Array, "members classes hidden hidden"]
    log_priors: Float[Array, " classes"]

    @array_function
    def __call__(self, features: kinds.Hidden) -> Float[Array, "members rows"]:
        """The log-density under each member, in nats; lower is more unusual."""
        return jax.nn.logsumexp(_log_joint(self, features), axis=1)

    @array_function
    def log_joint(self, features: kinds.Hidden) -> Float[Array, "members classes rows"]:
        """The log joint density of features and class; its softmax over classes is the class posterior."""
        return _log_joint(self, features)


class Mahalanobis(eqx.Module):
    """Mahalanobis distances in the hidden units of each member; call it on features of the same members.

    **Attributes:**

    - `centre`: `(members, hidden)`, the mean of all rows.
    - `means`: `(members, classes, hidden)`, relative to `centre`.
    - `factor`: `(members, hidden, hidden)`, the lower Cholesky factor of the covariance within classes.
    - `background`: `(members, hidden, hidden)`, that of the covariance of all rows.
    """

    centre: Float[Array, "members hidden"]
    means: Float[Array, "members classes hidden"]
    factor: Float[Array, "members hidden hidden"]
    background: Float[Array, "members hidden hidden"]

    @array_function
    def __call__(self, features: kinds.Hidden, *, relative: bool = True) -> Float[Array, "members rows"]:
        """The squared distance to the nearest class; if `relative`, minus the one under the Gaussian of all rows.

        Higher is more unusual.
        """

        def of_member(away: Array, means: Array, within: Array, background: Array) -> Array:
            nearest = jnp.min(jax.lax.map(lambda mean: _squared_distance(away - mean[None], within), means), axis=0)
            return nearest - _squared_distance(away, background) if relative else nearest

        return jax.vmap(of_member)(_away(features, self.centre), self.means, self.factor, self.background)


def _finish(fitted: Any, given: dict[str, Any]) -> Any:
    """Raises for singular covariances, if they can be read."""
    factors = (fitted.factors,) if isinstance(fitted, GaussianDiscriminant) else (fitted.factor, fitted.background)
    for host in map(concrete, (fitted.means, *factors)):  # a class without rows has no mean
        if host is not None and not np.isfinite(host).all():
            member = np.argwhere(~np.isfinite(host))[0][0]
            fix = "Constant hidden units, or classes with few rows? Pass a (larger) `ridge`, or leave them out."
            raise value_error("covariances that are not singular", f"got a singular one for member {member}", fix)
    return fitted


@array_function(finish=_finish)
def gaussian_discriminant(
    features: kinds.FiniteHidden,
    labels: kinds.CountedLabels,
    *,
    num_classes: int,
    ridge: kinds.Amount = 0.0,
    row_weights: kinds.RowFilter = None,
) -> GaussianDiscriminant:
    r"""Fits a Gaussian per class to the hidden units of each member: Gaussian discriminant analysis, as in DDU.

    The density of a row is $\sum_c \pi_c\, \mathcal{N}(h; \mu_c, \Sigma_c)$ (`ddof=1`). Combine members with
    [`eqx_ensemble.combine.log_mixture`][].

    **Arguments:**

    - `features`: inputs of the last layer for the training rows, `(members, batch, hidden)`, from
        [`eqx_ensemble.predict`][] with `fn`.
    - `labels`: integers `(batch,)`.
    - `num_classes`: each class needs two rows, and without `ridge` more rows than hidden units.
    - `ridge`: added to the variances; positive for hidden units that are constant in a class, such as inactive ReLUs.
    - `row_weights`: booleans `(batch,)`, or 0 and 1; rows of `False` or 0 are ignored, even if NaN.

    **Returns:** [`eqx_ensemble.methods.density.GaussianDiscriminant`][].

    **Raises:** `ValueError` for singular covariances (where concrete; otherwise the result is NaN).

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 4, 1, key=key), 4, key=key)
    hidden = lambda model, x: jnp.tanh(model.layers[0](x))
    x = jax.random.normal(key, (100, 3))
    features = ee.predict(ensemble, x, fn=hidden)
    density = ee.methods.density.gaussian_discriminant(features, jnp.arange(100) % 2, num_classes=2)
    density(ee.predict(ensemble, 3 * x, fn=hidden)).shape  # (4, 100)
    ```

    ??? cite
        [Mukhoti et al. 2023](https://arxiv.org/abs/2102.11582)
    """
    one_hot = _one_hot(labels, row_weights, num_classes, features.dtype)

    def of_member(features: Array) -> tuple[Array, Array, Array]:
        centre, deviations, means = _centre(features, one_hot)
        largest = jnp.max(jnp.abs(features), axis=0)
        of_class = lambda of: _factor(deviations - of[0][None], of[1], 1, ridge, largest)
        return centre, means, jax.lax.map(of_class, (means, one_hot.T))

    counts = jnp.sum(one_hot, axis=0)
    return GaussianDiscriminant(*jax.vmap(of_member)(features), jnp.log(counts / jnp.sum(counts)))


@array_function(finish=_finish)
def mahalanobis(
    features: kinds.FiniteHidden,
    labels: kinds.CountedLabels,
    *,
    num_classes: int,
    ridge: kinds.Amount = 0.0,
    row_weights: kinds.RowFilter = None,
) -> Mahalanobis:
    r"""Fits class means and a common covariance to the hidden units of each member, for Mahalanobis distances.

    The squared distance of a row is $\min_c\, (h - \mu_c)^\top \Sigma^{-1} (h - \mu_c)$ (`ddof=0`). The relative
    distance subtracts that under mean and covariance of all rows, which detects near-out-of-distribution rows.

    **Arguments:**

    - `features`, `labels`, `num_classes`, `ridge`, `row_weights`: as for
        [`eqx_ensemble.methods.density.gaussian_discriminant`][]. Without `ridge` it needs as many rows as hidden units
        plus classes.

    **Returns:** [`eqx_ensemble.methods.density.Mahalanobis`][].

    ```python
    features = jax.random.normal(key, (4, 100, 5))  # (members, batch, hidden)
    distance = ee.methods.density.mahalanobis(features, jnp.arange(100) % 2, num_classes=2)
    distance(3 * features).shape  # (4, 100)
    ```

    ??? cite
        [Lee et al. 2018](https://arxiv.org/abs/1807.03888); the relative distance: [Ren et al.
        2021](https://arxiv.org/abs/2106.09022)
    """
    one_hot = _one_hot(labels, row_weights, num_classes, features.dtype)

    def of_member(features: Array) -> tuple[Array, Array, Array, Array]:
        centre, deviations, means = _centre(features, one_hot)
        largest, counted = jnp.max(jnp.abs(features), axis=0), jnp.sum(one_hot, axis=1)
        own = lambda residuals: _factor(residuals, counted, 0, ridge, largest)
        return centre, means, own(deviations - one_hot @ means), own(deviations)

    return Mahalanobis(*jax.vmap(of_member)(features))


def _one_hot(labels: Array, row_weights: Array | None, num_classes: int, dtype: Any) -> Float[Array, "rows classes"]:
    """One-hot labels; ignored rows are all zero."""
    found = jax.nn.one_hot(labels, num_classes, dtype=dtype)
    return found if row_weights is None else jnp.where(row_weights[:, None], found, 0)


def _centre(
    features: Float[Array, "rows hidden"], one_hot: Float[Array, "rows classes"]
) -> tuple[Float[Array, " hidden"], Float[Array, "rows hidden"], Float[Array, "classes hidden"]]:
    """The mean of the rows that count, deviations from it, and the mean deviation of each class.

    Avoids cancellation for large offsets.
    """
    counted = jnp.sum(one_hot, axis=1)
    share = counted / jnp.sum(counted)
    rough = share @ features
    away = features - rough[None]
    deviations = away - (share @ away)[None]
    of_class = jnp.sum(one_hot, axis=0)
    means = (one_hot / jnp.where(of_class > 0, of_class, 1)[None]).T @ deviations
    # A class without rows has no mean; what XLA makes of 0 / 0 inside a product differs between its releases.
    means = jnp.where(of_class[:, None] > 0, means, jnp.nan)
    return rough + share @ away, deviations, means


def _factor(
    residuals: Float[Array, "rows hidden"],
    counted: Float[Array, " rows"],
    ddof: int,
    ridge: Float[Array, ""],
    largest: Float[Array, " hidden"],
) -> Float[Array, "hidden hidden"]:
    """The lower Cholesky factor of a covariance around zero, with a ridge; NaN if it is numerically singular.

    `largest` is the largest magnitude of each unit. A variance, or the residual variance of a unit given the previous
    ones, counts as zero if it is within rounding.
    """
    kept = jnp.where(counted[:, None] > 0, residuals, 0)
    covariance = kept.T @ kept / (jnp.sum(counted) - ddof)
    variances = jnp.diagonal(covariance) + ridge
    lower = jnp.linalg.cholesky(covariance + ridge * jnp.eye(covariance.shape[0], dtype=covariance.dtype))
    eps = float(jnp.finfo(lower.dtype).eps)
    known = variances > (4 * eps * largest) ** 2
    known &= jnp.diagonal(lower) ** 2 > 2 * len(lower) ** 0.5 * eps * variances
    return jnp.where(jnp.all(known), lower, jnp.nan)


def _away(features: Float[Array, "members rows hidden"], centre: Float[Array, "members hidden"]) -> Array:
    """Deviations from the centre of each member; raises for other members or layers."""
    if features.shape[::2] != centre.shape:
        got = f"expected (members, rows, hidden) = ({centre.shape[0]}, rows, {centre.shape[1]}), got {features.shape}"
        raise value_error("features like those that it was fitted on", got, "Take the same layer.")
    return features - centre[:, None]


def _log_joint(fitted: GaussianDiscriminant, features: Array) -> Float[Array, "members classes rows"]:
    def of_class(away: Array, mean: Array, lower: Array, log_prior: Array) -> Array:
        half_log_det = jnp.sum(jnp.log(jnp.diagonal(lower)))
        constant = log_prior - half_log_det - lower.shape[0] / 2 * math.log(2 * math.pi)
        return constant - _squared_distance(away - mean[None], lower) / 2

    def of_member(away: Array, means: Array, factors: Array) -> Array:
        return jax.lax.map(lambda of: of_class(away, *of), (means, factors, fitted.log_priors))

    return jax.vmap(of_member)(_away(features, fitted.centre), fitted.means, fitted.factors)


def _squared_distance(away: Float[Array, "rows hidden"], lower: Float[Array, "hidden hidden"]) -> Float[Array, " rows"]:
    """Squared Mahalanobis distance from zero."""
    return jnp.sum(solve_triangular(lower, away.T, lower=True) ** 2, axis=0)
