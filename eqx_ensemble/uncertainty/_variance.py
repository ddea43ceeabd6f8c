from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from .._brief import brief_repr
from .._check import (
    check_array,
    check_entries,
    check_floating,
    check_labels,
    check_logits,
    check_moments,
    check_positive_scalar,
    check_regression,
    check_row_weights,
    check_weights,
    concrete,
    first_text,
    promote,
    value_error,
)
from .._combination import by_rows, takes_pair
from .._weighting import at_label, blank_unweighted, is_class, known_mean, moments, weighted_mean


def check_temperature(temperature: ArrayLike, dtype: jnp.dtype) -> Array:
    """Raises unless the temperature is a positive scalar (where concrete). Returns it as an array."""
    fix = "Logits are divided by it; 1 leaves them unchanged."
    return check_positive_scalar("temperature", temperature, dtype, fix=fix)


def check_levels(levels: ArrayLike, dtype: jnp.dtype, *, ends: bool) -> tuple[Array, Array]:
    """Raises unless `levels` are valid; `ends` allows 0 and 1. Returns the levels and their distances to one."""
    array = check_array("levels", levels)
    if array.ndim > 1:
        raise value_error("`levels` as a number or `(levels,)`", f"got shape {array.shape}", "Write 90 % as 0.9.")
    host = concrete(levels)
    if host is None:
        return array.astype(dtype), 1 - array.astype(dtype)
    host = np.asarray(host, np.float64)
    inside = (0 <= host) & (host <= 1) if ends else (0 < host) & (host < 1)
    if not inside.all():
        words = "`levels` from 0 to 1" if ends else "`levels` between 0 and 1"
        raise value_error(words, first_text(host, ~inside), "Write 90 % as 0.9.")
    # The distance to one is computed in float64, because float32 rounds a level such as 1 - 1e-9 to one.
    return jnp.asarray(host, dtype), jnp.asarray(1 - host, dtype)


def check_rows_of_members(
    argument: str, values: ArrayLike, row_weights: ArrayLike | None, *, binary: bool = False
) -> tuple[Array, Array]:
    """Raises for invalid values; `binary` allows 0, 1 and NaN only. Returns `(members, rows)` and row weights."""
    array = check_array(argument, values)
    if binary and not jnp.issubdtype(array.dtype, jnp.inexact):  # booleans, and integers 0 and 1
        array = array.astype(jnp.float32)
    array = check_floating(argument, array)
    if array.ndim < 2 or array.shape[0] < 1:
        raise value_error(
            f"`{argument}` of shape (members, *batch)", f"got shape {array.shape}", "The members axis comes first."
        )
    (array,) = promote(array)
    rows = check_row_weights(row_weights, array.shape[1:], array.dtype)
    if binary and (host := concrete(values)) is not None:
        fix = "They are `scores.per_member(scores.accuracy, logits, labels, reduction='none')`."
        is_wrong = lambda exact: ~np.isin(exact, (0, 1)) & ~np.isnan(exact)
        check_entries(f"zeros and ones in `{argument}`", np.asarray(host, np.float64), is_wrong, fix, rows)
    own = jnp.ones(array.shape[1:], array.dtype) if rows.weights is None else rows.weights.astype(array.dtype)
    return jnp.reshape(rows.blank(array, before=1), (array.shape[0], -1)), jnp.ravel(own)


class Decomposition(NamedTuple):
    """Uncertainty in two parts, `total` = `aleatoric` + `epistemic`, all of the same shape.

    Aleatoric uncertainty is the noise that members predict; epistemic uncertainty is the disagreement between members,
    which more data would reduce.
    """

    total: Float[Array, "..."]
    aleatoric: Float[Array, "..."]
    epistemic: Float[Array, "..."]

    __repr__ = brief_repr


class Ambiguity(NamedTuple):
    """The loss of the ensemble in two parts, `ensemble` = `members` - `ambiguity`, all of the same shape.

    `members` is the mean loss of the members, and `ambiguity`, never negative, the gain from their diversity.
    """

    ensemble: Float[Array, "..."]
    members: Float[Array, "..."]
    ambiguity: Float[Array, "..."]

    __repr__ = brief_repr


def decompose_squared_error(
    predictions: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Ambiguity:
    r"""The squared error of the ensemble mean: the mean squared error of the members minus their ambiguity.

    With $\bar f = \sum_m w_m f_m$: $(\bar f - y)^2 = \sum_m w_m (f_m - y)^2 - \sum_m w_m (f_m - \bar f)^2$.

    **Arguments:**

    - `predictions`, `targets`: `(members, *batch)` and `(*batch,)`, without broadcasting.
    - `weights`: over members, `(members,)`.

    **Returns:**

    [`eqx_ensemble.uncertainty.Ambiguity`][] of arrays `(*batch,)`.

    ```python
    parts = ee.uncertainty.decompose_squared_error(
        jnp.array([[1.0], [3.0]]), jnp.array([1.0])
    )
    parts.ensemble, parts.members, parts.ambiguity  # [1.0], [2.0], [1.0]
    ```

    ??? cite
        [Krogh and Vedelsby
        1994](https://proceedings.neurips.cc/paper/1994/hash/b8c37e33defde51cf91e1e03e51657da-Abstract.html)
    """
    predicted, observed = check_regression(targets, members=True, predictions=predictions)
    convex = check_weights(weights, predicted.shape[0], predicted.dtype)
    ensemble, ambiguity = by_rows(_squared_error, predicted, observed, convex)
    return Ambiguity(ensemble, ensemble + ambiguity, ambiguity)


def decompose_nll(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Ambiguity:
    r"""The cross-entropy of the mean logits: the mean cross-entropy of the members minus their ambiguity.

    With $q$ the normalised geometric mean of the members, [`eqx_ensemble.combine.mean_logits`][]: $-\log q(y) = -\sum_m
    w_m \log p_m(y) - \sum_m w_m \mathrm{KL}(q \parallel p_m)$. The ambiguity does not depend on the label; the gain of
    [`eqx_ensemble.combine.mixture`][] does.

    **Arguments:**

    - `logits`, `labels`: `(members, *batch, classes)`, and integers `(*batch,)` from 0 to classes - 1. While tracing, a
        label out of range makes its row NaN.
    - `weights`: over members, `(members,)`.

    **Returns:**

    [`eqx_ensemble.uncertainty.Ambiguity`][] of arrays `(*batch,)`.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]], [[0.1, 0.9]]]))
    parts = ee.uncertainty.decompose_nll(logits, jnp.array([0]))
    parts.ensemble, parts.members, parts.ambiguity  # log(2) = 0.693, 1.204, 0.511
    ```

    ??? cite
        [Wood et al. 2023](https://jmlr.org/papers/v24/23-0041.html)
    """
    checked = check_logits(logits)
    targets = check_labels(labels, checked)
    convex = check_weights(weights, checked.shape[0], checked.dtype)
    ensemble, ambiguity = by_rows(_nll, checked, targets, convex, event_ndim=1)
    return Ambiguity(ensemble, ensemble + ambiguity, ambiguity)


def _squared_error(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    # Errors, not predictions: a large common offset cancels before squaring.
    error, ambiguity = moments(blank_unweighted(predictions - targets[None], weights), weights)
    return error**2, ambiguity


def _nll(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, " members"] | None,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    logs = jax.nn.log_softmax(blank_unweighted(logits, weights), axis=-1)
    absent = logs == -jnp.inf
    pooled = jnp.where(jnp.any(absent, axis=0), -jnp.inf, weighted_mean(jnp.where(absent, 0, logs), weights))
    pooled = jax.nn.log_softmax(pooled, axis=-1)
    ambiguity = weighted_mean(_divergence_to(pooled[None], logs), weights)
    return -at_label(pooled, labels), jnp.where(is_class(labels, logs.shape[-1]), ambiguity, jnp.nan)


def _divergence_to(
    pooled: Float[Array, "1 *batch classes"], logs: Float[Array, "members *batch classes"]
) -> Float[Array, " members *batch"]:
    r"""KL divergence of the pool $q$ from each member, $\sum_c q_c (\delta_c + e^{-\delta_c} - 1)$.

    Here $\delta_c = \log q_c - \log p_c$: as both sum to one, this equals $\sum_c q_c \delta_c$, but no term is
    negative.
    """
    gone = jnp.broadcast_to(pooled == -jnp.inf, logs.shape)  # where q is zero the term is p
    delta = jnp.where(gone, 0, jnp.broadcast_to(pooled, logs.shape)) - jnp.where(gone, 0, logs)
    near = delta > -1
    small = jnp.where(near, delta, 0)
    q, p = jnp.exp(pooled), jnp.exp(logs)
    terms = jnp.where(near, q * jnp.maximum(small + jnp.expm1(-small), 0), q * (delta - 1) + p)
    return jnp.sum(jnp.where(gone, p, terms), axis=-1)


@takes_pair
def decompose_variance(
    mean: Float[ArrayLike, "members ..."],
    variance: Float[ArrayLike, "members ..."],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
) -> Decomposition:
    r"""The variance of the mixture of the members, split by the law of total variance.

    `aleatoric` is the mean of the members' variances, $\sum_m w_m \sigma_m^2$; `epistemic` is the variance of their
    means, $\sum_m w_m (\mu_m - \mu)^2$ (ddof 0); `total` is the variance of [`eqx_ensemble.combine.gaussian`][].

    **Arguments:**

    - `mean`, `variance`: `(members, ...)`. For point predictions pass `jnp.zeros_like(mean)`; for class probabilities
        `p` pass `p` and `p * (1 - p)`, and sum the parts over classes.
    - `weights`: over members, `(members,)` or `(members, *rows)`.

    **Returns:**

    [`eqx_ensemble.uncertainty.Decomposition`][] of arrays of the shape of one member's mean.

    ```python
    parts = ee.uncertainty.decompose_variance(
        jnp.array([[1.0], [3.0]]), jnp.array([[0.5], [0.7]])
    )
    parts.total, parts.aleatoric, parts.epistemic  # [1.6], [0.6], [1.0]
    ```

    ??? cite
        [Depeweg et al. 2018](https://arxiv.org/abs/1710.07283)
    """
    means, variances = check_moments(mean, variance, weights=weights)
    convex = check_weights(weights, means.shape[0], means.dtype, shape=means.shape[1:])
    aleatoric, epistemic = by_rows(_parts, (means, variances), (), convex)
    return Decomposition(aleatoric + epistemic, aleatoric, epistemic)


def _parts(
    pair: tuple[Array, Array], _: tuple, weights: Float[Array, "members ..."] | None
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    mean, variance = pair
    return known_mean(variance, weights), moments(blank_unweighted(mean, weights), weights)[1]
