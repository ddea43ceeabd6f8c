"""Acquisition: quadrature, many digits, searches over sets, sums over all labels, and the laws of draws."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import acquire, uncertainty

integrate = pytest.importorskip("scipy.integrate")
mpmath = pytest.importorskip("mpmath")
special = pytest.importorskip("scipy.special")
RNG = np.random.default_rng(0)
MEAN, VARIANCE = RNG.normal(size=(3, 7)), np.exp(RNG.normal(size=(3, 7)))
WEIGHTS, BEST = np.array([0.5, 0.2, 0.3]), 0.4
SIGN = {"max": 1, "min": -1}
FUNCTIONS = (acquire.expected_improvement, acquire.log_expected_improvement, acquire.probability_of_improvement)


def _integral(of, mean, variance, best, sign):
    """The mean of `of(improvement)` under a Gaussian, over the values that improve."""
    sigma = np.sqrt(variance)
    density = lambda x: np.exp(-0.5 * ((x - mean) / sigma) ** 2) / np.sqrt(2 * np.pi) / sigma
    far = max(best, mean) + 12 * sigma if sign > 0 else min(best, mean) - 12 * sigma
    ends = sorted((best, far))
    near = [x for x in (mean,) if ends[0] < x < ends[1]]
    value = lambda x: of(sign * (x - best)) * density(x)
    return integrate.quad(value, *ends, points=near or None, epsabs=1e-14, epsrel=1e-12, limit=200)[0]


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("per_member", [False, True])
def test_closed_forms_are_the_integrals(mode, per_member):
    best = np.array([0.4, -0.3, 1.1]) if per_member else np.float64(BEST)
    each = np.broadcast_to(best, 3)

    def mixture(of):
        return [
            sum(w * _integral(of, m, v, b, SIGN[mode]) for w, m, v, b in zip(WEIGHTS, ms, vs, each, strict=True))
            for ms, vs in zip(MEAN.T, VARIANCE.T, strict=True)
        ]

    options = {"best": best, "mode": mode, "weights": WEIGHTS}
    with jax.enable_x64(True):
        got = acquire.expected_improvement(MEAN, VARIANCE, **options)
        logs = acquire.log_expected_improvement(MEAN, VARIANCE, **options)
        above = acquire.probability_of_improvement(MEAN, VARIANCE, **options)
        assert got.dtype == logs.dtype == above.dtype == np.float64
    want = mixture(lambda x: x)
    np.testing.assert_allclose(got, want, rtol=1e-8)
    np.testing.assert_allclose(logs, np.log(want), atol=1e-8)
    np.testing.assert_allclose(above, mixture(lambda x: 1.0), rtol=1e-8)


@pytest.mark.parametrize("mode", ["max", "min"])
def test_members_as_samples(mode):
    better = np.maximum(SIGN[mode] * (MEAN - BEST), 0)
    options = {"best": BEST, "mode": mode, "weights": WEIGHTS}
    got = acquire.expected_improvement(MEAN, **options)
    np.testing.assert_allclose(got, WEIGHTS @ better, rtol=1e-5, atol=1e-7)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(acquire.log_expected_improvement(MEAN, **options), np.log(got), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(acquire.probability_of_improvement(MEAN, **options), WEIGHTS @ (better > 0), rtol=1e-5)
    for function in FUNCTIONS:
        np.testing.assert_array_equal(function(MEAN, 0 * MEAN, **options), function(MEAN, **options))
    none = acquire.log_expected_improvement(MEAN, best=SIGN[mode] * 99.0, mode=mode)
    assert (np.asarray(none) == -np.inf).all()
    # A value that equals the best one is no improvement.
    assert acquire.probability_of_improvement(np.ones((1, 1)), best=1.0, mode=mode) == 0


def _log_excess(z):
    """Log of h(z) = pdf(z) + z cdf(z), to 60 digits beyond what cancels."""
    mpmath.mp.dps = 80
    z = mpmath.mpf(float(z))
    if z < -30:  # its asymptotic series, whose terms fall below 1e-40 there
        term, total = mpmath.mpf(1), mpmath.mpf(0)
        for k in range(1, 40):
            total, term = total + term, -term * (2 * k + 1) / z**2
        return -(z**2) / 2 - mpmath.log(2 * mpmath.pi) / 2 + mpmath.log(total / z**2)
    return mpmath.log(mpmath.npdf(z) + z * mpmath.ncdf(z))


SCORES = np.concatenate([-np.logspace(5, -3, 60), [0], np.logspace(-3, 3, 20), np.linspace(-2.2, -1.8, 41)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logarithm_to_machine_precision(dtype):
    rounding = 8 * np.finfo(dtype).eps
    scores = SCORES.astype(dtype)
    want = np.array([float(_log_excess(z)) for z in scores])
    with jax.enable_x64(dtype == np.float64):
        mean, variance = scores[None], np.ones_like(scores)[None]
        got = acquire.log_expected_improvement(mean, variance, best=0.0, mode="max")
        plain = acquire.expected_improvement(mean, variance, best=0.0, mode="max")
        slope = jax.grad(lambda x: jnp.sum(acquire.log_expected_improvement(x, variance, best=0.0, mode="max")))(mean)
    got, plain, slope = (np.asarray(x) for x in (got, plain, slope))
    assert got.dtype == plain.dtype == dtype
    # Where the value is near zero, its rounding is that of h.
    assert (np.abs(got - want) <= rounding * np.maximum(np.abs(want), 3)).all()
    assert want.min() < -4.9e9
    seen = want > np.log(np.finfo(dtype).tiny) + 1
    # The exponent of h rounds by half an ulp of itself.
    scale = np.maximum(np.abs(want[seen]), 3)
    assert (np.abs(plain[seen] / np.exp(want[seen]) - 1) <= rounding * scale).all()
    # Its slope is cdf / h, about |z| far below.
    mpmath.mp.dps = 80
    ends = scores > -30
    exact = [float(mpmath.ncdf(float(z)) / mpmath.exp(_log_excess(z))) for z in scores[ends]]
    np.testing.assert_allclose(slope[0][ends], exact, rtol=10 * rounding)
    np.testing.assert_allclose(slope[0][~ends], -scores[~ends] - 2 / scores[~ends], rtol=1e-5)


def test_extreme_variances_and_gradients():
    mean = np.float32([[-1.0, 1.0, -1.0, 0.0, -30.0], [-2.0, 1.0, 3.0, 0.0, -20.0]])
    variance = np.float32([[1e-38, 1e-38, 0.0, 0.0, 1.0], [1e30, 0.0, 1e-38, 0.0, 1e-6]])
    of = lambda mean, variance: acquire.log_expected_improvement(mean, variance, best=0.0, mode="max")
    want = [np.log(0.5e15 / np.sqrt(2 * np.pi)), 0, np.log(1.5), -np.inf, float(_log_excess(-30)) + np.log(0.5)]
    np.testing.assert_allclose(of(mean, variance), want, rtol=1e-6, atol=1e-6)
    total = lambda *x: jnp.sum(of(*x)[jnp.array([0, 1, 2, 4])])
    for slope in jax.grad(total, argnums=(0, 1))(mean, variance):
        assert np.isfinite(slope).all()
        assert np.abs(slope).max() > 0
    for function in FUNCTIONS:
        assert np.isnan(function(np.float32([[np.nan]]), best=0.0, mode="max")).all()
        assert np.isnan(function(np.float32([[1.0]]), np.float32([[np.nan]]), best=0.0, mode="max")).all()


@pytest.mark.parametrize("mode", ["max", "min"])
def test_confidence_bound(mode):
    centre, noise = np.average(MEAN, axis=0, weights=WEIGHTS), np.average(VARIANCE, axis=0, weights=WEIGHTS)
    between = np.average((MEAN - centre) ** 2, axis=0, weights=WEIGHTS)
    for variance, total in ((VARIANCE, noise + between), (None, between)):
        got = acquire.confidence_bound(MEAN, variance, beta=3.0, mode=mode, weights=WEIGHTS)
        np.testing.assert_allclose(got, SIGN[mode] * centre + np.sqrt(3 * total), rtol=1e-5)
    slope = jax.grad(lambda x: jnp.sum(acquire.confidence_bound(x, beta=3.0, mode=mode)))(np.ones((3, 2), np.float32))
    np.testing.assert_allclose(slope, SIGN[mode] / 3, rtol=1e-6)  # where members agree


KEY = jax.random.key(0)
BATCHES = [acquire.batch_expected_improvement, acquire.batch_probability_of_improvement]


def greedy(criterion, size, *, chosen=(), allowed):
    """The picks of a search that adds one candidate after another, and the criterion of each set."""
    taken, indices, values = list(chosen), [], []
    for _ in range(size):
        open_ = [i for i in allowed if i not in taken]
        index = open_[int(np.argmax([criterion([*taken, i]) for i in open_]))] if open_ else -1
        taken = [*taken, index] if index >= 0 else taken
        indices, values = [*indices, index], [*values, criterion(taken)]
    return indices, values


def assert_picks(picks, want, rtol=1e-5):
    np.testing.assert_array_equal(picks.indices, want[0])
    np.testing.assert_allclose(picks.values, want[1], rtol=rtol)


PREDICTIONS, BATCH_WEIGHTS = RNG.normal(size=(6, 12)).astype(np.float32), RNG.uniform(size=6)
KEY = jax.random.key(0)
BATCHES = [acquire.batch_expected_improvement, acquire.batch_probability_of_improvement]


@pytest.mark.parametrize("function", BATCHES, ids=["expected_improvement", "probability"])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_greedy_picks_are_those_of_a_search(function, mode):
    def joint(chosen, best=BEST):
        """The criterion of a set."""
        better = SIGN[mode] * (PREDICTIONS[:, chosen].astype(float) - np.reshape(best, (-1, 1)))
        each = np.maximum(better, 0) if function is BATCHES[0] else better > 0
        return np.average(each.max(axis=1, initial=0), weights=BATCH_WEIGHTS)

    # Four picks: with more, gains are zero, and rounding decides.
    size, options = 4 if function is BATCHES[0] else 2, {"best": BEST, "mode": mode, "weights": BATCH_WEIGHTS}
    picks = function(PREDICTIONS, size, **options)
    assert_picks(picks, greedy(joint, size, allowed=range(12)))
    kept = np.arange(12) % 5 > 0
    spoilt = np.where(kept, PREDICTIONS, np.nan)
    assert_picks(
        function(spoilt, size, row_weights=kept, chosen=np.array([3, -1]), **options),
        greedy(joint, size, chosen=[3], allowed=np.flatnonzero(kept)),
    )
    each = np.quantile(PREDICTIONS, 0.6, axis=1).astype(np.float32)
    want = greedy(lambda chosen: joint(chosen, each), size, allowed=range(12))
    assert_picks(function(PREDICTIONS, size, **options | {"best": each}), want)
    # The best candidates one by one are another batch.
    if function is BATCHES[0]:
        assert set(np.argsort([joint([i]) for i in range(12)])[-size:]) != set(np.asarray(picks.indices))


def test_each_pick_is_that_of_a_member():
    weights = np.array([0.5, 0.25, 0.25])
    # The members' favourites are 0, 1 and 2; what comes next is 3 for all.
    predictions = np.concatenate([np.eye(3), np.full((3, 1), 0.5)], axis=1)
    picks = acquire.thompson(predictions, 4000, mode="max", replace=True, weights=weights, key=KEY)
    counts = np.bincount(picks, minlength=4)
    assert (np.abs(counts - 4000 * np.append(weights, 0)) < 5 * np.sqrt(1000)).all()
    lowest = acquire.thompson(-predictions, 4000, mode="min", replace=True, weights=weights, key=KEY)
    np.testing.assert_array_equal(lowest, picks)
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


LOGITS, INFORMANTS = 2 * RNG.normal(size=(4, 9, 3)), np.array([0.4, 0.1, 0.2, 0.3])


def information(rows, logits=LOGITS, weights=INFORMANTS):
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


def informative(size, *, chosen=(), allowed=range(9), **options):
    return greedy(lambda rows: information(rows, **options), size, chosen=chosen, allowed=allowed)


def test_bald_is_the_epistemic_entropy():
    kept = np.arange(9) != 2
    got = acquire.bald(np.where(kept[:, None], LOGITS, np.nan), weights=INFORMANTS, row_weights=kept)
    want = uncertainty.decompose_entropy(LOGITS, weights=INFORMANTS).epistemic
    np.testing.assert_allclose(got[kept], want[kept], rtol=1e-6)
    assert got[2] == -np.inf
    np.testing.assert_allclose(want, [information([i]) for i in range(9)], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, INFORMANTS])
def test_batch_bald_is_brute_force_over_all_labels(weights):
    want = informative(4, weights=weights)  # 3 ** 4 joint labels
    with jax.enable_x64(True):
        assert_picks(acquire.batch_bald(LOGITS, 4, weights=weights), want, rtol=1e-12)
    assert_picks(acquire.batch_bald(LOGITS.astype(np.float32), 4, weights=weights), want)
    # Near duplicates of the best row are the best one by one, and tell little together.
    copies = np.concatenate([np.repeat(LOGITS[:, want[0][:1]], 3, axis=1), LOGITS[:, :6]], axis=1)
    alone = np.argsort(-np.asarray(acquire.bald(copies, weights=weights)))[:3]
    together = acquire.batch_bald(copies, 3, weights=weights)
    assert_picks(together, informative(3, logits=copies, weights=weights))
    assert information(alone, logits=copies, weights=weights) < 0.95 * float(together.values[-1])


def test_masks_and_chosen_rows():
    kept = np.arange(9) != 5
    spoilt = np.where(kept[:, None], LOGITS, np.nan)
    got = acquire.batch_bald(spoilt, 2, weights=INFORMANTS, row_weights=kept, chosen=np.array([1, -1, 4]))
    assert_picks(got, informative(2, chosen=[1, 4], allowed=np.flatnonzero(kept)))
    broken = np.concatenate([LOGITS, np.full((1, 9, 3), np.nan)])
    assert_picks(acquire.batch_bald(broken, 3, weights=np.append(INFORMANTS, 0)), informative(3))


SAMPLED = {"weights": INFORMANTS, "max_outcomes": 1, "num_samples": 40_000, "key": KEY}


def test_members_that_exclude_labels():
    """Probabilities of zero, and joint labels that are impossible under every member."""
    logits = LOGITS.copy()
    logits[0, :, 0] = logits[1, :, 1] = logits[:, 3, 2] = -np.inf
    want = informative(3, logits=logits)
    assert_picks(acquire.batch_bald(logits, 3, weights=INFORMANTS), want)
    assert_picks(acquire.batch_bald(logits, 3, **SAMPLED), want, rtol=0.02)


def test_small_disagreement_is_not_lost():
    """Of members that differ by 1e-3, whose differences of entropies are below the rounding of float32."""
    noise = np.random.default_rng(3).normal(size=LOGITS.shape)
    logits = (LOGITS[0] + 3e-4 * noise).astype(np.float32)
    want = informative(3, logits=logits)
    assert_picks(acquire.batch_bald(logits, 3, weights=INFORMANTS), want, rtol=5e-2)


@pytest.mark.slow
@pytest.mark.parametrize("max_outcomes", [1, 9])
def test_sampled_labels(max_outcomes):
    rows = informative(4)[0]
    # Nothing to choose: the mean over keys is that of all labels.
    options = {"row_weights": np.isin(np.arange(9), rows), "chosen": np.array(rows[:3])}
    options |= SAMPLED | {"max_outcomes": max_outcomes, "num_samples": 2000}
    sample = lambda key: acquire.batch_bald(LOGITS, 1, **options | {"key": key})
    got = jax.jit(jax.vmap(sample))(jax.random.split(KEY, 200))
    assert (np.asarray(got.indices) == rows[3]).all()
    values = np.asarray(got.values)
    error, want = values.std(ddof=1) / np.sqrt(200), information(rows)
    assert abs(values.mean() - want) < 5 * error
    assert error < 1e-3
    # Labels drawn row by row, of members that are drawn anew, would tell nothing of each other.
    assert abs(want - sum(information([i]) for i in rows)) > 100 * error
    chosen = acquire.batch_bald(LOGITS, 2, chosen=np.array([1, -1, 4]), **SAMPLED)
    assert_picks(chosen, informative(2, chosen=[1, 4]), rtol=0.02)


def test_power_bald_draws_in_proportion():
    scores = np.asarray(acquire.bald(LOGITS, weights=INFORMANTS), float)
    for power in (0.0, 1.0, 3.0):
        draw = lambda key: acquire.power_bald(LOGITS, 2, power=power, weights=INFORMANTS, key=key)  # noqa: B023
        picks = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(KEY, 8000)))
        assert (picks[:, 0] != picks[:, 1]).all()
        share = scores**power / np.sum(scores**power)
        # The second pick: in proportion among the rest.
        second = np.array([sum(share[i] * share[j] / (1 - share[i]) for i in range(9) if i != j) for j in range(9)])
        for column, law in ((0, share), (1, second)):
            found = np.bincount(picks[:, column], minlength=9) / 8000
            assert (np.abs(found - law) < 5 * np.sqrt(law / 8000)).all()
    kept = np.arange(9) != 2
    agreeing = np.where((np.arange(9) < 5)[:, None], LOGITS[:1], LOGITS)  # where members agree
    every = acquire.power_bald(np.where(kept[:, None], agreeing, np.nan), 8, row_weights=kept, key=KEY)
    assert set(np.asarray(every)[:4]) == {5, 6, 7, 8}
    assert set(np.asarray(every)) == set(np.flatnonzero(kept))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"size": 13}, "needs `size` candidates or more"),
        ({"chosen": [0.5]}, "needs integer `chosen`"),
        ({"chosen": [3, 3]}, "different indices from 0 to 11 in `chosen`"),
        ({"chosen": [12]}, "different indices from 0 to 11 in `chosen`"),
        ({"row_weights": np.zeros(12, bool)}, "needs `row_weights` that keep at least one row"),
        (lambda: acquire.thompson(0 * PREDICTIONS / 0, 2, mode="max", key=KEY), "`predictions` without NaN"),
        (lambda: acquire.thompson(PREDICTIONS[..., None], 2, mode="max", key=KEY), r"shape \(members, candidates\)"),
        (lambda: acquire.batch_bald(LOGITS, 3, max_outcomes=8), "a `key` for batches of more than 8 joint outcomes"),
        (lambda: acquire.batch_bald(LOGITS[:, 0], 1), r"shape \(members, candidates, classes\)"),
        (lambda: acquire.power_bald(LOGITS, 1, power=np.inf, key=KEY), "a finite `power` of zero or more"),
    ],
)
def test_messages(call, message):
    picks = lambda size=2, **options: BATCHES[0](PREDICTIONS, size, best=0.0, mode="max", **options)
    with np.errstate(invalid="ignore"), pytest.raises((TypeError, ValueError), match=f"`acquire.*{message}"):
        picks(**call) if isinstance(call, dict) else call()


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("shape", [(), (4,), (4, 9)])
def test_regret_is_what_a_loop_counts(mode, shape):
    values = np.random.default_rng(0).normal(size=(4, 9))
    optimum = np.full(shape, 3.0) + np.arange(np.prod(shape, dtype=int)).reshape(shape) / 10
    lost = SIGN[mode] * (optimum.reshape(shape + (1,) * (2 - len(shape))) - values)
    got = jax.jit(lambda x: acquire.regret(x, optimum, mode=mode))(values)
    for run, step in itertools.product(range(4), range(9)):
        np.testing.assert_allclose(got.simple[run, step], min(lost[run, : step + 1]), rtol=1e-5)
        np.testing.assert_allclose(got.cumulative[run, step], sum(lost[run, : step + 1]), rtol=1e-5)
    rewards = acquire.regret(np.array([0, 1, 0]), 1, mode="max")
    np.testing.assert_array_equal(rewards.cumulative, [1, 1, 2])
