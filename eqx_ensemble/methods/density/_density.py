import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from ..._check import (
    check_array,
    check_counted_rows,
    check_entries,
    check_fitted_members,
    check_flag,
    check_number,
    check_positive_int,
    check_values,
    concrete,
    value_error,
)

# Class means and Cholesky factors of covariances, for one member.


def centre_rows(
    features: Float[Array, "batch hidden"], counted: Float[Array, " batch"]
) -> tuple[Float[Array, "batch hidden"], Float[Array, " hidden"]]:
    """Deviations from the mean of the rows that count, and this mean; avoids cancellation for large offsets."""
    share = counted / jnp.sum(counted)
    rough = share @ features
    away = features - rough[None]
    return away - (share @ away)[None], rough + share @ away


def class_means(
    deviations: Float[Array, "batch hidden"], member_of: Float[Array, "batch classes"]
) -> Float[Array, "classes hidden"]:
    """The mean of each class."""
    return (member_of / jnp.sum(member_of, axis=0, keepdims=True)).T @ deviations


def one_hot_rows(
    labels: Integer[Array, " batch"], counted: Bool[Array, " batch"] | None, num_classes: int, dtype: jnp.dtype
) -> Float[Array, "batch classes"]:
    """One-hot labels; ignored rows are all zero."""
    found = jax.nn.one_hot(labels, num_classes, dtype=dtype)
    return found if counted is None else jnp.where(counted[:, None], found, 0)


def factor(
    residuals: Float[Array, "batch hidden"],
    counted: Float[Array, " batch"],
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


def squared_distance(
    away: Float[Array, "batch hidden"], lower: Float[Array, "hidden hidden"]
) -> Float[Array, " batch"]:
    """Squared Mahalanobis distance from zero."""
    return jnp.sum(solve_triangular(lower, away.T, lower=True) ** 2, axis=0)


def check_rows(
    features: Any, labels: Any, num_classes: Any, row_weights: Any
) -> tuple[Array, Float[Array, "batch classes"]]:
    """The features, and one-hot labels of rows that count.

    Raises unless features are `(members, batch, hidden)` and finite, and labels integers below `num_classes`, where
    rows count (if concrete): a label out of range would be a row that is ignored.
    """
    array = check_values("features", features)
    if array.ndim != 3 or 0 in array.shape:
        fix = "Flatten what is not one row of numbers: `features.reshape(members, batch, -1)`."
        raise value_error("`features` of shape (members, batch, hidden)", f"got shape {array.shape}", fix)
    rows = check_counted_rows(row_weights, array.shape[1:2])
    fix = "Leave members that diverged out, and rows with NaN by `row_weights`."
    check_entries("finite `features`", array, lambda host: ~np.isfinite(host), fix, rows.known_along(2))
    known = check_array("labels", labels)
    if not jnp.issubdtype(known.dtype, jnp.integer) or known.shape != array.shape[1:2]:
        got = f"expected integers {array.shape[1:2]}, got {known.dtype} of shape {known.shape}"
        raise value_error("one label per row of the features", got, "One-hot labels? `jnp.argmax(labels, axis=-1)`.")
    count = check_positive_int(num_classes, "num_classes")
    fix = "Count classes from 0; leave rows without a class out by `row_weights`."
    check_entries(f"labels from 0 to {count - 1}", labels, lambda host: (host < 0) | (host >= count), fix, rows)
    one_hot = one_hot_rows(rows.blank(known.astype(jnp.int32)), rows.counted, count, array.dtype)
    return rows.blank(array, before=1), one_hot


def check_factors(factors: Array) -> None:
    """Raises for singular covariances of any member or class (if concrete)."""
    host = concrete(factors)
    if host is not None and not np.isfinite(host).all():
        wrong = ~np.isfinite(host).all(axis=(-2, -1))
        member = int(np.argwhere(wrong)[0][0])
        fix = "Constant hidden units, or classes of few rows? Pass a (larger) `ridge`, or leave them out."
        raise value_error("covariances that are not singular", f"got one of member {member}", fix)


def check_new_features(features: Any, centre: Array) -> Array:
    """Raises unless features belong to the fitted members and have as many hidden units. Returns them."""
    array = check_values("features", features)
    check_fitted_members(centre.shape[0], array.shape[0])
    if array.ndim != 3 or array.shape[2] != centre.shape[1]:
        got = f"expected (members, batch, hidden) with hidden {centre.shape[1]}, got {array.shape}"
        raise value_error("features like those that it was fitted on", got, "Take the same layer.")
    return array


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

    def __call__(self, features: Float[ArrayLike, "members batch hidden"]) -> Float[Array, "members batch"]:
        """The log-density under each member, in nats; lower is more unusual."""
        checked = check_new_features(features, self.centre)
        return jax.nn.logsumexp(_log_joint(self, checked), axis=1)

    def log_joint(self, features: Float[ArrayLike, "members batch hidden"]) -> Float[Array, "members classes batch"]:
        """The log joint density of features and class; its softmax over classes is the class posterior."""
        return _log_joint(self, check_new_features(features, self.centre))


def gaussian_discriminant(
    features: Float[ArrayLike, "members batch hidden"],
    labels: Integer[ArrayLike, " batch"],
    *,
    num_classes: int,
    ridge: float | int = 0.0,
    row_weights: Bool[ArrayLike, " batch"] | Real[ArrayLike, " batch"] | None = None,
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
    checked, counted = check_rows(features, labels, num_classes, row_weights)
    level = jnp.asarray(check_number(ridge, "ridge", least=0), checked.dtype)
    centre, means, factors = jax.vmap(lambda x: _fit_discriminant(x, counted, level))(checked)
    check_factors(factors)
    counts = jnp.sum(counted, axis=0)
    return GaussianDiscriminant(centre, means, factors, jnp.log(counts / jnp.sum(counts)))


@jax.jit
def _fit_discriminant(features: Array, counted: Array, ridge: Array) -> tuple[Array, Array, Array]:
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

    def __call__(
        self, features: Float[ArrayLike, "members batch hidden"], *, relative: bool = True
    ) -> Float[Array, "members batch"]:
        """The squared distance to the nearest class, if `relative` minus that under the Gaussian of all rows.

        Higher is more unusual.
        """
        check_flag(relative, "relative")
        nearest, background = _distances(self, check_new_features(features, self.centre))
        return nearest - background if relative else nearest


def mahalanobis(
    features: Float[ArrayLike, "members batch hidden"],
    labels: Integer[ArrayLike, " batch"],
    *,
    num_classes: int,
    ridge: float | int = 0.0,
    row_weights: Bool[ArrayLike, " batch"] | Real[ArrayLike, " batch"] | None = None,
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
    checked, counted = check_rows(features, labels, num_classes, row_weights)
    level = jnp.asarray(check_number(ridge, "ridge", least=0), checked.dtype)
    fitted = jax.vmap(lambda x: _fit(x, counted, level))(checked)
    check_factors(jnp.stack(fitted[2:], axis=1))
    return Mahalanobis(*fitted)


@jax.jit
def _fit(features: Array, counted: Array, ridge: Array) -> tuple[Array, Array, Array, Array]:
    """The centre, means and factors of one member."""
    rows = jnp.sum(counted, axis=1)
    deviations, centre = centre_rows(features, rows)
    means = class_means(deviations, counted)
    within = deviations - counted @ means
    own = lambda residuals: factor(residuals, rows, 0, ridge, jnp.max(jnp.abs(features), axis=0))
    return centre, means, own(within), own(deviations)


@jax.jit
def _distances(fitted: Mahalanobis, features: Array) -> tuple[Array, Array]:
    def of_member(features: Array, centre: Array, means: Array, within: Array, background: Array) -> tuple:
        away = features - centre[None]
        every = jax.lax.map(lambda mean: squared_distance(away - mean[None], within), means)
        return jnp.min(every, axis=0), squared_distance(away, background)

    return jax.vmap(of_member)(features, fitted.centre, fitted.means, fitted.factor, fitted.background)
