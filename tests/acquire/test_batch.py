"""Greedy batches against sets tried one by one, and Thompson sampling against how often each member decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import acquire

RNG = np.random.default_rng(0)
PREDICTIONS, WEIGHTS, BEST = RNG.normal(size=(6, 12)).astype(np.float32), RNG.uniform(size=6), 0.4
KEY = jax.random.key(0)
SIGN = {"max": 1, "min": -1}
BATCHES = [acquire.batch_expected_improvement, acquire.batch_probability_of_improvement]
BOTH = pytest.mark.parametrize("function", BATCHES, ids=["expected_improvement", "probability"])


def joint(function, chosen, sign, predictions=PREDICTIONS, weights=WEIGHTS, best=BEST):
    """The criterion of a set."""
    better = sign * (predictions[:, chosen].astype(float) - np.reshape(best, (-1, 1)))
    each = np.maximum(better, 0) if function is acquire.batch_expected_improvement else better > 0
    return np.average(each.max(axis=1, initial=0), weights=weights)


def greedy(function, size, sign, *, chosen=(), allowed=range(12), **options):
    taken, indices, values = list(chosen), [], []
    for _ in range(size):
        before = joint(function, taken, sign, **options)
        open_ = [i for i in allowed if i not in taken]
        gains = [joint(function, [*taken, i], sign, **options) - before for i in open_]
        index = open_[int(np.argmax(gains))] if open_ else -1
        if index >= 0:
            taken = [*taken, index]
        indices.append(index)
        values.append(joint(function, taken, sign, **options))
    return indices, values


def check(picks, want):
    np.testing.assert_array_equal(picks.indices, want[0])
    np.testing.assert_allclose(picks.values, want[1], rtol=1e-5)


@BOTH
@pytest.mark.parametrize("mode", ["max", "min"])
def test_greedy_picks_are_those_of_a_search(function, mode):
    # Four picks: with more, gains are zero, and rounding decides.
    size, sign = (4, SIGN[mode]) if function is BATCHES[0] else (2, SIGN[mode])
    options = {"best": BEST, "mode": mode, "weights": WEIGHTS}
    check(function(PREDICTIONS, size, **options), greedy(function, size, sign))
    kept = np.arange(12) % 5 > 0
    spoilt = np.where(kept, PREDICTIONS, np.nan)
    check(
        function(spoilt, size, row_weights=kept, chosen=np.array([3, -1]), **options),
        greedy(function, size, sign, chosen=[3], allowed=np.flatnonzero(kept)),
    )
    each = np.quantile(PREDICTIONS, 0.6, axis=1).astype(np.float32)
    check(function(PREDICTIONS, size, **options | {"best": each}), greedy(function, size, sign, best=each))
    # The best candidates one by one are another batch.
    alone = [joint(function, [i], sign) for i in range(12)]
    if function is BATCHES[0]:
        assert set(np.argsort(alone)[-size:]) != set(np.asarray(function(PREDICTIONS, size, **options).indices))


def test_a_batch_is_the_expectation_of_its_largest_value():
    """Of a Gaussian process, by a million draws that this library did not make."""
    points = np.linspace(0, 1, 9)
    covariance = np.exp(-0.5 * ((points[:, None] - points) / 0.3) ** 2) + 1e-6 * np.eye(9)
    centre, factor = np.sin(6 * points), np.linalg.cholesky(covariance)
    draw = lambda rng, count: (centre + rng.normal(size=(count, 9)) @ factor.T).astype(np.float32)
    ensemble, others = draw(np.random.default_rng(1), 200_000), draw(np.random.default_rng(2), 1_000_000)
    picks = acquire.batch_expected_improvement(ensemble, 3, best=1.0, mode="max")
    values = np.maximum(others[:, np.asarray(picks.indices)] - 1, 0)
    for i in range(3):
        largest = values[:, : i + 1].max(axis=1)
        error = largest.std() * np.sqrt(1 / 200_000 + 1 / 1_000_000)
        assert abs(picks.values[i] - largest.mean()) < 6 * error
        if i:  # independent draws of each candidate would be another value
            apart = np.stack([np.roll(values[:, j], 1000 * j) for j in range(i + 1)], axis=1).max(axis=1)
            assert abs(picks.values[i] - apart.mean()) > 20 * error


@BOTH
def test_transforms_and_dtypes(function):
    options = {"best": BEST, "mode": "max"}
    plain = function(PREDICTIONS, 3, **options)
    assert plain.indices.dtype == jnp.int32
    mapped = jax.jit(jax.vmap(lambda x: function(x, 3, **options)))(np.stack([PREDICTIONS, PREDICTIONS]))
    np.testing.assert_array_equal(mapped.indices, [plain.indices] * 2)
    # While tracing, what is not there is not picked.
    traced = jax.jit(lambda x, kept: function(x, 3, row_weights=kept, **options))
    kept = np.arange(12) == 4
    np.testing.assert_array_equal(traced(PREDICTIONS, kept).indices, [4, -1, -1])
    unknown = PREDICTIONS.copy()
    unknown[2, 4] = np.nan
    np.testing.assert_array_equal(
        traced(unknown, kept).indices, [-1, -1, -1] if function is BATCHES[0] else [4, -1, -1]
    )
    with jax.enable_x64(True):
        assert function(PREDICTIONS.astype(float), 3, **options).values.dtype == jnp.float64


def test_each_pick_is_that_of_a_member():
    weights = np.array([0.5, 0.25, 0.25])
    # The members' favourites are 0, 1 and 2; what comes next is 3 for all.
    predictions = np.concatenate([np.eye(3), np.full((3, 1), 0.5)], axis=1)
    picks = acquire.thompson(predictions, 4000, mode="max", replace=True, weights=weights, key=KEY)
    counts = np.bincount(picks, minlength=4)
    assert (np.abs(counts - 4000 * np.append(weights, 0)) < 5 * np.sqrt(1000)).all()
    assert not (np.abs(counts - 4000 / 3) < 5 * np.sqrt(1000)).all()
    lowest = acquire.thompson(-predictions, 50, mode="min", replace=True, weights=weights, key=KEY)
    np.testing.assert_array_equal(
        lowest[:5], acquire.thompson(predictions, 50, mode="max", replace=True, weights=weights, key=KEY)[:5]
    )
    draws = jax.jit(jax.vmap(lambda key: acquire.thompson(predictions, 2, mode="max", weights=weights, key=key)))(
        jax.random.split(KEY, 4000)
    )
    assert (draws[:, 0] != draws[:, 1]).all()
    # The second is the common next best if the same member decides twice, with probability 0.375.
    np.testing.assert_allclose(np.mean(draws[:, 1] == 3), 0.375, atol=5 * np.sqrt(0.25 / 4000))
    kept = np.array([False, True, True, True])
    masked = acquire.thompson(np.where(kept, predictions, np.nan), 3, mode="max", row_weights=kept, key=KEY)
    assert set(np.asarray(masked)) == {1, 2, 3}
    every = acquire.thompson(PREDICTIONS, 12, mode="min", key=KEY)
    assert sorted(np.asarray(every)) == list(range(12))


@pytest.mark.usefixtures("unhooked")
def test_messages():
    pick = lambda size=2, **options: acquire.batch_expected_improvement(
        PREDICTIONS, size, best=0.0, mode="max", **options
    )
    for options, message in (
        ({"size": 13}, "`acquire.batch_expected_improvement` needs `size` candidates or more.\n  got 12, for 13 picks"),
        ({"chosen": [0.5]}, "needs integer `chosen`"),
        ({"chosen": [3, 3]}, "different indices from 0 to 11 in `chosen`"),
        ({"chosen": [12]}, "different indices from 0 to 11 in `chosen`"),
        ({"row_weights": np.zeros(12, bool)}, "needs `row_weights` that leave a row"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            pick(**options)
    broken = PREDICTIONS.copy()
    broken[1, 5] = np.nan
    with pytest.raises(ValueError, match="needs `predictions` without NaN.\n  got nan"):
        acquire.thompson(broken, 2, mode="max", key=KEY)
    acquire.thompson(broken, 2, mode="max", weights=np.arange(6) != 1, key=KEY)
    with pytest.raises(
        ValueError, match=r"needs `predictions` of shape \(members, candidates\).\n  got shape \(6, 12, 1\)"
    ):
        acquire.thompson(PREDICTIONS[..., None], 2, mode="max", key=KEY)
    with pytest.raises(TypeError, match="`acquire.thompson` needs one key: for example"):
        acquire.thompson(PREDICTIONS, 2, mode="max", key=None)
