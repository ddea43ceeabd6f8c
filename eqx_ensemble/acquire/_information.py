from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int32, Integer, Key, Real

from .. import _keys
from .._check import (
    CountedRows,
    RowWeightsLike,
    check_counted_rows,
    check_logits,
    check_no_nan,
    check_positive_int,
    check_weights,
    type_error,
)
from .._weighting import blank_unweighted, log_mixture, weighted_mean
from ..uncertainty import decompose_entropy
from ..uncertainty._engine import divergence
from ._check import check_factor, check_pool, check_pool_axes, check_size
from ._greedy import Picks, Pool

_FREE = -2  # a row to be picked; -1 is none
_LARGEST = 2**20  # of the temporary arrays of `_redundancy`, in numbers


def bald(
    logits: Float[ArrayLike, "members *batch classes"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, "*batch"]:
    """The mutual information of a row's label and the member, in nats: what querying the label is expected to tell.

    The `epistemic` part of [`eqx_ensemble.uncertainty.decompose_entropy`][], with `row_weights`.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`.
    - `weights`: over members, `(members,)`.
    - `row_weights`: booleans `(*batch,)`; rows that are `False`, such as labelled ones, are ignored, even if NaN.

    **Returns:**

    `(*batch,)`, larger is better; minus infinity for ignored rows.

    ```python
    logits = jnp.log(jnp.array([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]]))
    ee.acquire.bald(logits)  # [0.693, 0.0]
    ```

    ??? cite
        [Houlsby et al. 2011](https://arxiv.org/abs/1112.5745)
    """
    return _check(logits, weights, row_weights, pool=False)[0]


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
    """A batch of rows by greedy maximisation of what their labels jointly tell about the member (BatchBALD), in nats.

    Unlike the largest values of [`eqx_ensemble.acquire.bald`][], it counts what the labels tell in common once: a near
    duplicate adds little where each member is sure of its label. Labels are independent given the member, and where
    they are noisy, a duplicate still adds to the sum. The joint labels of the rows so far are enumerated while there
    are at most `max_outcomes`, and sampled for more rows.

    **Arguments:**

    - `logits`: `(members, candidates, classes)`.
    - `size`, `chosen`, `costs`, `budget`: as for [`eqx_ensemble.acquire.batch_expected_improvement`][].
    - `weights`, `row_weights`: as for [`eqx_ensemble.acquire.bald`][].
    - `max_outcomes`: the largest number of joint labels to enumerate; a pick needs those of the rows before it.
    - `num_samples`: the number of joint labels to sample beyond that.
    - `key`: one threefry key, needed to sample.

    **Returns:**

    [`eqx_ensemble.acquire.Picks`][], with the joint mutual information, including that of `chosen`.

    **Raises:**

    `TypeError` without a `key` where joint labels are sampled.

    ```python
    sure, half = jnp.array([9.0, -9.0]), jnp.zeros(2)
    one, other = jnp.stack([sure, -sure, half, half]), jnp.stack([half, half, sure, -sure])
    logits = jnp.stack([one, one, other], axis=1)  # four members; row 1 is a copy of row 0
    picks = ee.acquire.batch_bald(logits, 2)
    picks.indices, picks.values  # [0, 2], [0.347, 0.693]
    ```

    ??? cite
        [Kirsch et al., NeurIPS 2019](https://arxiv.org/abs/1906.08158)
    """
    scores, checked, convex, rows = _check(logits, weights, row_weights)
    pool, taken = check_pool(checked, rows, chosen, costs, budget)
    size = check_size(size, "size", pool)
    most, num_samples = check_positive_int(max_outcomes, "max_outcomes"), check_positive_int(num_samples, "num_samples")
    conditioned, num_classes, num_exact = len(taken) + size - 1, checked.shape[2], 0
    while num_exact < conditioned and num_classes ** (num_exact + 1) <= most:
        num_exact += 1
    if num_exact < conditioned and key is None:
        got = f"got none, for {num_classes} classes and {conditioned + 1} rows, with those that are chosen"
        fix = "Pass `key=jax.random.key(0)`; or a larger `max_outcomes`, which are enumerated exactly."
        raise type_error(f"a `key` for batches of more than {most} joint outcomes", got, fix)
    key = _keys.own_key() if key is None else _keys.root(key)
    return Picks(*_pick_all(checked, scores, convex, taken, pool, key, size, num_exact, num_samples))


def power_bald(
    logits: Float[ArrayLike, "members candidates classes"],
    size: int,
    *,
    power: Real[ArrayLike, ""] = 1.0,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    key: Any,
) -> Int32[Array, " size"]:
    """A batch of rows drawn without replacement in proportion to powers of [`eqx_ensemble.acquire.bald`][] (PowerBALD).

    As fast as taking the largest values; for large batches nearly as good as [`eqx_ensemble.acquire.batch_bald`][],
    because chance keeps near duplicates apart.

    **Arguments:**

    - `logits`, `weights`, `row_weights`: as for [`eqx_ensemble.acquire.batch_bald`][].
    - `size`: the number of rows.
    - `power`: zero or more; zero draws uniformly, large powers take the largest values.
    - `key`: one threefry key, typed or legacy.

    **Returns:**

    Indices `(size,)`, in the order in which they were drawn. Rows on which members agree come last.

    ```python
    logits = jax.random.normal(key, (8, 100, 2))
    ee.acquire.power_bald(logits, 20, key=key).shape  # (20,)
    ```

    ??? cite
        [Kirsch et al., TMLR 2023](https://arxiv.org/abs/2106.12059)
    """
    scores, checked, _, rows = _check(logits, weights, row_weights)
    pool, _ = check_pool(checked, rows)
    exponent = check_factor("power", power, checked.dtype, fix="Zero draws uniformly, 1 in proportion.")
    return _draw(scores, pool, exponent, check_size(size, "size", pool), _keys.root(key))


def _check(
    logits: ArrayLike, weights: ArrayLike | None, row_weights: ArrayLike | None, *, pool: bool = True
) -> tuple[Array, Array, Array | None, CountedRows]:
    """Raises for invalid arguments. Returns the information, minus infinity in ignored rows, and the arguments."""
    checked = check_logits(logits)
    if pool:
        check_pool_axes("logits", checked, "(members, candidates, classes)")
    rows = check_counted_rows(row_weights, checked.shape[1:-1])
    convex = check_weights(weights, checked.shape[0], checked.dtype)
    checked = blank_unweighted(rows.blank(checked, before=1), convex)
    if pool:
        check_no_nan("logits", checked)
    found = decompose_entropy(checked, weights=convex).epistemic
    return rows.blank(found, fill=-jnp.inf), checked, convex, rows


@partial(jax.jit, static_argnames="size")
def _draw(
    scores: Float[Array, " candidates"], pool: Pool, power: Float[Array, ""], size: int, key: Key[Array, ""]
) -> Int32[Array, " size"]:
    """Sampling without replacement in proportion to powers of the scores: the largest Gumbel-perturbed logarithms."""
    smallest = jnp.finfo(scores.dtype).tiny  # where members agree, candidates come last, and are picked if needed
    ranked = power * jnp.log(jnp.maximum(scores, smallest)) + jax.random.gumbel(key, scores.shape, scores.dtype)
    fits = pool.may_pick & ~jnp.isnan(ranked)
    index = jax.lax.top_k(jnp.where(fits, ranked, -jnp.inf), size)[1]
    return jnp.where(fits[index], index, -1).astype(jnp.int32)


@partial(jax.jit, static_argnames=("size", "num_exact", "num_samples"))
def _pick_all(
    logits: Float[Array, "members candidates classes"],
    scores: Float[Array, " candidates"],
    weights: Float[Array, " members"] | None,
    chosen: Int32[Array, " chosen"],
    pool: Pool,
    key: Key[Array, ""],
    size: int,
    num_exact: int,
    num_samples: int,
) -> tuple[Int32[Array, " size"], Float[Array, " size"]]:
    """Greedy picks, given the labels of at most `num_exact` rows by enumeration, and of more by samples."""
    logs = jax.nn.log_softmax(logits, axis=-1)
    labels = _Labels(logs, scores, weighted_mean(jnp.exp(logs), weights), weights)
    joint, total = jnp.zeros((logs.shape[0], 1), logs.dtype), jnp.zeros((), logs.dtype)
    rows = jnp.concatenate([chosen, jnp.full(size, _FREE, chosen.dtype)])
    found = []
    for row in rows[: num_exact + 1]:
        index, gain, pool = labels.pick(joint, pool, row, share=None)
        joint = labels.enumerate(joint, index) if len(found) < num_exact else joint
        total = total + gain
        found.append((index, total))
    indices, values = map(jnp.stack, zip(*found, strict=True))
    if len(rows) > len(found):
        drawing, labelling = jax.random.split(key)
        members = jax.random.choice(drawing, logs.shape[0], (num_samples,), p=weights)
        share, keys = jnp.full(num_samples, 1 / num_samples, logs.dtype), jax.random.split(labelling, len(rows))

        def condition(joint: Array, given: tuple[Array, Array]) -> tuple[Array, None]:
            return labels.sample(joint, members, *given), None

        def step(carry: tuple, given: tuple[Array, Array]) -> tuple[tuple, tuple[Array, Array]]:
            (joint, pool, total), (row, key) = carry, given
            index, gain, pool = labels.pick(joint, pool, row, share=share)
            return (labels.sample(joint, members, index, key), pool, total + gain), (index, total + gain)

        nothing = jnp.zeros((logs.shape[0], num_samples), logs.dtype)
        joint, _ = jax.lax.scan(condition, nothing, (indices, keys[: len(found)]))
        more = jax.lax.scan(step, (joint, pool, total), (rows[len(found) :], keys[len(found) :]))[1]
        indices, values = (jnp.concatenate(pair) for pair in zip((indices, values), more, strict=True))
    return indices[-size:], values[-size:]


class _Labels(NamedTuple):
    """The log-probabilities of labels, their information of the member one by one, their mixture, and weights.

    Possible labels of the rows so far are outcomes; `joint` is their log-likelihood under each member,
    `(members, outcomes)`, and `share` the probability of each sampled one.
    """

    logs: Float[Array, "members candidates classes"]
    scores: Float[Array, " candidates"]
    mixed: Float[Array, "candidates classes"]
    weights: Float[Array, " members"] | None

    def pick(self, joint: Array, pool: Pool, row: Array, *, share: Array | None) -> tuple[Array, Array, Pool]:
        """The index of the best candidate, or of a `row` that is not free, what its label adds, and the pool."""
        gains = self.gains(joint, share)
        best, rest = pool.pick(gains)
        pool = jax.tree.map(lambda x, y: jnp.where(row == _FREE, x, y), rest, pool)
        index = jnp.where(row == _FREE, best, row)
        return index, jnp.where(index < 0, 0, gains[index]), pool

    def gains(self, joint: Float[Array, "members outcomes"], share: Array | None) -> Float[Array, " candidates"]:
        r"""What the label of each candidate tells of the member, beyond the labels so far.

        $I(y; m \mid y_{1:n}) = I(y; m) - I(y; y_{1:n})$, as labels are independent given the member. Both terms are
        mean divergences: there is no difference of entropies, which would hide small disagreement in rounding.
        """
        if share is None and joint.shape[1] == 1:  # no labels so far
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
