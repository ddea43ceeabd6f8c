import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Integer, Key, Real

from .. import _keys
from .._check import (
    CountedRows,
    RowWeightsLike,
    check_counted_rows,
    check_entries,
    check_logits,
    check_positive_int,
    check_scalar,
    check_weights,
    type_error,
    value_error,
)
from .._weighting import blank_unweighted, log_mixture, weighted_mean
from ..uncertainty import decompose_entropy
from ..uncertainty._engine import divergence
from ._check import check_no_nan_of_members, check_size, check_start
from ._greedy import Picks, Pool

_LARGEST = 2**20  # of the temporary arrays of `_redundancy`, in numbers


def bald(
    logits: Float[ArrayLike, "members *batch classes"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, "*batch"]:
    return _scores(logits, weights, row_weights)[0]


def batch_bald(
    logits: Float[ArrayLike, "members candidates classes"],
    size: int,
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    chosen: Integer[ArrayLike, " chosen"] | None = None,
    costs: Real[ArrayLike, " candidates"] | None = None,
    budget: Real[ArrayLike, ""] | None = None,
    max_outcomes: int = 4096,
    num_samples: int = 4096,
    key: Any = None,
) -> Picks:
    scores, checked, convex, rows = _check_pool(logits, weights, row_weights)
    start = check_start(checked.shape[1], checked.dtype, rows, chosen, costs, budget)
    size = check_size(size, "size", start.may_pick)
    most, num_samples = check_positive_int(max_outcomes, "max_outcomes"), check_positive_int(num_samples, "num_samples")
    conditioned, num_classes, num_exact = start.chosen.shape[0] + size - 1, checked.shape[2], 0
    while num_exact < conditioned and num_classes ** (num_exact + 1) <= most:
        num_exact += 1
    if num_exact < conditioned and key is None:
        got = f"got none, for {num_classes} classes and {conditioned + 1} rows, with those that are chosen"
        fix = "Pass `key=jax.random.key(0)`; or a larger `max_outcomes`, which are enumerated exactly."
        raise type_error(f"a `key` for batches of more than {most} joint outcomes", got, fix)
    key = jax.random.key(0) if key is None else _keys.root(key)
    pool = Pool(start.may_pick, start.costs, start.budget, jnp.zeros((), checked.dtype))
    return Picks(*_pick_all(checked, scores, convex, start.chosen, pool, key, _Sizes(size, num_exact, num_samples)))


def power_bald(
    logits: Float[ArrayLike, "members candidates classes"],
    size: int,
    *,
    power: Real[ArrayLike, ""] = 1.0,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    key: Any,
) -> Int32[Array, " size"]:
    scores, checked, _, rows = _check_pool(logits, weights, row_weights)
    may_pick = check_start(checked.shape[1], checked.dtype, rows, None, None, None).may_pick
    size = check_size(size, "size", may_pick)
    exponent = check_scalar("power", power, checked.dtype)
    wrong = lambda host: ~((host >= 0) & (host < math.inf))
    check_entries("a finite `power` of zero or more", power, wrong, "Zero picks uniformly, infinity would be top-k.")
    return _draw(scores, may_pick, exponent, size, _keys.root(key))


def _scores(
    logits: ArrayLike, weights: ArrayLike | None, row_weights: ArrayLike | None
) -> tuple[Array, Array, Array | None, CountedRows]:
    """The mutual information of label and member, minus infinity in ignored rows; and the checked arguments."""
    checked = check_logits(logits)
    rows = check_counted_rows(row_weights, checked.shape[1:-1])
    convex = check_weights(weights, checked.shape[0], checked.dtype)
    checked = rows.blank(checked, before=1)
    found = decompose_entropy(checked, weights=convex).epistemic
    return rows.blank(found, fill=-jnp.inf), checked, convex, rows


def _check_pool(
    logits: ArrayLike, weights: ArrayLike | None, row_weights: ArrayLike | None
) -> tuple[Array, Array, Array | None, CountedRows]:
    """`_scores` of logits `(members, candidates, classes)` without NaN."""
    scores, checked, convex, rows = _scores(logits, weights, row_weights)
    if checked.ndim != 3:
        fix = "For several pools, map the function with `jax.vmap`."
        raise value_error("`logits` of shape (members, candidates, classes)", f"got shape {checked.shape}", fix)
    check_no_nan_of_members("logits", logits, weights, rows)
    return scores, checked, convex, rows


@partial(jax.jit, static_argnames="size")
def _draw(
    scores: Float[Array, " candidates"],
    may_pick: Bool[Array, " candidates"],
    power: Float[Array, ""],
    size: int,
    key: Key[Array, ""],
) -> Int32[Array, " size"]:
    """Sampling without replacement in proportion to powers of the scores: the largest Gumbel-perturbed logarithms."""
    smallest = jnp.finfo(scores.dtype).tiny  # where members agree, candidates come last, and are picked if needed
    ranked = power * jnp.log(jnp.maximum(scores, smallest)) + jax.random.gumbel(key, scores.shape, scores.dtype)
    fits = may_pick & ~jnp.isnan(ranked)
    index = jax.lax.top_k(jnp.where(fits, ranked, -jnp.inf), size)[1]
    return jnp.where(fits[index], index, -1).astype(jnp.int32)


class _Sizes(NamedTuple):
    picks: int
    exact: int
    samples: int


@partial(jax.jit, static_argnames="sizes")
def _pick_all(
    logits: Float[Array, "members candidates classes"],
    scores: Float[Array, " candidates"],
    weights: Float[Array, " members"] | None,
    chosen: Int32[Array, " chosen"],
    pool: Pool,
    key: Key[Array, ""],
    sizes: _Sizes,
) -> tuple[Int32[Array, " size"], Float[Array, " size"]]:
    """Greedy picks, given the labels of at most `sizes.exact` rows by enumeration, and of more by samples."""
    logs = jax.nn.log_softmax(blank_unweighted(logits, weights), axis=-1)
    labels = _Labels(logs, scores, weighted_mean(jnp.exp(logs), weights), weights)
    num_rows, num_chosen = chosen.shape[0] + sizes.picks, chosen.shape[0]
    joint, total = jnp.zeros((logs.shape[0], 1), logs.dtype), jnp.zeros((), logs.dtype)
    indices, values = [], []
    for i in range(min(num_rows, sizes.exact + 1)):
        index, gain, pool = labels.pick(joint, pool, chosen[i] if i < num_chosen else None, share=None)
        total = total + gain
        joint = labels.enumerate(joint, index) if i < sizes.exact else joint
        indices, values = [*indices, index], [*values, total]
    so_far, sums = jnp.stack(indices), jnp.stack(values)
    if num_rows == len(indices):
        return so_far[num_chosen:], sums[num_chosen:]

    drawing, labelling = jax.random.split(key)
    members = jax.random.choice(drawing, logs.shape[0], (sizes.samples,), p=weights)
    share = jnp.full(sizes.samples, 1 / sizes.samples, logs.dtype)
    keys = jax.random.split(labelling, num_rows)

    def condition(joint: Array, given: tuple[Array, Array]) -> tuple[Array, None]:
        return labels.sample(joint, members, *given), None

    def step(carry: tuple, given: tuple[Array | None, Array]) -> tuple[tuple, tuple[Array, Array]]:
        (joint, pool, total), (row, key) = carry, given
        index, gain, pool = labels.pick(joint, pool, row, share=share)
        return (labels.sample(joint, members, index, key), pool, total + gain), (index, total + gain)

    count = len(indices)
    joint, _ = jax.lax.scan(condition, jnp.zeros((logs.shape[0], sizes.samples), logs.dtype), (so_far, keys[:count]))
    rest = chosen[count:]
    carry, _ = jax.lax.scan(step, (joint, pool, total), (rest, keys[count : count + len(rest)]))
    more = jax.lax.scan(step, carry, (None, keys[count + len(rest) :]))[1]
    return tuple(jnp.concatenate([x[num_chosen:], y]) for x, y in zip((so_far, sums), more, strict=True))


class _Labels(NamedTuple):
    """The log-probabilities of labels, their information of the member one by one, their mixture, and weights.

    Possible labels of the rows so far are outcomes; `joint` is their log-likelihood under each member,
    `(members, outcomes)`, and `share` the probability of each sampled one.
    """

    logs: Float[Array, "members candidates classes"]
    scores: Float[Array, " candidates"]
    mixed: Float[Array, "candidates classes"]
    weights: Float[Array, " members"] | None

    def pick(self, joint: Array, pool: Pool, row: Array | None, *, share: Array | None) -> tuple[Array, Array, Pool]:
        """The index of the best candidate, or of `row`, what its label adds, and the pool without it."""
        if row is None:
            gains = self.gains(joint, share)
            index, pool = pool.pick(gains)
            return index, jnp.where(index < 0, 0, gains[index]), pool
        alone = self._replace(logs=self.logs[:, row[None]], scores=self.scores[row[None]], mixed=self.mixed[row[None]])
        return row, jnp.where(row < 0, 0, alone.gains(joint, share)[0]), pool

    def gains(self, joint: Float[Array, "members outcomes"], share: Array | None) -> Float[Array, " candidates"]:
        r"""What the label of each candidate tells of the member, beyond the labels so far.

        $I(y; m \mid y_{1:n}) = I(y; m) - I(y; y_{1:n})$, as labels are independent given the member. Both terms are
        mean divergences: there is no difference of entropies, which would hide small disagreement in rounding.
        """
        if joint.shape[1] == 1:
            return self.scores
        joint = blank_unweighted(joint, self.weights, fill=-jnp.inf)
        evidence = log_mixture(joint, self.weights)
        likelihood = jnp.exp(joint - jnp.where(evidence == -jnp.inf, 0, evidence)[None])
        posterior = likelihood / joint.shape[0] if self.weights is None else likelihood * self.weights[:, None]
        share = jnp.exp(evidence) if share is None else share

        def redundancy(one: tuple[Array, Array]) -> Array:
            logs, mixed = one
            given = jnp.matmul(posterior.T, jnp.exp(logs), precision=jax.lax.Precision.HIGHEST)
            return jnp.sum(share * divergence(jnp.log(given), mixed, None))

        together = max(_LARGEST // (joint.shape[1] * self.logs.shape[2]), 1)
        shared = jax.lax.map(redundancy, (jnp.moveaxis(self.logs, 1, 0), self.mixed), batch_size=together)
        return jnp.where(self.scores == -jnp.inf, self.scores, jnp.maximum(self.scores - shared, 0))

    def enumerate(self, joint: Float[Array, "members outcomes"], index: Array) -> Float[Array, "members more"]:
        """All outcomes of one row more."""
        return jnp.reshape(joint[:, :, None] + self.at(index)[:, None, :], (joint.shape[0], -1))

    def sample(self, joint: Float[Array, "members samples"], members: Array, index: Array, key: Array) -> Array:
        """The samples with a label of one row more, which the member of each sample draws."""
        logs = self.at(index)
        return joint + logs[:, jax.random.categorical(key, logs[members], axis=-1)]

    def at(self, index: Int32[Array, ""]) -> Float[Array, "members classes"]:
        """The log-probabilities of a row; for no row, -1, the label zero is certain, which tells nothing."""
        certain = jnp.where(jnp.arange(self.logs.shape[2]) == 0, 0, -jnp.inf).astype(self.logs.dtype)
        return jnp.where(index < 0, certain[None], self.logs[:, index])
