import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, uncertainty
from eqx_ensemble._combination import _blocks
from eqx_ensemble._combination import _combination as _registry
from eqx_ensemble._combination import _combination as _summary
from eqx_ensemble.combine import QuantileSketch, streaming
from eqx_ensemble.combine import _robust as _sketch

MEAN = streaming(combine.mean)
MOMENTS = streaming(combine.moments)
MIXTURE = streaming(combine.mixture)
MEAN_LOGITS = streaming(combine.mean_logits)
GAUSSIAN = streaming(combine.gaussian)
VOTE = streaming(combine.vote)
DISAGREEMENT = streaming(uncertainty.disagreement)
RATIO = streaming(uncertainty.variation_ratio)
ENTROPY = streaming(uncertainty.decompose_entropy)
VARIANCE = streaming(uncertainty.decompose_variance)

MEMBERS = 7
WEIGHTS = np.array([0.5, 3.0, 0.0, 1.0, 0.2, 2.0, 1.5])
CUTS = {"one by one": range(1, MEMBERS), "uneven": [3, 6], "all at once": [], "one, then the rest": [1]}


def logits(seed=0, offset=0.0):
    drawn = 2 * np.random.default_rng(seed).normal(size=(MEMBERS, 5, 3)) + offset
    return jnp.asarray(drawn, jnp.float32)


def streamed(combination, predictions, weights=None, cuts=(3, 6), by=lambda fn: fn):
    partial, edges = None, [0, *cuts, MEMBERS]
    update = by(lambda partial, part, weights: combination.update(partial, part, weights=weights))
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        part = jax.tree.map(lambda x, first=first, last=last: x[first:last], predictions)
        partial = update(partial, part, None if weights is None else weights[first:last])
    return combination.finish(partial)


def as_moments(values, weights):
    values = np.asarray(values, np.float64)
    mean = np.average(values, axis=0, weights=weights)
    return mean, np.average((values - mean) ** 2, axis=0, weights=weights)


def as_disagreement(values, weights):
    votes, count = np.argmax(np.asarray(values), -1), len(values)
    share = np.full(count, 1 / count) if weights is None else weights / weights.sum()
    return sum(share[i] * share[j] * (votes[i] != votes[j]) for i in range(count) for j in range(count))


def pair(values):
    return values, jnp.exp(values)


# A combination, what it takes, and what it is on the whole: NumPy in float64, or the array function.
CASES = {
    "mean": (
        MEAN,
        lambda x: x,
        lambda x, w: np.average(np.asarray(x, np.float64), axis=0, weights=w),
    ),
    "moments": (MOMENTS, lambda x: x, as_moments),
    "mixture": (MIXTURE, lambda x: x, lambda x, w: combine.mixture(x, weights=w)),
    "mean_logits": (MEAN_LOGITS, lambda x: x, lambda x, w: combine.mean_logits(x, weights=w)),
    "gaussian": (GAUSSIAN, pair, lambda x, w: combine.gaussian(*x, weights=w)),
    "vote": (VOTE, lambda x: x, lambda x, w: combine.vote(x, weights=w)),
    "disagreement": (DISAGREEMENT, lambda x: x, as_disagreement),
    "variation_ratio": (
        RATIO,
        lambda x: x,
        lambda x, w: uncertainty.variation_ratio(x, weights=w),
    ),
    "entropy": (
        ENTROPY,
        lambda x: x,
        lambda x, w: uncertainty.decompose_entropy(x, weights=w),
    ),
    "variance": (
        VARIANCE,
        pair,
        lambda x, w: uncertainty.decompose_variance(*x, weights=w),
    ),
}


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize("case", CASES)
def test_is_the_array_function_of_the_whole(case, weights):
    combination, prepared, whole = CASES[case]
    predictions = prepared(logits())
    want = jax.tree.leaves(whole(predictions, weights))
    for cuts in CUTS.values():
        found = jax.tree.leaves(streamed(combination, predictions, weights, cuts))
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(combination(predictions, weights=weights))[0], want[0], rtol=2e-5)
    other = jax.tree.map(lambda x: x.at[0].set(x[0, ::-1, ::-1]), predictions)
    found = jax.tree.leaves(streamed(combination, other, weights))
    assert any(not np.allclose(got, expected, rtol=1e-3) for got, expected in zip(found, want, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_weights_outside_float32(case):
    """Only ratios matter: powers of two change no bit, and weights may differ much between chunks."""
    combination, prepared, whole = CASES[case]
    predictions = prepared(logits())
    want = jax.tree.leaves(streamed(combination, predictions, WEIGHTS))
    for power in (-170, 170):
        found = jax.tree.leaves(streamed(combination, predictions, WEIGHTS * 2.0**power))
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_array_equal(got, expected)
    for weights in (np.full(MEMBERS, 1e38), WEIGHTS * np.logspace(-50, -47, MEMBERS), WEIGHTS * 1e-50 + (WEIGHTS > 2)):
        want = jax.tree.leaves(whole(predictions, weights / weights.max()))
        found = jax.tree.leaves(streamed(combination, predictions, weights))
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


def test_quantiles_with_weights_outside_float32():
    sketch, values = QuantileSketch([0.2, 0.5, 0.8], size=3), logits()
    want = streamed(sketch, values, WEIGHTS)
    for power in (-170, 170):
        np.testing.assert_array_equal(streamed(sketch, values, WEIGHTS * 2.0**power), want)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize("case", CASES)
def test_rows_in_blocks(case, weights, monkeypatch):
    """Seven blocks of two rows, of which the last one repeats a row: each row's result is its own."""
    combination, prepared, _ = CASES[case]
    predictions = prepared(logits())
    many = jax.tree.map(lambda x: jnp.tile(x, (1, 3, 1))[:, :13], predictions)
    want, sizes = combination(predictions, weights=weights), []
    by_blocks = _blocks.by_blocks

    def noted(fn, predictions, **named):
        return by_blocks(lambda part: sizes.append(jax.tree.leaves(part)[0].shape[1]) or fn(part), predictions, **named)

    monkeypatch.setattr(_blocks, "_BYTES", 2 * sum(x.nbytes for x in jax.tree.leaves(many)) // 13)
    monkeypatch.setattr(_summary, "by_blocks", noted)
    got = combination(many, weights=weights)
    entries = 1 if combination.event_ndim else jax.tree.leaves(many)[0].shape[2]  # each a row of its own
    assert set(sizes) == (set() if case == "mean" else {13, 13 * entries, 2 * entries})  # 13 for a look at the shapes
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, jnp.concatenate([y, y, y])[:13], rtol=2e-6, atol=1e-6)


def test_every_function_with_a_streaming_form_has_a_case():
    assert {combination for combination, *_ in CASES.values()} == set(_registry._STREAMS.values())
    public = {fn for room in (combine, uncertainty) for fn in vars(room).values() if callable(fn)}
    assert set(_registry._STREAMS) <= public


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_any_size_of_any_shape_change_nothing(case, monkeypatch):
    """What is cut are rows: `(members, classes)` is one row, however many classes there are."""
    combination, prepared, whole = CASES[case]
    drawn = np.random.default_rng(len(case))
    least = 1 + combination.event_ndim
    for axes in (least, least + 1, least + 2):
        shape = (MEMBERS, *drawn.integers(2, 9, axes - 1))
        predictions = prepared(jnp.asarray(2 * drawn.normal(size=shape), jnp.float32))
        monkeypatch.setattr(_blocks, "_BYTES", int(drawn.integers(1, 4 * np.prod(shape) // 2)))
        found = jax.tree.leaves(combination(predictions, weights=WEIGHTS))
        for got, expected in zip(found, jax.tree.leaves(whole(predictions, WEIGHTS)), strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6, err_msg=str(shape))


def test_many_classes_of_one_row():
    """As large as blocks are for: more than 2 MiB."""
    values = jnp.asarray(np.random.default_rng(0).normal(size=(3, 200_000)), jnp.float32)
    assert values.nbytes > 2 * _blocks._BYTES
    np.testing.assert_allclose(jnp.sum(jnp.exp(MIXTURE(values))), 1, rtol=1e-5)
    np.testing.assert_allclose(jnp.sum(VOTE(values)), 1, rtol=1e-5)


def test_many_rows():
    """A compiler may treat large arrays otherwise: jaxlib 0.10.2 got a weighted mean wrong from 20,000 rows."""
    values = np.random.default_rng(0).normal(size=(4, 20_000, 10)).astype(np.float32)
    weights = np.array([1.0, 3.0, 2.0, 2.0])
    p = np.exp(values.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    mixed = np.average(p, axis=0, weights=weights)
    aleatoric = np.average(-(p * np.log(p)).sum(-1), axis=0, weights=weights)
    want = (-(mixed * np.log(mixed)).sum(-1), aleatoric, -(mixed * np.log(mixed)).sum(-1) - aleatoric)
    combination, moments, partial, moment = (
        ENTROPY,
        MOMENTS,
        None,
        None,
    )
    for chunk in (slice(0, 1), slice(1, 3), slice(3, 4)):
        partial = combination.update(partial, values[chunk], weights=weights[chunk])
        moment = moments.update(moment, values[chunk], weights=weights[chunk])
    whole = uncertainty.decompose_entropy(values, weights=weights)
    for found in (combination.finish(partial), combination(values, weights=weights), whole):
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_allclose(got, expected, atol=2e-6)
    for found in (moments.finish(moment), moments(values, weights=weights)):
        for got, expected in zip(found, as_moments(values, weights), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_compiled(case):
    combination, prepared, _ = CASES[case]
    predictions, weights = prepared(logits()), jnp.asarray(WEIGHTS, jnp.float32)
    found = streamed(combination, predictions, weights, [2, 3, 5], by=jax.jit)  # the third member alone has weight zero
    want = streamed(combination, predictions, weights)
    assert WEIGHTS[2] == 0
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_one_member_and_merging(case):
    combination, prepared, whole = CASES[case]
    predictions = prepared(logits())
    alone = jax.tree.map(lambda x: x[:1], predictions)
    for got, expected in zip(*map(jax.tree.leaves, (combination(alone), whole(alone, None))), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    first, second = (jax.tree.map(lambda x, s=s: x[s], predictions) for s in (slice(0, 2), slice(2, None)))
    parts = combination.update(None, first), combination.update(None, second)
    for merged in (combination.merge(*parts), combination.merge(*parts[::-1])):
        for got, expected in zip(
            jax.tree.leaves(combination.finish(merged)), jax.tree.leaves(combination(predictions)), strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)
    assert combination.merge(None, parts[0]) is parts[0]
    assert combination.merge(parts[0], None) is parts[0]


@pytest.mark.parametrize("case", CASES)
def test_a_member_of_weight_zero_may_be_nan(case):
    combination, prepared, _ = CASES[case]
    broken = jax.tree.map(lambda x: x.at[2].set(jnp.nan), prepared(logits()))
    want = streamed(combination, prepared(logits()), WEIGHTS)
    for cuts in ([2, 3], [4]):
        found = streamed(combination, broken, WEIGHTS, cuts)
        for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)
    assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(streamed(combination, broken)))


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
def test_variance_survives_an_offset(weights):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(MEMBERS, 50)) + 1e4, jnp.float32)
    mean, variance = as_moments(values, weights)
    found = streamed(MOMENTS, values, weights, range(1, MEMBERS))
    np.testing.assert_allclose(found.mean, mean, rtol=3e-7)
    # One column of fifty is 1.1e-4 off, all others less than 1e-5.
    np.testing.assert_allclose(found.variance, variance, rtol=2e-4)
    naive = jnp.mean(values**2, axis=0) - jnp.mean(values, axis=0) ** 2
    assert not np.allclose(naive, variance, rtol=0.5)


def test_a_thousand_members_one_by_one_at_an_offset():
    """Against NumPy in float64 on the float32 values: nothing is lost but the last rounding."""
    values = (np.random.default_rng(0).normal(size=(1024, 40)) + 1e4).astype(np.float32)
    mean, moments = None, None
    for value in values:
        mean, moments = (
            MEAN.update(mean, value[None]),
            MOMENTS.update(moments, value[None]),
        )
    want_mean, want_variance = as_moments(values, None)
    found = MOMENTS.finish(moments)
    for got in (MEAN.finish(mean), found.mean):
        np.testing.assert_allclose(got, want_mean, rtol=6e-8)  # half the spacing of float32
    np.testing.assert_allclose(found.variance, want_variance, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_merges_as_on_the_whole(bad):
    values = logits().at[1, 0, 0].set(bad)
    for cuts in CUTS.values():
        np.testing.assert_allclose(streamed(MEAN, values, cuts=cuts), np.mean(values, axis=0), rtol=1e-5, atol=1e-6)


def test_small_mutual_information_keeps_its_digits():
    base = np.random.default_rng(0).normal(size=(1, 20, 3))
    near = base + 1e-3 * np.random.default_rng(1).normal(size=(MEMBERS, 20, 3))
    p = np.exp(near) / np.exp(near).sum(-1, keepdims=True)
    mixed = p.mean(0)
    want = np.mean(np.sum(p * (np.log(p) - np.log(mixed)), -1), 0)
    parts = streamed(ENTROPY, jnp.asarray(near, jnp.float32), None, range(1, MEMBERS))
    assert want.max() < 1e-6
    # Float32 logits near 1 are known to 1e-7, their differences here of 1e-3 to 1e-4.
    np.testing.assert_allclose(parts.epistemic, want, rtol=1e-2)
    difference = np.asarray(uncertainty.entropy(jnp.asarray(np.log(mixed), jnp.float32))) - parts.aleatoric
    assert not np.allclose(difference, want, rtol=1e-1)


def test_members_that_agree_do_not_disagree_by_rounding():
    agreed = jnp.tile(jnp.array([1.0, 0.0, 0.0]), (MEMBERS, 1))
    for seed in range(20):
        weights = np.random.default_rng(seed).uniform(size=MEMBERS)
        assert streamed(DISAGREEMENT, agreed, weights) == 0
        assert streamed(DISAGREEMENT, agreed.at[0].set(jnp.array([0.0, 1.0, 0.0])), weights) > 0


LEVELS = [0.0, 0.1, 0.25, 0.5, 0.9, 1.0]


@pytest.mark.parametrize("weights", [None, WEIGHTS * 10], ids=["equal", "weighted"])
def test_sketch_are_exact_for_few_members(weights):
    values = logits()
    counts = np.ones(MEMBERS, int) if weights is None else weights.astype(int)
    repeated = np.repeat(np.asarray(values), counts, axis=0)
    want = np.quantile(repeated, LEVELS, axis=0, method="averaged_inverted_cdf")
    for cuts in CUTS.values():
        found = streamed(QuantileSketch(LEVELS), values, weights, cuts)
        np.testing.assert_array_equal(found, np.moveaxis(want, 0, -1))


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_sketch_of_many_members(chunk):
    size, count, levels = 16, 600, [0.05, 0.3, 0.5, 0.99]
    values = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)
    combination, partial = QuantileSketch(levels, size=size), None
    for start in range(0, count, chunk):
        partial = combination.update(partial, values[start : start + chunk])
    assert sum(items.values.shape[0] for items in partial.tiers) < 2 * size * len(partial.tiers) < 250
    found = np.asarray(combination.finish(partial))
    bound = count * np.floor(np.log2(count / size)) / (2 * size) + 1  # one more for the midpoint
    ranks = (values[:, :, None] <= found[None]).sum(0)
    assert np.abs(ranks - count * np.array(levels)).max() <= bound
    assert np.abs(ranks - count * np.array(levels)).max() > 0
    ranks = (values[:, :, None] <= np.asarray(QuantileSketch(levels, size=1)(values))[None]).sum(0)
    assert np.abs(ranks - count * np.array(levels)).max() > bound


def rank_error(values, weights, *, size, chunk):
    """The mean over seeds, in columns, and levels of the distance of quantiles from their ranks, as a share of all."""
    levels = [
        0.02 + 0.04 * i for i in range(25)
    ]  # many: one level is off by where it falls between the items of a sketch
    combination, partial = QuantileSketch(levels, size=size), None
    for start in range(0, len(values), chunk):
        rows = slice(start, start + chunk)
        other = combination.update(None, values[rows], weights=None if weights is None else weights[rows])
        partial = combination.merge(partial, other)
    found = np.asarray(combination.finish(partial))
    counts = np.ones(len(values)) if weights is None else weights
    below = [counts @ (values < found[:, i]) + counts @ (values <= found[:, i]) for i in range(len(levels))]
    return np.mean(np.stack(below, axis=-1) / 2 / counts.sum() - np.array(levels))


@pytest.mark.parametrize(
    ("count", "chunk", "weighted"), [(350, 50, False), (600, 7, False), (600, 120, True), (72, 9, False)]
)
def test_sketch_are_right_on_average(count, chunk, weighted, monkeypatch):
    rng = np.random.default_rng(count + chunk)
    values = rng.normal(size=(count, 500)).astype(np.float32)
    weights = rng.integers(1, 4, size=count).astype(np.float32) if weighted else None
    bound = 0.002  # 500 seeds, each off by 2 % or less (root mean square): a standard error below 0.001
    assert abs(rank_error(values, weights, size=16, chunk=chunk)) < bound
    joined = _sketch._join_pairs
    monkeypatch.setattr(_sketch, "_join_pairs", lambda items, lean: joined(items, jnp.full_like(lean, -1)))
    assert abs(rank_error(values, weights, size=16, chunk=chunk)) > 2.5 * bound  # always the lower place


def test_sketches_of_equal_members_are_equal():
    values = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32)
    first, again = (QuantileSketch([0.3], size=8).update(None, values) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    turned = QuantileSketch([0.3], size=8).update(None, values[::-1])
    np.testing.assert_array_equal(first.tiers[1].values, turned.tiers[1].values)


def test_sketch_of_compiled_chunks_of_no_weight():
    combination, values = QuantileSketch([0.5]), logits()
    update = jax.jit(lambda partial, part, weights: combination.update(partial, part, weights=weights))
    partial = update(update(None, values[:3], jnp.ones(3)), values[3:], jnp.zeros(4))
    np.testing.assert_array_equal(combination.finish(partial), combination(values[:3]))
    assert not np.array_equal(combination(values[:3]), combination(values))
    assert np.isnan(combination.finish(update(None, values, jnp.zeros(MEMBERS)))).all()


@pytest.mark.parametrize("combination", [QuantileSketch([0.5]), MEAN], ids=["quantiles", "summary"])
def test_nothing_merged_with_nothing_is_nothing(combination):
    assert combination.merge(None, None) is None


def test_sketch_of_nan():
    values = logits().at[1, 2, 0].set(jnp.nan)
    found = np.asarray(streamed(QuantileSketch([0.5]), values))
    assert np.isnan(found[2, 0]).all()
    assert np.isnan(found).sum() == 1
    assert np.isfinite(streamed(QuantileSketch([0.5]), values, np.eye(MEMBERS)[0] + np.eye(MEMBERS)[3])).all()


def test_functions_without_a_streaming_form_are_refused_with_those_that_have_one():
    with pytest.raises(TypeError, match="combine.mean, combine.mean_logits, .* your own subclass") as caught:
        streaming(combine.median)
    registered = {form.public_name for form in _registry._STREAMS.values() if isinstance(form, _summary.Summary)}
    assert sorted(registered) == list(_registry.NAMES)
    assert "uncertainty.decompose_entropy" in str(caught.value)
    assert streaming(MEAN) is MEAN


BAD = {
    "no member": (lambda: MEAN.finish(None), ValueError, "`combine.mean` needs at least one member of positive weight"),
    "only zeros": (
        lambda: VOTE(logits(), weights=np.zeros(7)),
        ValueError,
        "needs at least one member of positive weight before `finish`",
    ),
    "weights": (
        lambda: MEAN(logits(), weights=[1.0, 2.0]),
        ValueError,
        r"expected shape \(7,\), got \(2,\)",
    ),
    "negative": (
        lambda: MEAN(logits(), weights=-WEIGHTS),
        ValueError,
        "finite `weights` of zero or more",
    ),
    "no axis": (lambda: MEAN(jnp.float32(1)), ValueError, "leading `members` axis"),
    "no pair": (
        lambda: VARIANCE(logits()),
        TypeError,
        r"a pair `\(mean, variance\)`, got",
    ),
    "three": (lambda: VARIANCE((logits(),) * 3), TypeError, "got a tuple of 3"),
    "a negative variance": (
        lambda: VARIANCE((logits(), logits())),
        ValueError,
        "`uncertainty.decompose_variance` needs variances of zero or more",
    ),
    "a pair": (
        lambda: MEAN((logits(), logits())),
        TypeError,
        "that are one array, got a tuple of 2",
    ),
    "a list": (lambda: VOTE([logits()] * 3), TypeError, "that are one array, got a list of 3"),
    "quantiles of a pair": (lambda: QuantileSketch([0.5])((logits(), logits())), TypeError, "one array, got a tuple"),
    "integers": (lambda: MEAN(np.ones((2, 3), int)), TypeError, "floating-point `predictions`"),
    "one class": (
        lambda: VOTE(jnp.ones((2, 3, 1))),
        ValueError,
        "`combine.vote` needs at least two",
    ),
    "levels": (lambda: QuantileSketch([0.5, 1.2]), ValueError, "`levels` from 0 to 1"),
    "one level": (lambda: QuantileSketch(0.5), TypeError, "a list of `levels`"),
    "size": (lambda: QuantileSketch([0.5], size=0), ValueError, "`size` of at least 1"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.usefixtures("unhooked")
def test_mistakes(case):
    do, error, message = BAD[case]
    with pytest.raises(error, match=message):
        do()
