import math

import jax
import numpy as np
import pytest

from eqx_ensemble import conformal

stats = pytest.importorskip("scipy.stats", reason="the exact laws are scipy's")

SCORES = np.random.default_rng(0).normal(size=99).astype(np.float32)
MASK = np.random.default_rng(1).uniform(size=99) < 0.5


@pytest.mark.filterwarnings("ignore:.*the share of rows to cover")
@pytest.mark.filterwarnings("ignore:.*rows are too few")
def test_rank_is_exact_for_every_percentage():
    # Scores 1, 2, ..., n, whose quantile is the rank itself. In floats, (n + 1) level is now and then too large.
    wrong = 0
    for n in (1, 9, 19, 99, 299):
        scores = np.arange(1, n + 1, dtype=np.float32)
        for percent in range(1, 100):
            rank = -(-(n + 1) * percent // 100)
            got = conformal.quantile(scores, level=percent / 100)
            assert got == (rank if rank <= n else np.inf), (n, percent)
            wrong += math.ceil((n + 1) * (percent / 100)) != rank
    assert wrong > 5
    assert conformal.quantile(np.arange(1.0, 10.0), level=0.1 + 0.2) == 3  # 0.30000000000000004
    assert conformal.quantile(np.arange(1.0, 12.0), level=1 / 3) == 4


def test_coverage_follows_its_beta_law():
    # Of uniform scores the coverage is the quantile itself: Beta(k, n + 1 - k), exactly.
    n, level, repeats = 29, 0.8, 20_000
    scores = np.random.default_rng(0).uniform(size=(repeats, n)).astype(np.float32)
    covered = np.asarray(jax.vmap(lambda s: conformal.quantile(s, level=level))(scores))
    # Dvoretzky, Kiefer, Wolfowitz and Massart: a false alarm in a million.
    limit = np.sqrt(np.log(2e6) / (2 * repeats))
    assert stats.kstest(covered, stats.beta(24, 6).cdf).statistic < limit
    error = 6 * covered.std() / np.sqrt(repeats)
    assert abs(covered.mean() - level) < error
    for wrong in (np.sort(scores)[:, 22], np.sort(scores)[:, 24], np.quantile(scores, level, axis=1)):
        assert stats.kstest(wrong, stats.beta(24, 6).cdf).statistic > 3 * limit
    # What an ordinary quantile would promise and not keep.
    assert np.quantile(scores, level, axis=1).mean() < level - error


def test_too_few_rows():
    with pytest.warns(UserWarning, match="9 rows are too few for level 0.95.*Hold out 19 rows"):
        assert conformal.quantile(SCORES[:9], level=0.95) == np.inf
    assert np.isfinite(conformal.quantile(SCORES[:19], level=0.95))
    with pytest.warns(UserWarning, match="Hold out 10 rows or more"):
        conformal.quantile(SCORES[:9], level=0.909)
    assert jax.jit(lambda s: conformal.quantile(s, level=0.89))(SCORES[:9]) == SCORES[:9].max()


def test_masks():
    want = conformal.quantile(SCORES[MASK], level=0.8)
    spoilt = np.where(MASK, SCORES, np.nan)
    assert conformal.quantile(spoilt, level=0.8, row_weights=MASK) == want
    assert jax.jit(lambda mask: conformal.quantile(spoilt, level=0.8, row_weights=mask))(MASK) == want
    assert conformal.quantile(SCORES, level=0.8) != want
    assert np.isnan(conformal.quantile(spoilt, level=0.8))
    few = np.arange(99) < 3
    assert jax.jit(lambda mask: conformal.quantile(SCORES, level=0.8, row_weights=mask))(few) == np.inf


def _weighted_loop(scores, weights, new, level):
    found = []
    for w in np.ravel(new):
        reached = 0.0
        quantile = np.inf
        for i in np.argsort(scores):
            reached += weights[i]
            if reached >= level * (weights.sum() + w) * (1 - 1e-9):
                quantile = scores[i]
                break
        found.append(quantile)
    return np.reshape(found, np.shape(new))


@pytest.mark.filterwarnings("ignore:.*the share of rows to cover")
@pytest.mark.parametrize("level", [0.07, 0.5, 0.8, 0.95])
def test_weighted_is_the_loop(level):
    rng = np.random.default_rng(0)
    weights, new = rng.gamma(1, size=99), 10 * rng.gamma(1, size=(2, 5))
    want = _weighted_loop(np.float64(SCORES), weights, new, level)
    got = conformal.weighted_quantile(SCORES, weights, new, level=level)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert not np.allclose(_weighted_loop(np.float64(SCORES), weights[::-1], new, level), want)
    spoilt = np.where(MASK, SCORES, np.nan)
    got = conformal.weighted_quantile(spoilt, np.where(MASK, weights, 0), new, level=level)
    np.testing.assert_allclose(got, _weighted_loop(np.float64(SCORES[MASK]), weights[MASK], new, level), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*the share of rows to cover")
@pytest.mark.parametrize("num_rows", [9, 19, 99])
def test_equal_weights_are_no_weights(num_rows):
    for level in (0.07, 0.29, 0.5, 0.57, 0.8, 0.9):
        want = conformal.quantile(SCORES[:num_rows], level=level)
        got = conformal.weighted_quantile(SCORES[:num_rows], np.full(num_rows, 0.3), np.full(2, 0.3), level=level)
        np.testing.assert_array_equal(got, [want, want])
    assert conformal.weighted_quantile(SCORES[:9], np.ones(9), np.ones(()), level=0.95) == np.inf


@pytest.mark.parametrize("masked", [False, True])
def test_equal_weights_of_many_rows(masked):
    # The rounding of a sum of 100,000 weights is worth several ranks.
    scores, rows = np.arange(1.0, 100_001, dtype=np.float32), 90_000 if masked else 100_000
    mask = np.arange(100_000) < rows if masked else None
    weights = np.where(np.arange(100_000) < rows, np.float32(0.1), 0)
    new = np.array([0.1, 0.0, 100.0], np.float32)
    for level in (0.5, 0.9, 0.95):
        fitted = lambda weights, level=level: conformal.weighted_quantile(scores, weights, new, level=level)
        got, rank = np.asarray(fitted(weights)), -(-(rows + 1) * round(100 * level) // 100)
        assert got[0] == rank == conformal.quantile(scores, level=level, row_weights=mask)
        # Other weights: as near as a sum in float32 can be.
        np.testing.assert_allclose(got[1:], level * (rows + np.array([0, 1000])), rtol=1e-5)
        if masked:
            np.testing.assert_array_equal(jax.jit(fitted)(weights), got)


def test_weights_undo_a_shift_of_the_inputs():
    # The score is the input, uniform in held-out rows and of density 2 x in new ones: the weight is the input.
    repeats, level = 4000, 0.8
    rng = np.random.default_rng(0)
    scores, new = rng.uniform(size=(repeats, 60)), np.sqrt(rng.uniform(size=repeats))
    quantile = jax.vmap(lambda s, x: conformal.weighted_quantile(s, s, x, level=level))(scores, new)
    limit = np.sqrt(np.log(1e6) / (2 * repeats))  # Hoeffding: a false alarm in a million
    assert np.mean(new <= np.asarray(quantile)) > level - limit
    plain = jax.vmap(lambda s: conformal.quantile(s, level=level))(scores)
    assert np.mean(new <= np.asarray(plain)) < level - limit


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match=r"`scores` of shape \(rows,\), at least one row.\n  got shape \(9, 11\)"):
        conformal.quantile(SCORES.reshape(9, 11), level=0.9)
    with pytest.raises(ValueError, match="a `level` between 0 and 1"):
        conformal.quantile(SCORES, level=90)
    with pytest.raises(TypeError, match=r"a Python number as `level`.\n  got array\(\[0.1, 0.9\]\)\nSeveral levels"):
        conformal.quantile(SCORES, level=np.array([0.1, 0.9]))
    with pytest.raises(TypeError, match="a Python number as `level`.\n  got '0.9'"):
        conformal.quantile(SCORES, level="0.9")
    with pytest.raises(TypeError, match="a Python number as `level`.\n  got a traced array"):
        jax.jit(lambda level: conformal.quantile(SCORES, level=level))(0.9)
    with pytest.raises(ValueError, match=r"one of `row_weights` per row.\n  expected shape \(99,\), got \(9,\)"):
        conformal.weighted_quantile(SCORES, np.ones(9), np.ones(1), level=0.9)
    with pytest.raises(ValueError, match="finite `new_weights` of zero or more.\n  got -1.0 at index"):
        conformal.weighted_quantile(SCORES, np.ones(99), -np.ones(1), level=0.9)


def test_an_error_rate_as_level():
    with pytest.warns(UserWarning, match="`level=0.1`, the share of rows to cover(.|\n)*pass `level=0.9`"):
        conformal.split(np.zeros(30), np.arange(30.0), level=0.1)
