from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._brief import brief_doc
from .._check import RowWeightsLike, value_error
from .._weighting import class_log_odds
from ._pooling import Pool, Pooling, Rows, check_not_separable, fit_rows

# Logistic calibration of each class against the rest, shared by Platt scaling and beta calibration.


class Labels(NamedTuple):
    """One class against the rest: whether each row has this label, its weight in the mean, and the row weights."""

    hits: Bool[Array, " rows"]
    share: Float[Array, " rows"]
    weights: Float[Array, " rows"]


def each_class(
    fit: Callable[[Array, Array, Labels], Array], rows: Rows, mirror: Callable[[Array], Array]
) -> Float[Array, "groups classes params"]:
    """Calls `fit` on log-probabilities and log-odds of each class; for two classes, on the second, and mirrors it."""
    odds = class_log_odds(rows.logs)
    num_classes = rows.logs.shape[-1]
    first = 1 if num_classes == 2 else 0
    hits = rows.labels[None] == jnp.arange(first, num_classes, dtype=rows.labels.dtype)[:, None]
    of_class = lambda logs, odds, hits: fit(logs, odds, Labels(hits, rows.share, rows.weights.astype(odds.dtype)))
    of_group = jax.vmap(of_class, in_axes=(-1, -1, 0))
    found = jax.vmap(of_group, in_axes=(0, 0, None))(rows.logs[..., first:], odds[..., first:], hits)
    return jnp.concatenate([mirror(found), found], axis=1) if first else found


def along_classes(fitted: Array, logits: Array) -> Array:
    """Reshapes parameters `(groups, classes)` to broadcast with logits `(groups, *batch, classes)`."""
    if fitted.shape[-1] != logits.shape[-1]:
        got = f"expected {fitted.shape[-1]}, got {logits.shape[-1]}"
        fix = "Pass logits of the same classes, on the last axis."
        raise value_error("logits of the classes that it was fitted on", got, fix)
    return fitted.reshape(fitted.shape[0], *(1,) * (logits.ndim - 2), fitted.shape[-1])


def log_complement(logs: Float[Array, "..."], odds: Float[Array, "..."]) -> Float[Array, "..."]:
    """`-log(1 - p)` from `log(p)` and the log-odds, to machine precision."""
    small = logs < -0.6
    return jnp.where(small, -jnp.log1p(-jnp.exp(jnp.where(small, logs, -1))), odds - logs)


def normalise(margins: Float[Array, "groups *batch classes"]) -> Float[Array, "groups *batch classes"]:
    """Log-probabilities from the log-odds of each class against the rest."""
    logs = jax.nn.log_sigmoid(margins)
    return logs - jax.nn.logsumexp(logs, axis=-1, keepdims=True)


_MAX_STEPS = 100


class Regression(NamedTuple):
    """The rows of a logistic regression: features, targets from 0 to 1, and weights in the mean."""

    features: Float[Array, "rows features"]
    targets: Float[Array, " rows"]
    share: Float[Array, " rows"]


def minimise_logistic(rows: Regression, free: Bool[Array, " features"]) -> tuple[Float[Array, " features"], Array]:
    """The minimiser of the mean logistic loss, zero where not `free`, and the loss; the last feature is one.

    Newton's method from the base rate. It is differentiated as an implicit function.
    """
    params = _minimise(*jax.lax.stop_gradient((rows, free)))
    # A Newton step of length zero carries the gradient.
    grad, hessian = _derivatives(params, rows, free)
    params = params - jnp.linalg.solve(jax.lax.stop_gradient(hessian), grad - jax.lax.stop_gradient(grad))
    return params, _loss(params, rows)


def standardise(
    features: Float[Array, "rows features"], share: Float[Array, " rows"]
) -> tuple[Float[Array, "rows features"], Float[Array, " features"], Float[Array, " features"]]:
    """Features with mean zero and variance one over rows of nonzero weight, and their means and standard deviations."""
    of_row = jax.lax.stop_gradient(features), share[:, None]
    # Differences from one row are exactly zero for equal rows; differences from a mean would be rounding errors.
    first = of_row[0][jnp.argmax(share > 0)]
    mean = first + jnp.sum(jnp.where(of_row[1] > 0, (of_row[0] - first[None]) * of_row[1], 0), axis=0)
    centred = jnp.where(of_row[1] > 0, of_row[0] - mean[None], 0)
    unit = jnp.max(jnp.abs(centred), axis=0)
    unit = jnp.where(unit > 0, unit, 1)
    scale = unit * jnp.sqrt(jnp.sum((centred / unit[None]) ** 2 * of_row[1], axis=0))
    scale = jnp.where(scale > 0, scale, 1)
    return jnp.where(share[:, None] > 0, (features - mean[None]) / scale[None], 0), mean, scale


def _loss(params: Array, rows: Regression) -> Float[Array, ""]:
    margin = _dot(rows.features, params)
    of_row = rows.targets * jax.nn.softplus(-margin) + (1 - rows.targets) * jax.nn.softplus(margin)
    return jnp.sum(rows.share * of_row)


def _derivatives(params: Array, rows: Regression, free: Array) -> tuple[Array, Array]:
    """The gradient and the Hessian, damped by rounding, in the free parameters."""
    p = jax.nn.sigmoid(_dot(rows.features, params))
    grad = _dot(rows.share * (p - rows.targets), rows.features)
    weighted = rows.features * (rows.share * p * (1 - p))[:, None]
    hessian = jnp.where(free[:, None] & free[None], _dot(weighted.T, rows.features), 0)
    least = jnp.finfo(p.dtype).eps * jnp.trace(hessian) + jnp.finfo(p.dtype).tiny
    return jnp.where(free, grad, 0), hessian + jnp.diag(jnp.where(free, least, 1))


def _minimise(rows: Regression, free: Array) -> Float[Array, " features"]:
    dtype, count = rows.features.dtype, rows.features.shape[1]
    rate = jnp.clip(jnp.sum(rows.share * rows.targets), jnp.finfo(dtype).eps, 1 - jnp.finfo(dtype).eps)
    start = jnp.zeros(count, dtype).at[-1].set(jnp.log(rate) - jnp.log1p(-rate))
    lengths = 2.0 ** -jnp.arange(12, dtype=dtype)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        params, _, num_steps = carry
        grad, hessian = _derivatives(params, rows, free)
        full = jnp.linalg.solve(hessian, grad)
        tried = params[None] - lengths[:, None] * full[None]
        losses = jax.vmap(_loss, in_axes=(0, None))(tried, rows)
        best = tried[jnp.argmin(jnp.where(jnp.isnan(losses), jnp.inf, losses))]
        # Close to the minimum the loss is dominated by rounding, the gradient is not: take the full Newton step.
        new = jnp.where(jnp.dot(grad, full) < 1e-3 * _loss(params, rows), tried[0], best)
        return new, jnp.max(jnp.abs(new - params)) / (1 + jnp.max(jnp.abs(params))), num_steps + 1

    def goes_on(carry: tuple[Array, Array, Array]) -> Array:
        _, moved, num_steps = carry
        return (moved > 4 * jnp.finfo(dtype).eps) & (num_steps < _MAX_STEPS)

    params, *_ = jax.lax.while_loop(goes_on, step, (start, jnp.asarray(jnp.inf, dtype), jnp.asarray(0)))
    return params


def _dot(first: Array, second: Array) -> Array:
    return jnp.matmul(first, second, precision=jax.lax.Precision.HIGHEST)


_FACES = np.array([[True, True, True], [True, False, True], [False, True, True], [False, False, True]])
"""The faces of the feasible set: which of a, b and c are free; the others are zero."""


class Beta(eqx.Module):
    """Fitted beta calibration.

    **Attributes:**

    - `a`, `b`, `c`: `(groups, classes)`; 1, 1 and 0 are the identity.
    - `pooling`: that of the fit.
    """

    a: Float[Array, "groups classes"]
    b: Float[Array, "groups classes"]
    c: Float[Array, "groups classes"]
    pooling: Pooling

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "members *batch classes"]) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(groups, *batch, classes)`."""
        logs = self.pooling.logs(logits)
        a, b, c = (along_classes(x, logs) for x in (self.a, self.b, self.c))
        return normalise(a * logs + b * log_complement(logs, class_log_odds(logs)) + c)


def beta(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    pool: Pool,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Beta:
    r"""Beta calibration: log-odds $a \ln p - b \ln(1 - p) + c$ with $a, b \ge 0$, fitted by maximum likelihood.

    These are the log-odds of a class if its probability has one Beta distribution in rows of the class and another in
    other rows. Unlike Platt scaling, it leaves calibrated probabilities unchanged, but it needs more rows.

    **Arguments:**

    - `logits`, `labels`, `pool`, `weights`, `row_weights`: as for [`eqx_ensemble.calibrate.platt`][].

    **Returns:**

    [`eqx_ensemble.calibrate.Beta`][].

    **Raises:**

    - `ValueError` if no optimum exists: the probabilities of a class separate its rows from the others, or all rows or
        no rows are of the class. While tracing, the parameters are then NaN.

    ```python
    p = jnp.array([0.2, 0.2, 0.5, 0.5, 0.9, 0.9, 0.9, 0.9])
    logits = jnp.log(jnp.stack([1 - p, p], axis=-1))[None]
    labels = jnp.array([0, 1, 0, 1, 0, 1, 1, 1])
    fitted = ee.calibrate.beta(logits, labels, pool="mixture")
    jnp.exp(fitted(logits))[0, ::2, 1]  # [0.47, 0.54, 0.75, 0.75]
    ```

    ??? cite
        [Kull et al. 2017](https://proceedings.mlr.press/v54/kull17a.html)
    """
    pooling, rows = fit_rows(logits, labels, pool, weights, row_weights)
    found = _fit_beta(rows)
    check_not_separable(pool, jnp.isnan(found[..., 0]) & ~jnp.any(jnp.isnan(rows.logs), axis=1))
    return Beta(found[..., 0], found[..., 1], found[..., 2], pooling)


@jax.jit
def _fit_beta(rows: Rows) -> Float[Array, "groups classes 3"]:
    # For two classes, the first has the probabilities 1 - p.
    mirror = lambda found: jnp.stack([found[..., 1], found[..., 0], -found[..., 2]], axis=-1)
    return each_class(_fit_beta_class, rows, mirror)


def _fit_beta_class(logs: Float[Array, " rows"], odds: Float[Array, " rows"], labels: Labels) -> Float[Array, "3"]:
    features, mean, scale = standardise(jnp.stack([logs, log_complement(logs, odds)], axis=1), labels.share)
    features = jnp.concatenate([features, jnp.ones_like(features[:, :1])], axis=1)
    rows = Regression(features, labels.hits.astype(odds.dtype), labels.share)
    params, losses = jax.vmap(minimise_logistic, in_axes=(None, 0))(rows, jnp.asarray(_FACES))
    # The constrained minimum is the unconstrained minimum of its face; the last face is always feasible.
    feasible = jnp.all(params[:, :2] >= 0, axis=1) & jnp.isfinite(losses)
    best = params[jnp.argmin(jnp.where(feasible, losses, jnp.inf))]
    slopes = best[:2] / scale
    found = jnp.append(slopes, best[2] - jnp.sum(slopes * mean))
    return jnp.where(_is_separable(odds, labels), jnp.nan, found)


def _is_separable(odds: Float[Array, " rows"], labels: Labels) -> Bool[Array, ""]:
    """Whether no row of the others has a higher probability than a row of the class: the loss then has no minimum."""
    counts = labels.share > 0
    least = lambda rows: jnp.min(jnp.where(rows & counts, odds, jnp.inf))
    most = lambda rows: jnp.max(jnp.where(rows & counts, odds, -jnp.inf))
    differ = most(counts) > least(counts)
    one_class = jnp.isinf(least(labels.hits)) | jnp.isinf(least(~labels.hits))
    return one_class | (differ & (most(~labels.hits) <= least(labels.hits)))


class Platt(eqx.Module):
    """Fitted Platt scaling.

    **Attributes:**

    - `slope`, `offset`: `(groups, classes)`: calibrated log-odds of a class are `slope` times its log-odds, plus
        `offset`. A negative slope reverses the order of predictions.
    - `pooling`: that of the fit.
    """

    slope: Float[Array, "groups classes"]
    offset: Float[Array, "groups classes"]
    pooling: Pooling

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "members *batch classes"]) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(groups, *batch, classes)`."""
        odds = class_log_odds(self.pooling.logs(logits))
        slope, offset = (along_classes(x, odds) for x in (self.slope, self.offset))
        return normalise(slope * odds + offset)


def platt(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    pool: Pool,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Platt:
    r"""Platt scaling: a logistic regression of the labels on the log-odds of a class.

    $p = 1 / (1 + \exp(-(a s + b)))$ for the log-odds $s$, with Platt's targets $(N_+ + 1) / (N_+ + 2)$ and $1 / (N_- +
    2)$ instead of 1 and 0: a minimum then also exists for separable rows. The loss is convex.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`. For binary probabilities `p` pass
        `jnp.log(jnp.stack([1 - p, p], axis=-1))`, for binary logits
        `jnp.stack([jnp.zeros_like(logit), logit], axis=-1)`.
    - `labels`, `pool`, `weights`: as for [`eqx_ensemble.calibrate.temperature`][].
    - `row_weights`: `(*batch,)`, as there; a row of weight 2 counts twice.

    **Returns:**

    [`eqx_ensemble.calibrate.Platt`][].

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1], [0.1, 0.9]] * 20]))
    labels = jnp.array([0, 1, 0, 1, 0, 1, 1, 0] * 5)
    fitted = ee.calibrate.platt(logits, labels, pool="mixture")
    jnp.exp(fitted(logits))[0, 0]  # [0.727, 0.273]: targets are smoothed
    ```

    ??? cite
        Platt 1999; numerics: [Lin et al. 2007](https://doi.org/10.1007/s10994-007-5018-6)
    """
    pooling, rows = fit_rows(logits, labels, pool, weights, row_weights)
    found = _fit(rows)
    return Platt(found[..., 0], found[..., 1], pooling)


@jax.jit
def _fit(rows: Rows) -> Float[Array, "groups classes 2"]:
    # For two classes, the first has the opposite log-odds: the same slope and the opposite offset.
    mirror = lambda found: found * jnp.asarray([1, -1], found.dtype)[None, None]
    return each_class(_fit_class, rows, mirror)


def _fit_class(logs: Float[Array, " rows"], odds: Float[Array, " rows"], labels: Labels) -> Float[Array, "2"]:
    total = lambda rows: jnp.sum(jnp.where(rows, labels.weights, 0))
    positive, negative = total(labels.hits), total(~labels.hits)
    targets = jnp.where(labels.hits, (positive + 1) / (positive + 2), 1 / (negative + 2))
    scaled, mean, scale = standardise(odds[:, None], labels.share)
    features = jnp.concatenate([scaled, jnp.ones_like(scaled)], axis=1)
    (slope, offset), _ = minimise_logistic(Regression(features, targets, labels.share), jnp.ones(2, bool))
    return jnp.stack([slope / scale[0], offset - slope * mean[0] / scale[0]])
