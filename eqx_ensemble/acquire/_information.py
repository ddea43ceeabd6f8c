from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from .._boundary import array_function, kinds
from .._check import type_error
from .._keys import own_key, root
from .._weighting import blank_unweighted, log_mixture, weighted_mean
from ..uncertainty import decompose_entropy
from ..uncertainty._engine import divergence
from ._arguments import argmax, check_size, pool_of, without
from ._batch import Picks

_FREE = -2  # a row to be picked; -1 is none
_LARGEST = 2**20  # of the temporary arrays of `redundancy`, in numbers


@array_function
def bald(
    logits: kinds.Logits, *, weights: kinds.Weights = None, row_weights: kinds.CountedRows = None
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
    return _information(logits, weights, row_weights)


@array_function
def batch_bald(
    logits: kinds.PoolLogits,
    size: int,
    *,
    weights: kinds.Weights = None,
    row_weights: kinds.PoolRows = None,
    chosen: kinds.Chosen | None = None,
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
    - `size`, `chosen`: as for [`eqx_ensemble.acquire.batch_expected_improvement`][].
    - `weights`, `row_weights`: as for [`eqx_ensemble.acquire.bald`][].
    - `max_outcomes`: the largest number of joint labels to enumerate; a pick needs those of the rows before it.
    - `num_samples`: the number of joint labels to sample beyond that: values are then estimates, which may exceed the
        logarithm of the number of members, and picks of nearly equal value depend on `key`.
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
    num_candidates, num_classes = logits.shape[1:]
    check_size(size, "size", num_candidates)
    conditioned, num_exact = (0 if chosen is None else len(chosen)) + size - 1, 0
    while num_exact < conditioned and num_classes ** (num_exact + 1) <= max_outcomes:
        num_exact += 1
    if num_exact < conditioned and key is None:
        got = f"got none, for {num_classes} classes and {conditioned + 1} rows, including those already chosen"
        fix = "Pass `key=jax.random.key(0)`; or raise `max_outcomes`, up to which outcomes are enumerated."
        raise type_error(f"a `key` for batches of more than {max_outcomes} joint outcomes", got, fix)
    own = own_key() if key is None else root(key)
    scores, logs = _information(logits, weights, row_weights), jax.nn.log_softmax(logits, axis=-1)
    labels = _Labels(logs, scores, weighted_mean(jnp.exp(logs), weights), weights)
    return _pick_all(labels, *pool_of(num_candidates, row_weights, chosen), own, size, num_exact, num_samples)


@array_function
def power_bald(
    logits: kinds.PoolLogits,
    size: int,
    *,
    power: kinds.Exponent = 1.0,
    weights: kinds.Weights = None,
    row_weights: kinds.PoolRows = None,
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
    check_size(size, "size", logits.shape[1])
    scores = _information(logits, weights, row_weights)
    smallest = jnp.finfo(scores.dtype).tiny  # where members agree, candidates come last, and are picked if needed
    noise = jax.random.gumbel(root(key), scores.shape, scores.dtype)
    # The largest perturbed logarithms are a sample without replacement in proportion to the powers.
    ranked = power * jnp.log(jnp.maximum(scores, smallest)) + noise
    fits = (jnp.ones(scores.shape, bool) if row_weights is None else row_weights) & ~jnp.isnan(ranked)
    index = jax.lax.top_k(jnp.where(fits, ranked, -jnp.inf), size)[1]
    return jnp.where(fits[index], index, -1).astype(jnp.int32)


def _information(logits: Array, weights: Array | None, row_weights: Array | None) -> Float[Array, "*batch"]:
    found = decompose_entropy(logits, weights=weights).epistemic
    return found if row_weights is None else jnp.where(row_weights, found, -jnp.inf)


def _pick_all(
    labels: "_Labels",
    may_pick: Bool[Array, " candidates"],
    chosen: Int32[Array, " chosen"],
    key: Key[Array, ""],
    size: int,
    num_exact: int,
    num_samples: int,
) -> Picks:
    """Greedy picks, given the labels of at most `num_exact` rows by enumeration, and of more by samples."""
    logs = labels.logs
    joint, total = jnp.zeros((logs.shape[0], 1), logs.dtype), jnp.zeros((), logs.dtype)
    rows = jnp.concatenate([chosen, jnp.full(size, _FREE, chosen.dtype)])
    found = []
    for row in rows[: num_exact + 1]:
        index, gain, may_pick = labels.pick(joint, may_pick, row, share=None)
        joint = labels.enumerate(joint, index) if len(found) < num_exact else joint
        total = total + gain
        found.append((index, total))
    indices, values = map(jnp.stack, zip(*found, strict=True))
    if len(rows) > len(found):
        drawing, labelling = jax.random.split(key)
        members = jax.random.choice(drawing, logs.shape[0], (num_samples,), p=labels.weights)
        share, keys = jnp.full(num_samples, 1 / num_samples, logs.dtype), jax.random.split(labelling, len(rows))

        def condition(joint: Array, given: tuple[Array, Array]) -> tuple[Array, None]:
            return labels.sample(joint, members, *given), None

        def step(carry: tuple, given: tuple[Array, Array]) -> tuple[tuple, tuple[Array, Array]]:
            (joint, may_pick, total), (row, key) = carry, given
            index, gain, may_pick = labels.pick(joint, may_pick, row, share=share)
            return (labels.sample(joint, members, index, key), may_pick, total + gain), (index, total + gain)

        nothing = jnp.zeros((logs.shape[0], num_samples), logs.dtype)
        joint, _ = jax.lax.scan(condition, nothing, (indices, keys[: len(found)]))
        more = jax.lax.scan(step, (joint, may_pick, total), (rows[len(found) :], keys[len(found) :]))[1]
        indices, values = (jnp.concatenate(pair) for pair in zip((indices, values), more, strict=True))
    return Picks(indices[-size:], values[-size:])


class _Labels(NamedTuple):
    """The log-probabilities of labels, their information of the member one by one, their mixture, and weights.

    Possible labels of the rows so far are outcomes; `joint` is their log-likelihood under each member,
    `(members, outcomes)`, and `share` the probability of each sampled one.
    """

    logs: Float[Array, "members candidates classes"]
    scores: Float[Array, " candidates"]
    mixed: Float[Array, "candidates classes"]
    weights: Float[Array, " members"] | None

    def pick(self, joint: Array, may_pick: Array, row: Array, *, share: Array | None) -> tuple[Array, Array, Array]:
        """The index of the best candidate, or of a `row` that is not free, what its label adds, and who is left."""
        gains = self.gains(joint, share)
        index = jnp.where(row == _FREE, argmax(gains, may_pick), row)
        return index, jnp.where(index < 0, 0, gains[index]), without(may_pick, index)

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
