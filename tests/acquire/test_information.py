"""BALD and its batches against sums over all labels in plain NumPy."""

import itertools

import jax
import numpy as np
import pytest

from eqx_ensemble import acquire, uncertainty

special = pytest.importorskip("scipy.special", reason="the reference probabilities are scipy's")
RNG = np.random.default_rng(0)
LOGITS, WEIGHTS, KEY = 2 * RNG.normal(size=(4, 9, 3)), np.array([0.4, 0.1, 0.2, 0.3]), jax.random.key(0)


def information(rows, logits=LOGITS, weights=WEIGHTS):
    """The mutual information of the labels of some rows and the member, by brute force over all labels."""
    weights = np.full(len(logits), 1 / len(logits)) if weights is None else weights / weights.sum()
    each = special.softmax(logits.astype(float), axis=-1)
    total = 0.0
    for labels in itertools.product(range(logits.shape[2]), repeat=len(rows)):
        given = np.ones(len(logits))
        for row, label in zip(rows, labels, strict=True):
            given = given * each[:, row, label]
        mixed = weights @ given
        total += np.sum(weights * special.rel_entr(given, mixed))
    return total


def greedy(size, *, chosen=(), allowed=range(9), **options):
    taken, indices, values = list(chosen), [], []
    for _ in range(size):
        before = information(taken, **options)
        open_ = [i for i in allowed if i not in taken]
        gains = [information([*taken, i], **options) - before for i in open_]
        index = open_[int(np.argmax(gains))] if open_ else -1
        if index >= 0:
            taken = [*taken, index]
        indices, values = [*indices, index], [*values, information(taken, **options)]
    return indices, values


def check(picks, want, **tolerance):
    np.testing.assert_array_equal(picks.indices, want[0])
    np.testing.assert_allclose(picks.values, want[1], **{"rtol": 1e-5} | tolerance)


def test_bald_is_the_epistemic_entropy():
    kept = np.arange(9) != 2
    got = acquire.bald(np.where(kept[:, None], LOGITS, np.nan), weights=WEIGHTS, row_weights=kept)
    want = uncertainty.decompose_entropy(LOGITS, weights=WEIGHTS).epistemic
    np.testing.assert_allclose(got[kept], want[kept], rtol=1e-6)
    assert got[2] == -np.inf
    np.testing.assert_allclose(want, [information([i]) for i in range(9)], rtol=1e-5)
    np.testing.assert_array_equal(acquire.bald(LOGITS.reshape(4, 3, 3, 3)), acquire.bald(LOGITS).reshape(3, 3))


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_batch_bald_is_brute_force_over_all_labels(weights):
    with jax.enable_x64(True):
        got = acquire.batch_bald(LOGITS, 4, weights=weights)
    check(got, greedy(4, weights=weights), rtol=1e-12)  # 3 ** 4 joint labels
    check(acquire.batch_bald(LOGITS.astype(np.float32), 4, weights=weights), greedy(4, weights=weights))
    # Near duplicates of the best row are the best one by one, and tell little together.
    copies = np.concatenate([np.repeat(LOGITS[:, np.asarray(got.indices)[:1]], 3, axis=1), LOGITS[:, :6]], axis=1)
    alone = np.argsort(-np.asarray(acquire.bald(copies, weights=weights)))[:3]
    together = acquire.batch_bald(copies, 3, weights=weights)
    check(together, greedy(3, logits=copies, weights=weights))
    assert information(alone, logits=copies, weights=weights) < 0.95 * float(together.values[-1])


def test_masks_and_chosen_rows():
    kept = np.arange(9) != 5
    spoilt = np.where(kept[:, None], LOGITS, np.nan)
    got = acquire.batch_bald(spoilt, 2, weights=WEIGHTS, row_weights=kept, chosen=np.array([1, -1, 4]))
    check(got, greedy(2, chosen=[1, 4], allowed=np.flatnonzero(kept)))
    broken = np.concatenate([LOGITS, np.full((1, 9, 3), np.nan)])
    check(acquire.batch_bald(broken, 3, weights=np.append(WEIGHTS, 0)), greedy(3))


def test_members_that_exclude_labels():
    """Probabilities of zero, and joint labels that are impossible under every member."""
    logits = LOGITS.copy()
    logits[0, :, 0] = logits[1, :, 1] = logits[:, 3, 2] = -np.inf
    want = greedy(3, logits=logits)
    check(acquire.batch_bald(logits, 3, weights=WEIGHTS), want)
    sampled = acquire.batch_bald(logits, 3, weights=WEIGHTS, max_outcomes=1, num_samples=40_000, key=KEY)
    check(sampled, want, rtol=0.02)


def test_small_disagreement_is_not_lost():
    """Of members that differ by 1e-3, whose differences of entropies are below the rounding of float32."""
    logits = (LOGITS[0] + 1e-3 * RNG.normal(size=LOGITS.shape)).astype(np.float32)
    want = greedy(3, logits=logits)
    check(acquire.batch_bald(logits, 3, weights=WEIGHTS), want, rtol=1e-2)
    each = special.softmax(logits, axis=-1)
    entropies = lambda p: -np.sum(p * np.log(p), axis=-1)
    plain = entropies(np.average(each, axis=0, weights=WEIGHTS)) - np.average(entropies(each), axis=0, weights=WEIGHTS)
    assert not np.allclose(plain, acquire.bald(logits, weights=WEIGHTS), rtol=0.1, atol=0)


@pytest.mark.parametrize("max_outcomes", [1, 9])
def test_sampled_labels(max_outcomes):
    rows = greedy(4)[0]
    only = np.isin(np.arange(9), rows)  # nothing to choose: the mean over keys is that of all labels
    options = {"weights": WEIGHTS, "row_weights": only, "chosen": np.array(rows[:3]), "max_outcomes": max_outcomes}
    sample = lambda key: acquire.batch_bald(LOGITS, 1, num_samples=2000, key=key, **options)
    got = jax.jit(jax.vmap(sample))(jax.random.split(KEY, 200))
    assert (np.asarray(got.indices) == rows[3]).all()
    values = np.asarray(got.values)
    error, want = values.std(ddof=1) / np.sqrt(200), information(rows)
    assert abs(values.mean() - want) < 5 * error
    assert error < 1e-3
    # Labels drawn row by row, of members that are drawn anew, would tell nothing of each other.
    assert abs(want - sum(information([i]) for i in rows)) > 100 * error
    chosen = acquire.batch_bald(
        LOGITS, 2, weights=WEIGHTS, max_outcomes=1, num_samples=40_000, chosen=np.array([1, -1, 4]), key=KEY
    )
    check(chosen, greedy(2, chosen=[1, 4]), rtol=0.02)


def test_power_bald_draws_in_proportion():
    scores = np.asarray(acquire.bald(LOGITS, weights=WEIGHTS), float)
    for power in (0.0, 1.0, 3.0):
        draw = lambda key: acquire.power_bald(LOGITS, 2, power=power, weights=WEIGHTS, key=key)  # noqa: B023
        picks = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(KEY, 8000)))
        assert (picks[:, 0] != picks[:, 1]).all()
        share = scores**power / np.sum(scores**power)
        # The second pick: in proportion among the rest.
        second = np.array([sum(share[i] * share[j] / (1 - share[i]) for i in range(9) if i != j) for j in range(9)])
        for column, law in ((0, share), (1, second)):
            found = np.bincount(picks[:, column], minlength=9) / 8000
            assert (np.abs(found - law) < 5 * np.sqrt(law / 8000)).all()
    assert not np.allclose(share, scores / scores.sum(), atol=0.05)
    kept = np.arange(9) != 2
    agreeing = np.where((np.arange(9) < 5)[:, None], LOGITS[:1], LOGITS)  # where members agree
    every = acquire.power_bald(np.where(kept[:, None], agreeing, np.nan), 8, row_weights=kept, key=KEY)
    assert set(np.asarray(every)[:4]) == {5, 6, 7, 8}
    assert set(np.asarray(every)) == set(np.flatnonzero(kept))


def test_transforms():
    plain = acquire.batch_bald(LOGITS, 3)
    mapped = jax.jit(jax.vmap(lambda x: acquire.batch_bald(x, 3)))(np.stack([LOGITS, LOGITS]))
    np.testing.assert_array_equal(mapped.indices, [plain.indices] * 2)
    traced = jax.jit(lambda kept: acquire.batch_bald(LOGITS, 3, row_weights=kept))(np.arange(9) == 4)
    np.testing.assert_array_equal(traced.indices, [4, -1, -1])
    np.testing.assert_allclose(traced.values, information([4], weights=None), rtol=1e-5)
    sampled = jax.jit(lambda kept: acquire.batch_bald(LOGITS, 3, row_weights=kept, max_outcomes=1, key=KEY))
    np.testing.assert_array_equal(sampled(np.arange(9) == 4).indices, [4, -1, -1])


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(TypeError, match="`acquire.batch_bald` needs a `key` for batches of more than 8 joint outcomes"):
        acquire.batch_bald(LOGITS, 3, max_outcomes=8)
    acquire.batch_bald(LOGITS, 3, max_outcomes=9)
    with pytest.raises(
        ValueError, match=r"needs `logits` of shape \(members, candidates, classes\).\n  got shape \(4, 3\)"
    ):
        acquire.batch_bald(LOGITS[:, 0], 1)
    with pytest.raises(ValueError, match="needs `logits` without NaN"):
        acquire.power_bald(np.where(np.arange(9)[:, None] == 1, np.nan, LOGITS), 1, key=KEY)
    with pytest.raises(ValueError, match="`acquire.power_bald` needs a finite `power` of zero or more.\n  got inf"):
        acquire.power_bald(LOGITS, 1, power=np.inf, key=KEY)
