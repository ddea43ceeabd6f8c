from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal, scores

stats = pytest.importorskip("scipy.stats", reason="the exact laws are scipy's")

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
LABELS = RNG.integers(6, size=49)
LOGITS = (1.5 * RNG.normal(size=(49, 6)) + np.eye(6)[LABELS]).astype(np.float32)


def _scores(logits, penalty=0.0, num_free=0):
    """The definition, class by class: the probability of likelier classes, its own, and the price of its place."""
    p = np.exp(np.float64(logits))
    p /= p.sum(-1, keepdims=True)
    found = np.zeros_like(p)
    for i, row in enumerate(p):
        for c, own in enumerate(row):
            place = np.sum(row >= own)
            found[i, c] = row[row > own].sum() + own + penalty * max(0, place - num_free)
    return found


def _ranked(values, level):
    return np.sort(values)[-(-(len(values) + 1) * round(100 * level) // 100) - 1]


@pytest.mark.parametrize(("penalty", "num_free"), [(0.0, 0), (0.05, 2), (1.0, 1)])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_sets_are_those_of_the_definition(level, penalty, num_free):
    if penalty == 0:
        fitted = conformal.aps(LOGITS, LABELS, level=level)
    else:
        fitted = conformal.raps(LOGITS, LABELS, level=level, penalty=penalty, num_free=num_free)
    each = _scores(LOGITS, penalty, num_free)
    want = _ranked(each[np.arange(49), LABELS], level)
    np.testing.assert_allclose(fitted.threshold, want, rtol=1e-5)
    new = LOGITS[::-1] * 0.7
    np.testing.assert_array_equal(fitted(new), _scores(new, penalty, num_free) <= want)
    assert not np.array_equal(fitted(new), _scores(new, penalty + 0.1, num_free) <= want)


def test_equal_probabilities_have_equal_scores():
    logits = np.log(np.array([[0.2, 0.3, 0.2, 0.3]], np.float32))
    np.testing.assert_allclose(_scores(logits), [[0.8, 0.3, 0.8, 0.3]], rtol=1e-6)
    rows, labels = np.tile(logits, (9, 1)), np.array([1] * 8 + [0])
    fitted = conformal.aps(rows, labels, level=0.8)
    np.testing.assert_allclose(fitted.threshold, 0.3, rtol=1e-5)
    np.testing.assert_array_equal(fitted(logits), [[False, True, False, True]])
    order = np.array([3, 2, 1, 0])
    for threshold in (0.29, 0.31, 0.79, 0.81):
        sets = eqx.tree_at(lambda fitted: fitted.threshold, fitted, jnp.asarray(threshold))
        np.testing.assert_array_equal(sets(logits[:, order]), sets(logits)[:, order])
        np.testing.assert_array_equal(sets(logits)[0, :2], [threshold > 0.8, threshold > 0.3])


def _covered(fit, key, repeats, held_out, new, sharpness=1.0):
    """How many of the new rows are covered, in many repetitions, for a model that is unsure of the wrong things."""
    rng = np.random.default_rng(0)
    logits = (1.5 * rng.normal(size=(repeats, held_out + new, 5))).astype(np.float32)
    truth = np.exp(0.5 * np.float64(logits) + np.linspace(0, 2, 5))
    truth /= truth.sum(-1, keepdims=True)
    labels = (truth.cumsum(-1) < rng.uniform(size=(repeats, held_out + new, 1))).sum(-1)

    def covered(x, y, key):
        if key is None:
            sets = fit(x[:held_out], y[:held_out], level=0.8)(x[held_out:])
        else:
            one, other = jax.random.split(key)
            sets = fit(x[:held_out], y[:held_out], level=0.8, key=one)(x[held_out:], key=other)
        return jnp.sum(scores.set_coverage(sets, y[held_out:], reduction="none"))

    keys = None if key is None else jax.random.split(key, repeats)
    logits = (sharpness * logits).astype(np.float32)
    return np.asarray(jax.jit(jax.vmap(covered, in_axes=(0, 0, None if key is None else 0)))(logits, labels, keys))


_PENALISED = partial(conformal.raps, penalty=0.1, num_free=0)


@pytest.mark.parametrize(
    ("fit", "key", "sharpness"),
    [
        (conformal.aps, None, 1.0),
        (conformal.aps, KEY, 1.0),
        # The probabilities of the likeliest classes round to one: by their sums alone, all rows would tie.
        (conformal.aps, KEY, 1000.0),
        pytest.param(_PENALISED, KEY, 1000.0, marks=pytest.mark.slow),
    ],
)
def test_coverage_follows_its_beta_binomial_law(fit, key, sharpness):
    # Scores of random logits do not tie, so that coverage is as exact as that of intervals.
    held_out, new, repeats = 29, 20, 6000
    counts = _covered(fit, key, repeats, held_out, new, sharpness)
    limit = np.sqrt(np.log(2e6) / (2 * repeats))
    grid = np.arange(new + 1)
    empirical = np.searchsorted(np.sort(counts), grid, side="right") / repeats
    distance = lambda k: np.abs(empirical - stats.betabinom(new, k, held_out + 1 - k).cdf(grid)).max()
    if key is None:
        # The last class has the score 1 in every row: these ties give more than is asked for, never less.
        assert (empirical - stats.betabinom(new, 24, 6).cdf(grid)).max() < limit
    else:
        assert distance(24) < limit
    assert min(distance(23), distance(26)) > 2 * limit


def test_randomised_sets_are_smaller():
    plain, drawn = conformal.aps(LOGITS, LABELS, level=0.8), conformal.aps(LOGITS, LABELS, level=0.8, key=KEY)
    assert isinstance(plain, conformal.Sets)
    assert isinstance(drawn, conformal.RandomisedSets)
    assert scores.set_size(drawn(LOGITS, key=KEY)) < scores.set_size(plain(LOGITS))
    assert not np.array_equal(drawn(LOGITS, key=KEY), drawn(LOGITS, key=jax.random.key(1)))
    np.testing.assert_array_equal(drawn(LOGITS, key=KEY), drawn(LOGITS, key=jax.random.PRNGKey(0)))


def test_a_penalty_makes_sets_smaller():
    rng = np.random.default_rng(0)
    labels = rng.integers(50, size=2000)
    logits = (rng.normal(size=(2000, 50)) + 5 * np.eye(50)[labels] * rng.uniform(size=(2000, 1))).astype(np.float32)
    fits = [
        conformal.aps(logits[:1000], labels[:1000], level=0.8),
        conformal.raps(logits[:1000], labels[:1000], level=0.8, penalty=0.1, num_free=3),
    ]
    plain, fewer = (fitted(logits[1000:]) for fitted in fits)
    assert scores.set_size(fewer) < scores.set_size(plain)
    for sets in (plain, fewer):
        assert abs(scores.set_coverage(sets, labels[1000:]) - 0.8) < 6 * np.sqrt(0.16 * 2 / 1000)


def test_masks_shapes_jit_and_files(tmp_path):
    mask = np.arange(49) % 4 > 0
    spoilt, labels = np.where(mask[:, None], LOGITS, np.nan), np.where(mask, LABELS, -7)
    got = conformal.raps(spoilt, labels, level=0.8, penalty=0.1, num_free=1, row_weights=mask)
    want = conformal.raps(LOGITS[mask], LABELS[mask], level=0.8, penalty=0.1, num_free=1)
    assert eqx.tree_equal(got, want)
    assert conformal.raps(LOGITS, LABELS, level=0.8, penalty=0.1, num_free=1).threshold != want.threshold
    np.testing.assert_array_equal(got(LOGITS.reshape(7, 7, 6)).reshape(49, 6), got(LOGITS))
    np.testing.assert_array_equal(got(LOGITS[0]), got(LOGITS)[0])
    np.testing.assert_array_equal(jax.jit(lambda fitted, x: fitted(x))(got, LOGITS), got(LOGITS))
    ee.save(tmp_path / "fitted", got)
    assert eqx.tree_equal(ee.load(tmp_path / "fitted", jax.tree.map(lambda x: 0 * x, got)), got)
    traced = jax.jit(lambda y: conformal.aps(LOGITS, y, level=0.8).threshold)
    assert traced(LABELS) == conformal.aps(LOGITS, LABELS, level=0.8).threshold
    assert np.isnan(traced(LABELS - 1))


def test_classes_of_tiny_probability_are_distinguished():
    # The probability left beyond each class is exp(-200), exp(-500) and nothing: all three scores round to one. The
    # class of probability zero comes last: only rows of this label put it into a set.
    logits = np.float32([200.0, 0.0, -np.inf, -300.0])
    for label, want in [(0, [1, 0, 0, 0]), (1, [1, 1, 0, 0]), (2, [1, 1, 1, 1]), (3, [1, 1, 0, 1])]:
        fitted = conformal.aps(np.tile(logits, (9, 1)), np.full(9, label), level=0.8)
        assert fitted.threshold == 1
        np.testing.assert_array_equal(fitted(logits), want)


def _of_one_group(logits, labels, *, level):
    groups = np.zeros(len(labels), np.int32)
    fitted = conformal.group_conditional(logits, labels, groups, level=level, num_groups=1, score="aps")
    return lambda x: fitted(x, groups)


@pytest.mark.parametrize("fit", [conformal.aps, _of_one_group])
def test_classes_of_probability_zero_are_in_no_set_that_is_certain(fit):
    # 170 rows are certain and right; 30 are not, and a third of their labels has the least probability.
    labels = np.arange(200) % 3
    p = np.eye(3)[labels]
    p[:30] = [0.5, 0.3, 0.2]
    with np.errstate(divide="ignore"):
        logits = np.log(np.float32(p))
    sets = np.asarray(fit(logits, labels, level=0.9)(logits))
    np.testing.assert_array_equal(sets[30:], np.eye(3)[labels[30:]])
    assert sets[np.arange(200), labels].mean() >= 0.9
    # Where too many labels have probability zero, nothing less than all classes covers them.
    wrong = (labels + (np.arange(200) % 4 == 0)) % 3
    assert np.asarray(fit(logits, wrong, level=0.9)(logits)).all()


def test_large_sets_are_pointed_out():
    # The label is the most likely class of every row. The rows that are certain set the threshold, which nine or ten
    # classes reach in the other half; the smallest sets have one.
    logits = np.float32([[8.0] + [0.0] * 9, np.linspace(1, 0, 10)] * 50)
    with pytest.warns(
        UserWarning, match=r"`conformal.aps`: .* `conformal.lac` 1\. Pass `key=` .*`conformal.lac`"
    ) as caught:
        conformal.aps(logits, np.zeros(100, np.int32), level=0.9)
    assert len(caught) == 1


def test_too_few_rows_hold_every_class():
    with pytest.warns(UserWarning, match="`conformal.aps`: 9 rows are too few for level 0.95"):
        fitted = conformal.aps(LOGITS[:9], LABELS[:9], level=0.95)
    assert np.asarray(fitted(LOGITS)).all()


@pytest.mark.parametrize("key", [None, KEY])
def test_what_cannot_be_scored_is_in_the_set(key):
    options = {} if key is None else {"key": key}
    fitted = conformal.aps(LOGITS, LABELS, level=0.5, key=key)
    spoilt = LOGITS.copy()
    spoilt[3] = np.nan
    sets, want = np.asarray(fitted(spoilt, **options)), np.asarray(fitted(LOGITS, **options))
    assert sets[3].all()
    assert not want[3].all()
    np.testing.assert_array_equal(np.delete(sets, 3, 0), np.delete(want, 3, 0))
    with pytest.raises(ValueError, match="`conformal.aps` needs `logits` without NaN.\n  got 1 of them"):
        conformal.aps(spoilt, LABELS, level=0.5, key=key)
    traced = jax.jit(lambda x: conformal.aps(x, LABELS, level=0.5, key=key)(LOGITS, **options))
    assert np.asarray(traced(spoilt)).all()


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match=r"`logits` of shape \(rows, classes\), at least one row.\n  got"):
        conformal.aps(np.stack([LOGITS, LOGITS]), LABELS, level=0.9)
    with pytest.raises(ValueError, match="`penalty` to be at least 0 and finite"):
        conformal.raps(LOGITS, LABELS, level=0.9, penalty=-1.0, num_free=1)
    with pytest.raises(ValueError, match="`num_free`"):
        conformal.raps(LOGITS, LABELS, level=0.9, penalty=1.0, num_free=-1)
    with pytest.raises(TypeError, match="integer `num_free`, got False"):
        conformal.raps(LOGITS, LABELS, level=0.9, penalty=1.0, num_free=False)
    with pytest.raises(TypeError, match="`conformal.aps` needs one key, got the integer 0"):
        conformal.aps(LOGITS, LABELS, level=0.9, key=0)
