"""Shared reductions over the `members` axis, for checked and normalised weights."""

import functools as ft
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Shaped

from ._leaves import as_column


def blank_unweighted(
    values: Float[Array, "members ..."], weights: Float[Array, "members ..."] | None, *, fill: ArrayLike = 0.0
) -> Float[Array, "members ..."]:
    """The values, overwritten for members of weight zero: NaN there then affects no value and no gradient."""
    if weights is None:
        return values
    return jnp.where(as_column(weights, values.ndim) == 0, fill, values)


def weighted_mean(
    values: Float[Array, "members ..."], weights: Float[Array, "members ..."] | None
) -> Float[Array, "..."]:
    """Mean over members."""
    if weights is None:
        return jnp.mean(values, axis=0)
    return jnp.sum(values * as_column(weights, values.ndim), axis=0)


def pairwise_mean(
    values: Float[Array, "members ..."], weights: Float[Array, "members ..."] | None
) -> Float[Array, "..."]:
    """`weighted_mean` of values that cost nothing, such as differences: a pairwise sum computes them several times."""
    if weights is None:
        return sum_members(values) / values.shape[0]
    return sum_members(values * as_column(weights, values.ndim))


def sum_members(values: Float[Array, "members ..."]) -> Float[Array, "..."]:
    """Pairwise sum over members."""
    return reduce_members(jnp.add, jnp.sum, values)


def reduce_members(
    pair: Callable[[Array, Array], Array], every: Callable[..., Array], values: Shaped[Array, "members ..."]
) -> Shaped[Array, "..."]:
    """A reduction over members in pairs: on a CPU, XLA may fuse several over a leading axis into one slow loop."""
    if not isinstance(values.shape[0], int) or values.shape[0] == 0:  # any number, in an exported program
        return every(values, axis=0)
    rest = []
    while (half := values.shape[0] // 2) > 0:
        rest += [values[2 * half]] if values.shape[0] % 2 else []
        values = pair(values[:half], values[half : 2 * half])
    return ft.reduce(pair, rest, values[0])


def known_mean(values: Float[Array, "members ..."], weights: Float[Array, "members ..."] | None) -> Float[Array, "..."]:
    """Mean over members; members of weight zero may be NaN."""
    return weighted_mean(blank_unweighted(values, weights), weights)


def class_mixture(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, "members ..."] | None
) -> Float[Array, "*batch classes"]:
    """Log-probabilities of the mixture of the members."""
    return log_mixture(jax.nn.log_softmax(blank_unweighted(logits, weights), axis=-1), weights)


def log_mixture(logs: Float[Array, "members ..."], weights: Float[Array, "members ..."] | None) -> Float[Array, "..."]:
    """Logarithm of the mean over members of `exp(logs)`."""
    num_members = logs.shape[0]
    if num_members == 1:
        return logs[0]
    convex = jnp.full(num_members, 1 / num_members, logs.dtype) if weights is None else weights
    spread = as_column(convex, logs.ndim)
    # Where all members have probability zero, logsumexp has the right value but a NaN gradient.
    impossible = jnp.all((logs == -jnp.inf) | (spread == 0), axis=0)
    safe = jnp.where(impossible[None], 0, logs)
    return jnp.where(impossible, -jnp.inf, jax.nn.logsumexp(safe, axis=0, b=spread))


def moments(
    mean: Float[Array, "members ..."], weights: Float[Array, "members ..."] | None
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Mean and variance over members (ddof 0)."""
    found = weighted_mean(mean, weights)
    # For an infinite mean, deviations are NaN: the variance is set to infinity.
    infinite = jnp.isinf(found)
    mean, rough = jnp.where(infinite[None], 0, mean), jnp.where(infinite, 0, found)
    # Deviations from a first mean are small: their mean corrects its rounding, and their squares do not cancel.
    deviation = mean - rough[None]
    correction = weighted_mean(deviation, weights)
    variance = weighted_mean((deviation - correction[None]) ** 2, weights)
    return jnp.where(infinite, found, rough + correction), jnp.where(infinite, jnp.inf, variance)


def mixture_moments(
    mean: Float[Array, "members ..."],
    variance: Float[Array, "members ..."],
    weights: Float[Array, "members ..."] | None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Mean and variance of the mixture of the members' distributions."""
    centre, between = moments(blank_unweighted(mean, weights), weights)
    return centre, known_mean(variance, weights) + between


def class_log_odds(logits: Float[Array, "*batch classes"]) -> Float[Array, "*batch classes"]:
    """`log(p / (1 - p))` of each class, accurate even where the probability rounds to zero or one."""
    logs = jax.nn.log_softmax(logits, axis=-1)
    # At most one class has a probability above 0.55; its complement is the sum of the others.
    most = logs > -0.6
    others = jnp.where(most, -jnp.inf, logs)
    rest = jax.nn.logsumexp(others, axis=-1, keepdims=True)
    return logs - jnp.where(most, rest, jnp.log1p(-jnp.exp(jnp.where(most, -1, logs))))


def is_class(labels: Integer[Array, "*batch"], num_classes: int) -> Bool[Array, "*batch"]:
    """Whether labels are valid classes: while tracing, invalid labels raise no error, and give NaN."""
    return (labels >= 0) & (labels < num_classes)


def at_label(values: Float[Array, "*batch classes"], labels: Integer[Array, "*batch"]) -> Float[Array, "*batch"]:
    """The value of each row at its label; NaN where the label is not a class."""
    known = is_class(labels, values.shape[-1])
    found = jnp.take_along_axis(values, jnp.where(known, labels, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(known, found, jnp.nan)


def votes(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, "members ..."] | None
) -> Float[Array, "*batch classes"]:
    """The fraction of votes for each class; NaN where a member of nonzero weight has NaN."""
    voting = blank_unweighted(logits, weights)
    chosen = jax.nn.one_hot(jnp.argmax(voting, axis=-1), voting.shape[-1], dtype=voting.dtype)
    unknown = jnp.any(jnp.isnan(voting), axis=-1, keepdims=True)
    return pairwise_mean(jnp.where(unknown, jnp.nan, chosen), weights)


def different_votes(shares: Float[Array, "*batch classes"]) -> Float[Array, "*batch"]:
    """The probability that two votes differ, from the fraction of each class."""
    # Not 1 - sum of squares, which is not exactly zero for members that agree, because weights are rounded.
    return jnp.sum(shares * (jnp.sum(shares, axis=-1, keepdims=True) - shares), axis=-1)


def shares_in_order(
    ordered: Float[Array, "members ..."], own: Float[Array, "members ..."] | None
) -> Float[Array, "members ..."]:
    """The cumulative weight at each of the sorted values; `(members, 1, ...)` for equal weights."""
    equal = as_column(jnp.ones(ordered.shape[0], ordered.dtype), ordered.ndim)
    share = jnp.cumsum(equal if own is None else own, axis=0)
    return share / share[-1:]


def quantile_in_order(
    in_order: Float[Array, "members ..."],
    weights: Float[Array, "members ..."] | None,
    level: Float[Array, ""],
    over: Float[Array, ""],
) -> Float[Array, "..."]:
    """The value at which the cumulative weight reaches the level; the midpoint to the next if it equals the level.

    Takes sorted values and their weights, which may have axes of length one; NaN if all weights are zero.

    Low levels are compared with the cumulative weight, high levels with the weight above: comparisons of small shares
    are then not affected by the rounding of numbers near one.
    """
    num_members = in_order.shape[0]
    own = as_column(jnp.ones(num_members, in_order.dtype), in_order.ndim) if weights is None else weights
    share = jnp.cumsum(own, axis=0)
    total = share[-1:]
    rest = jnp.flip(jnp.cumsum(jnp.flip(own, axis=0), axis=0), axis=0)
    rest = jnp.concatenate([rest[1:], jnp.zeros_like(total)]) / total
    share = share / total
    rounding = 4 * math.log2(2 * num_members) * jnp.finfo(in_order.dtype).eps
    low = level <= over
    below = jnp.where(low, share < level * (1 - rounding), rest > over * (1 + rounding))
    at_most = jnp.where(low, share <= level * (1 + rounding), rest >= over * (1 - rounding))
    lower, upper = jnp.sum(below, axis=0), jnp.sum(at_most, axis=0)
    # Members of weight zero come last and are never quantiles.
    last = jnp.sum(rest > 0, axis=0)
    each = in_order.shape[1:]
    lower, upper = (jnp.broadcast_to(jnp.minimum(index, last), each) for index in (lower, upper))
    low, high = (jnp.take_along_axis(in_order, index[None], axis=0)[0] for index in (lower, upper))
    found = jnp.where(lower == upper, low, 0.5 * low + 0.5 * high)
    return jnp.where(jnp.isnan(share[-1]), jnp.nan, found)
