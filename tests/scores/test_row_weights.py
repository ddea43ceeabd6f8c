"""Weights of rows, in every score that takes them.

Whole numbers repeat rows; booleans are weights of zero and one; only ratios matter; rows of weight zero may be NaN.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqx_ensemble import scores

from .test_transforms import LABELS, LOGITS, MEAN, MEMBERS, NO_GRADIENT, SINGLE, TARGETS, VARIANCE

POSITIVES, TIED = np.arange(20) % 3 == 0, np.round(2 * TARGETS).astype(np.float32)
# Arguments, and how many axes stand before that of the rows.
CASES = {name: (arguments, [1] * (len(arguments) - 1) + [0]) for name, arguments in MEMBERS.items()}
CASES |= {name: (arguments, [0] * len(arguments)) for name, arguments in SINGLE.items()}
CASES |= {
    "dawid_sebastiani": ((MEAN, TARGETS), [1, 0]),
    "decompose_brier": ((LOGITS, LABELS), [1, 0]),
    "set_coverage": ((LOGITS[0] > 0, LABELS), [0, 0]),
    "by_group": ((TARGETS, LABELS), [0, 0]),
    "class_conditional_coverage": ((LOGITS[0] > 0, LABELS), [0, 0]),
    "size_stratified_coverage": ((LOGITS[0] > 0, LABELS), [0, 0]),
    "set_size": ((LOGITS[0] > 0,), [0]),
    **{name: ((TIED, POSITIVES), [0, 0]) for name in ("auroc", "aupr", "fpr_at_tpr")},
}
OPTIONS = {
    "fpr_at_tpr": {"level": 0.6},
    "by_group": {"num_groups": 4},
    "top_k_accuracy": {"k": 2},
    "mce": {"num_bins": 2},
    "threshold_weighted_crps": {"lower": -0.5},
    "ence": {"num_bins": 1},  # the edges of bins of equal mass are those of the mean weight
    "interval_score": {"level": 0.8},
    "pinball": {"level": 0.8},
    "squared_calibration_error": {"debiased": False, "binning": "width"},
}
# Tests of their own, below and in the curves': more rows mean more points, or less noise.
OTHERS = {"joint_nll", "aurc", "risk_coverage", "bootstrap", "roc_curve", "precision_recall_curve"}
NEEDS_SCORINGRULES = ("energy_score", "variogram_score", "interval_score", "pinball", "dawid_sebastiani")
# One of each kind: a mean of rows of classes and of numbers, a root, groups, bins, ranks, and a sum up to each level.
QUICK = {"brier", "crps", "rmse", "by_group", "ence", "auroc", "quantile_calibration_error"}
COPIES = 3


def score_of(name, **options):
    if name in NEEDS_SCORINGRULES:
        pytest.importorskip("scoringrules")
    return functools.partial(getattr(scores, name), **OPTIONS.get(name, {}), **options)


def along_rows(name, change):
    arguments, before = CASES[name]
    return [np.moveaxis(change(np.moveaxis(x, n, 0)), 0, n) for x, n in zip(arguments, before, strict=True)]


def spoilt(name, rows):
    """The arguments with NaN, or a label that is none, in some rows."""

    def spoil(x):
        x = x.copy()
        if x.dtype != bool:
            x[rows] = -7 if x.dtype.kind == "i" else np.nan
        return x

    return along_rows(name, spoil)


def assert_close(got, want, **tolerance):
    got, want = (x.mean if isinstance(x, scores.ByGroup) else x for x in (got, want))  # not the number of rows
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), got, want)


def test_every_score_takes_them():
    public = {name: value for name, value in vars(scores).items() if inspect.isfunction(value)}
    taking = {name for name, value in public.items() if "row_weights" in inspect.signature(value).parameters}
    # One value per row, whole counts, and the ranking that is best for equal weights alone.
    without_numbers = {"excess_aurc", "pit", "pit_gaussian_mixture", "pit_histogram", "rank_histogram"}
    assert taking == set(CASES) | OTHERS | without_numbers
    assert set(public) - taking == {"per_member"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_whole_numbers_repeat_rows(name):
    score, (arguments, _) = score_of(name), CASES[name]
    repeated = along_rows(name, lambda x: np.repeat(x, COPIES, axis=0))
    plain = score(*arguments)
    differs = []

    @settings(max_examples=5, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.integers(0, COPIES), min_size=20, max_size=20))
    def check(counts):
        counts = np.array(counts)
        if not (counts[POSITIVES].any() and counts[~POSITIVES].any()):
            return
        # Copies that are masked, so that all examples have one shape.
        copies = np.tile(np.arange(COPIES), 20) < np.repeat(counts, COPIES)
        want = score(*repeated, row_weights=copies)
        got = score(*spoilt(name, counts == 0), row_weights=counts)
        assert_close(got, want, rtol=2e-5, atol=1e-6)
        assert_close(score(*arguments, row_weights=counts * np.float32(0.3)), want, rtol=2e-5, atol=1e-6)
        differs.append(not np.allclose(jax.tree.leaves(got)[0], jax.tree.leaves(plain)[0], rtol=1e-3))

    check()
    assert any(differs)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_mask_is_weights_of_zero_and_one(name):
    score, mask = score_of(name), np.arange(20) % 4 > 0
    arguments = spoilt(name, ~mask)
    assert_close(score(*arguments, row_weights=mask.astype(int)), score(*arguments, row_weights=mask), rtol=1e-6)
    if "reduction" in inspect.signature(score).parameters:
        rows = score(*arguments, row_weights=mask * (np.arange(20) + 1), reduction="none")
        np.testing.assert_array_equal(rows, score(*arguments, row_weights=mask, reduction="none"))


@pytest.mark.parametrize(
    "scale", [2.0**-140, 1e300, *(pytest.param(x, marks=pytest.mark.slow) for x in (2.0**120, 1e-300))]
)
def test_only_ratios_matter(scale):
    weights = np.arange(20) + 1.0
    for name, options in [("brier", {}), ("ece", {"binning": "mass", "debiased": True}), ("nll", {}), ("auroc", {})]:
        score, (arguments, _) = score_of(name, **options), CASES[name]
        want = score(*arguments, row_weights=weights)
        assert_close(score(*arguments, row_weights=scale * weights), want, rtol=1e-6)


@pytest.mark.parametrize("scale", [2.0**122, *(pytest.param(x, marks=pytest.mark.slow) for x in (1.0, 2.0**-100))])
def test_while_tracing_too(scale):
    weights = np.where(np.arange(20) % 5 == 0, 0, np.arange(20) + 1).astype(np.float32)
    for name in ("crps", "brier", "rmse", "aupr"):
        score, arguments = score_of(name), spoilt(name, weights == 0)
        jitted = jax.jit(lambda weights, score=score, arguments=arguments: score(*arguments, row_weights=weights))
        np.testing.assert_allclose(jitted(scale * weights), score(*arguments, row_weights=weights), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_score_while_tracing(name):
    weights = np.where(np.arange(20) == 5, 0, np.arange(20) + 1).astype(np.float32)
    score, arguments = score_of(name), spoilt(name, weights == 0)
    want = score(*arguments, row_weights=weights)
    assert_close(jax.jit(lambda w: score(*arguments, row_weights=w))(7 * weights), want, rtol=1e-5)
    if name in NO_GRADIENT:
        return
    leaves = lambda x, w: jax.tree.leaves(score(x, *arguments[1:], row_weights=w))
    total = lambda x, w: sum(jnp.nansum(x) for x in leaves(x, w) if x.dtype != jnp.int32)
    if arguments[0].dtype != bool:
        assert np.isfinite(jax.grad(total)(jnp.asarray(arguments[0]), weights)).all()
    slope = jax.grad(total, argnums=1)(jnp.asarray(arguments[0]), weights)
    assert np.isfinite(slope).all()
    np.testing.assert_allclose(np.sum(slope * weights), 0, atol=2e-5)  # their scale does not matter


def test_gradient_of_a_mean_by_its_weights():
    values, weights = TARGETS, np.arange(20, dtype=np.float32)
    mean = lambda w: scores.pinball(jnp.zeros(20), values, level=0.5, row_weights=w)
    pytest.importorskip("scoringrules")
    each = np.abs(values) / 2
    want = (each - np.average(each, weights=weights)) / weights.sum()
    np.testing.assert_allclose(jax.grad(mean)(weights)[1:], want[1:], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_members_with_weights_of_their_own_and_of_rows():
    rows, members = np.arange(20) + 1.0, np.array([1.0, 0.0, 3.0])
    got = scores.nll(LOGITS, LABELS, weights=members, row_weights=rows)
    each = scores.nll(LOGITS, LABELS, weights=members, reduction="none")
    np.testing.assert_allclose(got, np.average(each, weights=rows), rtol=1e-5)
    got = scores.per_member(scores.nll, LOGITS, LABELS, row_weights=rows)
    want = [scores.nll(one[None], LABELS, row_weights=rows) for one in LOGITS]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_large_arrays_are_summed_alike():
    predictions = np.random.default_rng(1).normal(size=(3, 70_001)).astype(np.float32)
    weights = np.arange(70_001) % 3.0
    for name in ("rmse", "mean_member_rmse"):
        each = predictions.mean(0)[None] if name == "rmse" else predictions
        want = np.mean(np.sqrt(np.average(each.astype(np.float64) ** 2, axis=1, weights=weights)))
        got = getattr(scores, name)(predictions, np.zeros(70_001, np.float32), row_weights=weights)
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.slow
def test_scikit_learn_agrees():
    metrics = pytest.importorskip("sklearn.metrics")
    weights = np.random.default_rng(2).exponential(size=20)
    p = np.asarray(jax.nn.softmax(LOGITS[0].astype(np.float64)))
    one_hot = np.eye(4)[LABELS]
    found = {
        "nll": metrics.log_loss(LABELS, p, sample_weight=weights, labels=range(4)),
        "accuracy": metrics.accuracy_score(LABELS, p.argmax(1), sample_weight=weights),
        "brier": 4 * metrics.mean_squared_error(one_hot, p, sample_weight=weights),
    }
    for name, want in found.items():
        np.testing.assert_allclose(getattr(scores, name)(LOGITS[:1], LABELS, row_weights=weights), want, rtol=1e-5)
    want = np.sqrt(metrics.mean_squared_error(TARGETS, MEAN.mean(0), sample_weight=weights))
    np.testing.assert_allclose(scores.rmse(MEAN, TARGETS, row_weights=weights), want, rtol=1e-5)


def test_bins_of_equal_weight():
    rng = np.random.default_rng(3)
    logits, labels = (3 * rng.normal(size=(1, 400, 3))).astype(np.float32), rng.integers(3, size=400)
    weights = rng.exponential(size=400)
    score = functools.partial(scores.ece, num_bins=5, binning="mass")
    np.testing.assert_allclose(score(logits, labels, row_weights=np.full(400, 0.1)), score(logits, labels), rtol=1e-5)
    # Edges are values, up to one row from those that share the weight exactly.
    confidence = np.sort(np.max(np.asarray(jax.nn.softmax(logits[0])), axis=-1))
    order = np.argsort(np.max(np.asarray(jax.nn.softmax(logits[0])), axis=-1))
    right = (logits[0].argmax(-1) == labels)[order]
    at_most = np.cumsum(weights[order])
    position = (at_most[-1] - at_most[-1] / 400) * np.arange(1, 5) / 5
    index = np.searchsorted(confidence[np.searchsorted(at_most, position, side="right")], confidence)
    per_bin = [np.bincount(index, weights[order] * x, 5) for x in (np.ones(400), confidence, right)]
    assert np.ptp(per_bin[0]) <= 2 * weights.max()
    want = np.abs(per_bin[1] - per_bin[2]).sum() / weights.sum()
    np.testing.assert_allclose(score(logits, labels, row_weights=weights), want, rtol=1e-5)
    assert not np.allclose(score(logits, labels), want, rtol=1e-3)


@pytest.mark.slow
def test_noise_of_weighted_labels_is_subtracted():
    """A calibrated model has no squared error on average; by sums of weights, or none, too little is subtracted."""
    rng = np.random.default_rng(4)
    weights, p = rng.exponential(size=60) ** 2, 0.7
    logits = jnp.log(jnp.broadcast_to(jnp.array([p, 1 - p]), (1, 60, 2)))
    labels = (rng.uniform(size=(4000, 60)) > p).astype(int)
    score = functools.partial(scores.squared_calibration_error, num_bins=1, row_weights=weights)
    found = jax.vmap(lambda labels: score(logits, labels))(labels)
    error = found.std() / np.sqrt(4000)
    assert abs(found.mean()) < 5 * error
    plain = jax.vmap(lambda labels: score(logits, labels, debiased=False))(labels)
    # What 60 rows of equal weight would have is not what is to be subtracted.
    assert plain.mean() - p * (1 - p) / 60 > 20 * error
    np.testing.assert_allclose(plain.mean(), p * (1 - p) * (weights**2).sum() / weights.sum() ** 2, rtol=0.15)


@pytest.mark.slow
def test_risk_coverage_of_weighted_rows():
    rng = np.random.default_rng(5)
    uncertainty, losses = (
        np.round(3 * rng.normal(size=40)).astype(np.float32),
        rng.exponential(size=40).astype(np.float32),
    )
    counts = rng.integers(0, 4, size=40)
    got = scores.risk_coverage(np.where(counts == 0, np.nan, uncertainty), losses, row_weights=0.7 * counts)
    repeated = scores.risk_coverage(np.repeat(uncertainty, counts), np.repeat(losses, counts))
    # On the same curve: with all rows up to each of the uncertainties the points are the same.
    want = np.interp(got.coverage, repeated.coverage, repeated.risk)
    ends = [np.flatnonzero(np.sort(uncertainty[counts > 0]) <= u)[-1] for u in np.unique(uncertainty[counts > 0])]
    np.testing.assert_allclose(np.asarray(got.risk)[ends], want[ends], rtol=1e-5)
    assert got.coverage[-1] == 1
    assert (np.diff(got.coverage) >= 0).all()
    shuffled = rng.permutation(40)
    other = scores.risk_coverage(uncertainty[shuffled], losses[shuffled], row_weights=counts[shuffled])
    np.testing.assert_allclose(other.risk, got.risk, rtol=1e-5)
    plain = scores.risk_coverage(uncertainty, losses, row_weights=counts > 0)
    as_mask = scores.risk_coverage(uncertainty, losses, row_weights=1.0 * (counts > 0))
    assert_close(as_mask, plain, rtol=1e-6)
    assert not np.allclose(got.risk, plain.risk, rtol=1e-2)


def test_area_of_weighted_rows():
    uncertainty, losses = np.array([0.1, 0.2, 0.3], np.float32), np.array([0.0, 1.0, 4.0], np.float32)
    got = scores.aurc(uncertainty, losses, row_weights=np.array([1.0, 2.0, 1.0]))
    np.testing.assert_allclose(got, (1 * 0 + 2 * (2 / 3) + 1 * (6 / 4)) / 4, rtol=1e-6)
    np.testing.assert_allclose(
        scores.aurc(uncertainty, losses, row_weights=np.full(3, 0.2)), scores.aurc(uncertainty, losses), rtol=1e-6
    )


def test_precision_follows_the_predictions():
    weights = np.arange(20.0)
    assert scores.nll(LOGITS, LABELS, row_weights=weights).dtype == jnp.float32
    with jax.enable_x64(True):
        assert scores.nll(LOGITS, LABELS, row_weights=weights).dtype == jnp.float32
        assert scores.nll(LOGITS.astype(np.float64), LABELS, row_weights=weights.astype(int)).dtype == jnp.float64
    half = scores.crps(MEAN.astype(jnp.bfloat16), TARGETS.astype(jnp.bfloat16), row_weights=weights.astype(np.float16))
    assert half.dtype == jnp.float32


def test_no_weights_compile_what_they_did():
    """Neither an operation nor an argument more than before there were weights of rows."""
    text = str(jax.make_jaxpr(lambda x, y, v: scores.nll_gaussian(x, v, y))(MEAN[0], TARGETS, VARIANCE[0]))
    assert "select_n" not in text
    assert " ne " not in text


@pytest.mark.usefixtures("unhooked")
def test_messages():
    cases = [
        (np.ones(20, np.complex64), TypeError, "real numbers or booleans as `row_weights`.\n  got dtype complex64"),
        (np.zeros(20, bool), ValueError, "`row_weights` that leave a row.\n  got 20 times False"),
        (
            np.ones(3),
            ValueError,
            r"one of `row_weights` per row.\n  expected shape \(20,\), got \(3,\)(?s:.)*`weights`",
        ),
        (np.zeros(20), ValueError, "`row_weights` that leave a row"),
        (-np.ones(20), ValueError, r"finite `row_weights` of zero or more.\n  got -1.0 at index \(0,\)"),
        (np.full(20, np.nan), ValueError, "finite `row_weights`"),
        ("text", TypeError, "`row_weights` as an array of numbers"),
    ]
    for value, error, message in cases:
        with pytest.raises(error, match=message):
            scores.nll(LOGITS, LABELS, row_weights=value)
    with pytest.raises(ValueError, match="Several entries per row(?s:.)*broadcast_to"):
        scores.rmse(MEAN[..., None], TARGETS[:, None], row_weights=np.ones(20))
    labels = np.where(np.arange(20) == 3, 9, LABELS)
    with pytest.raises(ValueError, match=r"labels from 0 to 3(?s:.)*index \(3,\)"):
        scores.nll(LOGITS, labels, row_weights=np.ones(20))
    scores.nll(LOGITS, labels, row_weights=1.0 * (np.arange(20) != 3))


ROWS = 2**21
AT_MANY = {"auroc", "aupr", "by_group", "mean_member_rmse"}


@pytest.mark.parametrize(
    "name", [name if name in AT_MANY else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_many_rows_of_one_kind_are_one_row(name):
    """Float32 sums over two million rows: rounding has one sign, and differences of rates are not quite zero."""
    score, (arguments, before) = score_of(name), CASES[name]
    index = [0, 1] if name in ("auroc", "aupr", "fpr_at_tpr", "r2") else [3]  # of both kinds, and not constant
    few = [np.take(x, index, axis=axis) for x, axis in zip(arguments, before, strict=True)]
    many = [np.repeat(x, ROWS // len(index), axis=axis) for x, axis in zip(few, before, strict=True)]
    got = score(*many, row_weights=np.full(ROWS, 0.3))
    assert_close(got, score(*few), rtol=2.5e-6, atol=1e-6)
