"""Rankings beside scipy and analyses of variance by hand, and their false alarms."""

import numpy as np
import pytest
import scipy.stats

from eqx_ensemble.methods import rank

RNG = np.random.default_rng(0)
TRAIN, TEST = 80, 20


def columns(scores, names="abc"):
    """The table of `compare` for scores `(methods, folds, seeds)`, in another order."""
    scores = np.asarray(scores)
    method, fold, seed = np.indices(scores.shape).reshape(3, -1)
    sizes = {"train_rows": np.full(scores.size, TRAIN), "test_rows": np.full(scores.size, TEST)}
    found = {"method": np.array(list(names))[method], "fold": fold, "seed": seed, "rmse": scores.ravel()} | sizes
    order = np.random.default_rng(1).permutation(scores.size)
    return {name: column[order] for name, column in found.items()}


def of(found, method, baseline="a"):
    """One row of a ranking."""
    at = np.flatnonzero((np.asarray(found["method"]) == method) & (np.asarray(found["baseline"]) == baseline))
    return {
        name: np.asarray(found[name])[at].item() for name in ("mean", "difference", "error", "probability", "seeds")
    }


def by_hand(gaps):
    """The difference of folds `(folds, seeds)` in full, its error, and the probability that it is below zero."""
    folds, seeds = gaps.shape
    between, within = seeds * gaps.mean(1).var(ddof=1), gaps.var(axis=1, ddof=1).mean()  # the mean squares
    np.testing.assert_allclose(scipy.stats.f_oneway(*gaps).statistic, between / within)
    of_folds = max(between - within, 0) / seeds
    error = np.sqrt(between / (folds * seeds) + TEST / TRAIN * of_folds)
    return gaps.mean(), error, scipy.stats.t.sf(gaps.mean() / error, folds - 1)


@pytest.mark.parametrize("spread", [0, 0.5, 5])
def test_an_analysis_of_variance(spread):
    scores = RNG.normal(size=(3, 5, 4)) + spread * RNG.normal(size=(3, 5, 1)) - np.array([0, 0.3, 2])[:, None, None]
    found = rank(columns(scores), "rmse", "a")
    assert list(found["mean"]) == sorted(found["mean"])
    for name, own in zip("bc", scores[1:], strict=True):
        row = of(found, name)
        np.testing.assert_allclose(row["mean"], own.mean())
        np.testing.assert_allclose([row[x] for x in ("difference", "error", "probability")], by_hand(own - scores[0]))
    assert of(found, "a") == {
        "mean": scores[0].mean(),
        "difference": 0,
        "error": 0,
        "probability": 0.5,
        "seeds": np.inf,
    }


def test_one_seed_is_nadeau_and_bengio():
    scores = RNG.normal(size=(2, 5, 1))
    gaps, row = (scores[1] - scores[0])[:, 0], of(rank(columns(scores, "ab"), "rmse", "a"), "b")
    error = gaps.std(ddof=1) * np.sqrt(1 / 5 + TEST / TRAIN)
    np.testing.assert_allclose(row["error"], error)
    np.testing.assert_allclose(row["probability"], scipy.stats.t.cdf(0, 4, gaps.mean(), error))
    assert np.isnan(row["seeds"])  # how far seeds differ is unknown
    assert of(rank(columns(scores - [[[0]], [[99]]], "ab"), "rmse", "a"), "b")["seeds"] == 1


def test_one_fold_is_a_t_test_of_its_seeds():
    scores = RNG.normal(size=(2, 1, 20))
    gaps, row = (scores[1] - scores[0])[0], of(rank(columns(scores, "ab"), "rmse", "a"), "b")
    np.testing.assert_allclose(row["error"], scipy.stats.sem(gaps))
    np.testing.assert_allclose(row["probability"], scipy.stats.ttest_1samp(gaps, 0, alternative="greater").pvalue)
    row = of(rank(columns(scores[:, :, :1], "ab"), "rmse", "a"), "b")
    assert np.isnan([row["error"], row["probability"], row["seeds"]]).all()


def test_pairs_and_modes():
    scores = RNG.normal(size=(3, 4, 3))
    less, more = (rank(columns(scores * sign), "rmse", mode=mode) for sign, mode in ((1, "min"), (-1, "max")))
    assert list(zip(less["method"], less["baseline"], strict=True)) == list(
        zip(more["method"], more["baseline"], strict=True)
    )
    assert len(less["method"]) == 3
    np.testing.assert_allclose(less["probability"], more["probability"])
    for method, baseline in zip(less["method"], less["baseline"], strict=True):
        mirrored = of(rank(columns(scores), "rmse", method), baseline, method)
        np.testing.assert_allclose(of(less, method, baseline)["probability"], 1 - mirrored["probability"])
        assert of(less, method, baseline)["seeds"] == mirrored["seeds"]


def test_fits_that_diverged_are_left_out_with_their_partners():
    scores = RNG.normal(size=(2, 6, 4))
    scores[0, 5] = scores[1, 4] = scores[1, :4, 3] = np.nan
    row = of(rank(columns(scores, "ab"), "rmse", "a"), "b")
    expected = by_hand((scores[1] - scores[0])[:4, :3])
    np.testing.assert_allclose([row[x] for x in ("difference", "error", "probability")], expected)
    scores[1] = np.nan
    assert np.isnan(list(of(rank(columns(scores, "ab"), "rmse", "a"), "b").values())).all()


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (5, 1), (5, 3), (1, 4)])
def test_seeds_are_enough_where_two_are_told_apart(shape):
    for _ in range(20):
        scores = RNG.normal(size=(2, *shape)) + [[[0]], [[RNG.exponential(2)]]]
        row = of(rank(columns(scores, "ab"), "rmse", "a"), "b")
        if abs(row["probability"] - 0.5) >= 0.475:
            assert 1 <= row["seeds"] <= shape[1]
        else:
            assert np.isnan(row["seeds"]) or row["seeds"] > shape[1]


@pytest.mark.parametrize("spread", [1.4, 3])
def test_seeds_average_the_noise_of_training_alone(spread):
    folds, noise = spread * np.array([-1, -0.5, 0, 0.5, 1.0]), np.array([-2.0, 0, 2])
    within, between = 4, max(folds.var(ddof=1) - 4 / 3, 0)
    assert (between == 0) == (spread == 1.4)
    error = lambda seeds: np.sqrt(between * (1 / 5 + TEST / TRAIN) + within / (5 * seeds))

    def seeds_of(mean):
        gaps = mean + folds[:, None] + noise
        return of(rank(columns([np.zeros((5, 3)), gaps], "ab"), "rmse", "a"), "b")["seeds"]

    limit = scipy.stats.t.ppf(0.975, 4)
    assert seeds_of(limit * (error(17) + error(16)) / 2) == 17
    assert seeds_of(limit * (error(17) + error(18)) / 2) == 18
    assert seeds_of(0.9 * limit * error(np.inf) + 0.01) == np.inf  # folds alone hide it


def replays(scores, times=200):
    told = [abs(of(rank(columns(scores(), "ab"), "rmse", "a"), "b")["probability"] - 0.5) > 0.475 for _ in range(times)]
    return sum(told)


@pytest.mark.parametrize("shape", [(5, 5), pytest.param((10, 3), marks=pytest.mark.slow)])
def test_false_alarms(shape):
    """Of 200 comparisons of ridge regressions on random features, which differ by these alone; 24: one in a million."""
    rng = np.random.default_rng(0)

    def scores():
        """On fresh rows, fold by fold."""
        x = rng.normal(size=(60, 3))
        y = np.sin(2 * x[:, 0]) + 0.5 * rng.normal(size=60)
        folds, seeds = shape
        found = np.empty((2, *shape))
        for fold, test in enumerate(np.arange(60).reshape(folds, -1)):
            z = np.tanh(x @ rng.normal(size=(2, seeds, 3, 8)))
            train = np.delete(z, test, axis=2)
            gram = train.swapaxes(-1, -2) @ train + np.eye(8)
            weights = np.linalg.solve(gram, train.swapaxes(-1, -2) @ np.delete(y, test)[:, None])
            found[:, fold] = np.sqrt(np.mean((z[:, :, test] @ weights - y[test, None]) ** 2, axis=(2, 3)))
        return found

    most = scipy.stats.binom.ppf(1 - 1e-6, 200, 0.05)
    assert replays(scores) <= most
    gap = np.array([0, 0.5])[:, None, None]
    assert replays(lambda: scores() + gap, 20) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"score": "rsme"}, "`score` to be one of 'rmse', got 'rsme'"),
        ({"baseline": "seeds"}, "`baseline` to be one of 'one', 'two', got 'seeds'"),
        ({"mode": "maximise"}, "`mode` to be one of 'min', 'max', got 'maximise'"),
    ],
)
def test_words_that_are_not_there(unhooked, arguments, message):
    columns = {name: [0, 0] for name in ("seed", "fold", "train_rows", "test_rows")}
    columns |= {"method": ["one", "two"], "rmse": [1.0, 2.0], "train_rows": [2, 2], "test_rows": [1, 1]}
    with pytest.raises(ValueError, match=message):
        rank(columns, **{"score": "rmse"} | arguments)
