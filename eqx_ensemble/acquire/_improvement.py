import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr
from jax.scipy.stats import norm
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import RowWeightsLike, check_entries, check_scalar
from .._weighting import blank_unweighted, log_mixture, mixture_moments, weighted_mean
from ._check import Candidates, Mode, check_best, check_candidates, check_sign


def expected_improvement(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"] | None = None,
    *,
    best: Real[ArrayLike, "..."],
    mode: Mode,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, "*batch"]:
    found, improvement = _check(mean, variance, best, mode, weights, row_weights)
    return _expected(improvement, found.variance, found.weights, found.rows.counted)


def log_expected_improvement(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"] | None = None,
    *,
    best: Real[ArrayLike, "..."],
    mode: Mode,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, "*batch"]:
    found, improvement = _check(mean, variance, best, mode, weights, row_weights)
    return _log_expected(improvement, found.variance, found.weights, found.rows.counted)


def probability_of_improvement(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"] | None = None,
    *,
    best: Real[ArrayLike, "..."],
    mode: Mode,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, "*batch"]:
    found, improvement = _check(mean, variance, best, mode, weights, row_weights)
    return _probability(improvement, found.variance, found.weights, found.rows.counted)


def confidence_bound(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"] | None = None,
    *,
    beta: Real[ArrayLike, ""],
    mode: Mode,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, "*batch"]:
    sign, found = check_sign(mode), check_candidates(mean, variance, weights, row_weights)
    factor = check_scalar("beta", beta, found.mean.dtype)
    wrong = lambda host: ~((host >= 0) & (host < math.inf))
    check_entries("a finite `beta` of zero or more", beta, wrong, "Its root is the number of standard deviations.")
    return _bound(sign * found.mean, found.variance, factor, found.weights, found.rows.counted)


def _check(
    mean: ArrayLike,
    variance: ArrayLike | None,
    best: ArrayLike,
    mode: Mode,
    weights: ArrayLike | None,
    row_weights: ArrayLike | None,
) -> tuple[Candidates, Float[Array, " members *batch"]]:
    """The checked arguments, and how much better than `best` every prediction is."""
    sign, found = check_sign(mode), check_candidates(mean, variance, weights, row_weights)
    return found, found.rows.blank(sign * (found.mean - check_best(best, found.mean)), before=1)


def _mask(values: Float[Array, "*batch"], counted: Array | None) -> Float[Array, "*batch"]:
    """Minus infinity in ignored candidates, so that they are never the largest."""
    return values if counted is None else jnp.where(counted, values, -jnp.inf)


@jax.jit
def _expected(improvement: Array, variance: Array | None, weights: Array | None, counted: Array | None) -> Array:
    improvement = blank_unweighted(improvement, weights)
    each = jnp.maximum(improvement, 0)
    if variance is not None:
        point, sigma, z = _standardise(improvement, blank_unweighted(variance, weights, fill=1))
        each = jnp.where(point, each, sigma * _excess(z))
    return _mask(weighted_mean(each, weights), counted)


@jax.jit
def _log_expected(improvement: Array, variance: Array | None, weights: Array | None, counted: Array | None) -> Array:
    improvement = blank_unweighted(improvement, weights)
    worse = improvement <= 0
    each = jnp.where(worse, -jnp.inf, jnp.log(jnp.where(worse, 1, improvement)))
    if variance is not None:
        point, sigma, z = _standardise(improvement, blank_unweighted(variance, weights, fill=1))
        each = jnp.where(point, each, jnp.log(sigma) + _log_excess(z))
    return _mask(log_mixture(each, weights), counted)


@jax.jit
def _probability(improvement: Array, variance: Array | None, weights: Array | None, counted: Array | None) -> Array:
    improvement = blank_unweighted(improvement, weights)
    each = jnp.where(jnp.isnan(improvement), improvement, (improvement > 0).astype(improvement.dtype))
    if variance is not None:
        point, _, z = _standardise(improvement, blank_unweighted(variance, weights, fill=1))
        each = jnp.where(point, each, ndtr(z))
    return _mask(weighted_mean(each, weights), counted)


@jax.jit
def _bound(mean: Array, variance: Array | None, beta: Array, weights: Array | None, counted: Array | None) -> Array:
    centre, total = mixture_moments(mean, jnp.zeros_like(mean) if variance is None else variance, weights)
    exact = total == 0
    width = jnp.where(exact, 0, jnp.sqrt(jnp.where(exact, 1, total)))
    return _mask(centre + jnp.sqrt(beta) * width, counted)


def _standardise(improvement: Array, variance: Array) -> tuple[Array, Array, Array]:
    """Which members are points, without variance or too far away for it to matter; standard deviations; z-scores."""
    far = jnp.finfo(improvement.dtype).max ** 0.45  # the square is still finite
    point = variance == 0
    point = point | (jnp.abs(improvement) > far * jnp.sqrt(jnp.where(point, 1, variance)))
    sigma = jnp.sqrt(jnp.where(point, 1, variance))
    return point, sigma, jnp.where(point, 0, improvement) / sigma


_TAIL = 3.0


@jax.custom_jvp
def _excess(z: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""$\varphi(z) + z \Phi(z)$, the mean of $\max(z + e, 0)$ for standard Gaussian $e$, without cancellation."""
    near, x, is_far = _split(z)
    rest = _mills_rest(x)
    return jnp.where(is_far, norm.pdf(x) * (rest / (x + rest)), norm.pdf(near) + near * ndtr(near))


@_excess.defjvp
def _excess_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _excess(*primals), ndtr(primals[0]) * tangents[0]


@jax.custom_jvp
def _log_excess(z: Float[Array, "..."]) -> Float[Array, "..."]:
    """The logarithm of `_excess`, finite where that underflows."""
    near, x, is_far = _split(z)
    rest = _mills_rest(x)
    tail = -0.5 * x**2 - 0.5 * math.log(2 * math.pi) + jnp.log(rest / (x + rest))
    return jnp.where(is_far, tail, jnp.log(norm.pdf(near) + near * ndtr(near)))


@_log_excess.defjvp
def _log_excess_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    near, x, is_far = _split(primals[0])
    slope = jnp.where(is_far, 1 / _mills_rest(x), ndtr(near) / _excess(near))
    return _log_excess(*primals), slope * tangents[0]


def _split(z: Float[Array, "..."]) -> tuple[Array, Array, Array]:
    is_far = z < -_TAIL
    return jnp.where(is_far, 0, z), jnp.where(is_far, -z, _TAIL), is_far


def _mills_rest(x: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""$k$ in $\Phi(-x) / \varphi(x) = 1 / (x + k)$, for $x \ge 3$, by Laplace's continued fraction.

    $k = 1 / (x + 2 / (x + 3 / (x + \dots)))$, so that $1 - x \Phi(-x) / \varphi(x) = k / (x + k)$ has no difference
    in it: written as one it would lose $x^2$ roundings.
    """
    terms = 12 if x.dtype == jnp.float32 else 48
    rest: Any = (x + jnp.sqrt(x**2 + 4 * (terms + 1))) / 2  # where it converges to, for a constant numerator
    for i in range(terms, 1, -1):
        rest = x + i / rest
    return 1 / rest
