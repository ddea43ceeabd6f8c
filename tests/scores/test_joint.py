"""The likelihood of several rows together."""

import itertools

import jax
import numpy as np
import pytest

from eqx_ensemble import scores

special = pytest.importorskip("scipy.special", reason="the reference sums are scipy's")
RNG = np.random.default_rng(0)
LOGITS, LABELS, KEY = 2 * RNG.normal(size=(4, 5, 3)), RNG.integers(3, size=5), jax.random.key(0)
WEIGHTS = np.array([0.4, 0.1, 0.2, 0.3])
LOG_SCORES = special.log_softmax(LOGITS, axis=-1)[:, np.arange(5), LABELS]


def joint(rows, log_scores=LOG_SCORES, weights=WEIGHTS):
    return -special.logsumexp(log_scores[:, list(rows)].sum(axis=1), b=weights)


def mean_by_all_sets(size, share):
    """The mean over all pairs of anchors and all rows drawn of them, by their probabilities."""
    total = 0.0
    for pair in itertools.product(range(5), repeat=2):
        for rows in itertools.product(pair, repeat=size):
            total += share[pair[0]] * share[pair[1]] * joint(rows) / 2**size
    return total


def test_log_scores_are_those_of_members():
    each = -np.asarray(scores.per_member(scores.nll, LOGITS, LABELS, reduction="none"))
    np.testing.assert_allclose(each, LOG_SCORES, rtol=1e-5)


@pytest.mark.parametrize("row_weights", [None, np.array([1.0, 2.0, 0.0, 3.0, 1.0])])
def test_dyadic_sampling_is_the_sum_over_all_sets(row_weights):
    share = np.full(5, 0.2) if row_weights is None else row_weights / row_weights.sum()
    spoilt = np.where(share > 0, LOG_SCORES, np.nan)
    options = {"num_sets": 40_000, "weights": WEIGHTS, "row_weights": row_weights, "key": KEY}
    got = scores.joint_nll(spoilt, size=4, **options)
    values = np.asarray(scores.joint_nll(spoilt, size=4, reduction="none", **options))
    assert values.shape == (40_000,)
    np.testing.assert_allclose(got, values.mean(), rtol=1e-5)
    error = values.std() / 200
    assert abs(got - mean_by_all_sets(4, share)) < 5 * error
    # Neither independent rows, nor members on their own, nor the product of single rows.
    others = scores.joint_nll(spoilt, size=4, num_anchors=1000, **options | {"num_sets": 4000})
    assert abs(others - mean_by_all_sets(4, share)) > 20 * error
    single = 4 * share @ [joint([i]) for i in range(5)]
    assert abs(single - mean_by_all_sets(4, share)) > 20 * error


def test_single_rows_are_the_plain_score():
    got = scores.joint_nll(LOG_SCORES, size=1, num_sets=20_000, key=KEY, reduction="none")
    each = np.asarray(scores.nll(LOGITS, LABELS, reduction="none"))
    assert (np.abs(np.asarray(got)[:, None] - each).min(axis=1) < 1e-5).all()
    np.testing.assert_allclose(np.mean(got), each.mean(), atol=5 * each.std() / np.sqrt(20_000))
    # Members that agree: the product over rows.
    alone = scores.joint_nll(LOG_SCORES[:1], size=7, num_sets=20_000, key=KEY)
    np.testing.assert_allclose(alone, 7 * -LOG_SCORES[0].mean(), rtol=0.05)


def test_joint_scores_tell_disagreement_from_noise():
    """Coins that members call alike, and coins that each member is sure of: the same single rows, other sets."""
    sure = np.log(np.float32([[0.9, 0.1], [0.1, 0.9]]))
    log_scores = np.stack([np.repeat(sure[0], 50), np.repeat(sure[1], 50)])
    unsure = np.log(np.full((2, 100), 0.5, np.float32))
    one, other = (scores.joint_nll(x, size=1, key=KEY) for x in (log_scores, unsure))
    np.testing.assert_allclose(one, other, rtol=1e-5)
    one, other = (scores.joint_nll(x, size=10, num_anchors=1, key=KEY) for x in (log_scores, unsure))
    np.testing.assert_allclose(one, -np.log(0.5 * (0.9**10 + 0.1**10)), rtol=1e-5)
    np.testing.assert_allclose(other, 10 * np.log(2), rtol=1e-5)


def test_transforms_and_impossible_labels():
    options = {"num_sets": 50, "weights": WEIGHTS, "key": KEY}
    value = scores.joint_nll(LOG_SCORES, **options)
    mapped = jax.jit(jax.vmap(lambda x: scores.joint_nll(x, **options)))(np.stack([LOG_SCORES, LOG_SCORES]))
    np.testing.assert_allclose(mapped, [value, value], rtol=1e-5)
    excluded = LOG_SCORES.copy()
    excluded[0] = -np.inf
    rest = scores.joint_nll(LOG_SCORES, **options | {"weights": WEIGHTS * [0, 1, 1, 1]})
    np.testing.assert_allclose(scores.joint_nll(excluded, **options), rest - np.log(0.6), rtol=1e-5)
    slope = jax.grad(lambda x: scores.joint_nll(x, **options))(excluded)
    assert np.isfinite(slope).all()
    shaped = scores.joint_nll(np.stack([LOG_SCORES, LOG_SCORES], axis=-1), **options)
    assert shaped.shape == ()
    with jax.enable_x64(True):
        assert scores.joint_nll(LOG_SCORES, **options).dtype == np.float64
