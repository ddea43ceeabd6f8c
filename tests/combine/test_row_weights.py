"""Weights of each row, `(members, rows)`: every row is what the same function gives for it alone."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, scores, uncertainty

MEMBERS, ROWS, CLASSES = 4, 6, 3
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(MEMBERS, ROWS, CLASSES)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, ROWS)
MEAN = RNG.normal(size=(MEMBERS, ROWS)).astype(np.float32)
VARIANCE = np.exp(RNG.normal(size=(MEMBERS, ROWS))).astype(np.float32)
TARGETS = RNG.normal(size=ROWS).astype(np.float32)
WEIGHTS = RNG.uniform(0.1, 1, size=(MEMBERS, ROWS))
WEIGHTS[1, 2] = WEIGHTS[0, 4] = WEIGHTS[3, 4] = 0
DISCRETE, EACH = ("vote", "accuracy", "mean_member_accuracy"), {"reduction": "none"}

# Arrays with `members`, then arrays of rows.
CASES = {
    "mean": (combine.mean, (MEAN,), ()),
    "mean of classes": (combine.mean, (LOGITS,), ()),
    "log_mixture": (combine.log_mixture, (MEAN,), ()),
    "moments": (combine.moments, (MEAN,), ()),
    "mixture": (combine.mixture, (LOGITS,), ()),
    "mean_logits": (combine.mean_logits, (LOGITS,), ()),
    "vote": (combine.vote, (LOGITS,), ()),
    "gaussian": (combine.gaussian, (MEAN, VARIANCE), ()),
    "product_gaussian": (combine.product_gaussian, (MEAN, VARIANCE), ()),
    "decompose_entropy": (uncertainty.decompose_entropy, (LOGITS,), ()),
    "decompose_variance": (uncertainty.decompose_variance, (MEAN, VARIANCE), ()),
    "nll": (ft.partial(scores.nll, **EACH), (LOGITS,), (LABELS,)),
    "accuracy": (ft.partial(scores.accuracy, **EACH), (LOGITS,), (LABELS,)),
    "mean_member_accuracy": (ft.partial(scores.mean_member_accuracy, **EACH), (LOGITS,), (LABELS,)),
    "brier": (ft.partial(scores.brier, **EACH), (LOGITS,), (LABELS,)),
    "ranked_probability": (ft.partial(scores.ranked_probability, **EACH), (LOGITS,), (LABELS,)),
    "nll_gaussian_mixture": (ft.partial(scores.nll_gaussian_mixture, **EACH), (MEAN, VARIANCE), (TARGETS,)),
}
every = pytest.mark.parametrize("name", CASES)


def row_by_row(name, weights, members=None, others=None):
    fn, own, rows = CASES[name]
    own, rows = members or own, others or rows
    parts = [
        fn(*(x[:, i : i + 1] for x in own), *(x[i : i + 1] for x in rows), weights=weights[:, i])
        for i in range(weights.shape[1])
    ]
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)


def assert_close(got, expected, **tolerance):
    tolerance = {"rtol": 1e-5, "atol": 1e-6} | tolerance
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, expected)


@every
def test_each_row_is_as_alone(name):
    fn, own, rows = CASES[name]
    got = fn(*own, *rows, weights=WEIGHTS)
    assert_close(got, row_by_row(name, WEIGHTS))
    assert_close(fn(*own, *rows, weights=WEIGHTS * np.arange(1, ROWS + 1)), got)  # each row by its own sum
    if name == "accuracy":  # six rows, each right or wrong
        return
    wrong = fn(*own, *rows, weights=WEIGHTS.mean(axis=1))
    assert not all(map(np.allclose, jax.tree.leaves(got), jax.tree.leaves(wrong)))


@every
def test_jit_and_vmap_with_weights_as_arguments(name):
    fn, own, rows = CASES[name]
    call = lambda own, weights: fn(*own, *rows, weights=weights)
    got = call(own, WEIGHTS)
    assert_close(jax.jit(call)(own, WEIGHTS.astype(np.float32)), got)
    twice = jax.vmap(call, in_axes=(None, 0))(own, np.stack([WEIGHTS.astype(np.float32)] * 2))
    assert_close(jax.tree.map(lambda x: x[1], twice), got)


@every
def test_gradients(name):
    """Of predictions and weights, also where weights are zero."""
    fn, own, rows = CASES[name]
    if name in DISCRETE:
        return
    total = lambda out: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out))
    whole = lambda own, weights: total(fn(*own, *rows, weights=weights))
    weights = jnp.asarray(WEIGHTS, jnp.float32)
    found = jax.grad(whole, argnums=(0, 1))(tuple(map(jnp.asarray, own)), weights)
    for i in range(ROWS):
        one = lambda own, weights, i=i: total(fn(*own, *(x[i : i + 1] for x in rows), weights=weights))
        part = jax.grad(one, argnums=(0, 1))(tuple(jnp.asarray(x[:, i : i + 1]) for x in own), weights[:, i])
        assert_close(tuple(x[:, i : i + 1] for x in found[0]), part[0], rtol=1e-4, atol=1e-5)
        assert_close(found[1][:, i], part[1], rtol=1e-4, atol=1e-5)


@every
def test_a_weight_of_zero_leaves_a_member_out_of_its_row(name):
    fn, own, rows = CASES[name]
    broken = tuple(x.copy() for x in own)
    for x in broken:
        x[1, 2], x[0, 4] = np.nan, np.nan
    assert_close(fn(*broken, *rows, weights=WEIGHTS), fn(*own, *rows, weights=WEIGHTS))


@every
def test_in_blocks(name):
    """Arrays larger than a cache are computed in blocks: in one program they are not."""
    fn, own, rows = CASES[name]
    many = 50_001
    big = tuple(np.tile(x, (1, many // ROWS + 1, *(1,) * (x.ndim - 2)))[:, :many] for x in own)
    more = tuple(np.tile(x, many // ROWS + 1)[:many] for x in rows)
    weights = RNG.uniform(size=(MEMBERS, many)).astype(np.float32)
    call = lambda own, rows, weights: fn(*own, *rows, weights=weights)
    assert_close(call(big, more, weights), jax.jit(call)(big, more, weights), atol=1e-5)


@every
def test_double_precision(name):
    with jax.enable_x64(True):
        fn, own, rows = CASES[name]
        own, rows = tuple(x.astype(np.float64) for x in own), tuple(x if x is LABELS else x * 1.0 for x in rows)
        got = fn(*own, *rows, weights=WEIGHTS)
        assert all(x.dtype == jnp.float64 for x in jax.tree.leaves(got))
        assert_close(got, row_by_row(name, WEIGHTS, own, rows), rtol=1e-11, atol=1e-13)


def test_several_axes_of_rows():
    values = RNG.normal(size=(3, 5, 7)).astype(np.float32)
    weights = RNG.uniform(size=(3, 5))
    expected = np.average(values, axis=0, weights=np.broadcast_to(weights[..., None], values.shape))
    np.testing.assert_allclose(combine.mean(values, weights=weights), expected, rtol=1e-5, atol=1e-6)
    full = RNG.uniform(size=(3, 5, 7))
    np.testing.assert_allclose(
        combine.mean(values, weights=full), np.average(values, axis=0, weights=full), rtol=1e-5, atol=1e-6
    )
    variance = np.ones_like(values)
    by_rows = combine.gaussian(values, variance, weights=weights)
    assert_close(by_rows, combine.gaussian(values, variance, weights=np.broadcast_to(weights[..., None], values.shape)))


@pytest.mark.parametrize("score", ["ece", "classwise_ece", "squared_calibration_error", "decompose_brier"])
def test_scores_of_all_rows_together(score):
    """They are scores of the mixture."""
    many, labels = np.tile(LOGITS, (1, 20, 1)), RNG.integers(0, CLASSES, 20 * ROWS)
    weights = RNG.uniform(size=(MEMBERS, 20 * ROWS))
    mixed = combine.mixture(many, weights=weights)[None]
    fn = getattr(scores, score)
    assert_close(fn(many, labels, weights=weights), fn(mixed, labels), atol=1e-5)


@pytest.mark.parametrize("name", [name for name, (_, _, rows) in CASES.items() if rows])
def test_masked_rows_may_hold_anything(name):
    fn, own, rows = CASES[name]
    mask = np.arange(ROWS) != 2
    broken = tuple(np.where((np.arange(ROWS) == 2).reshape(1, -1, *(1,) * (x.ndim - 2)), np.nan, x) for x in own)
    for bad in (np.nan, -1.0, 0.0):
        weights = WEIGHTS.copy()
        weights[:, 2] = bad
        got = fn(*(x.astype(np.float32) for x in broken), *rows, weights=weights, row_weights=mask)
        expected = np.asarray(fn(*own, *rows, weights=WEIGHTS))
        np.testing.assert_allclose(np.asarray(got)[mask], expected[mask], rtol=1e-5)
        mean = fn.func(*(x.astype(np.float32) for x in broken), *rows, weights=weights, row_weights=mask)
        np.testing.assert_allclose(mean, expected[mask].mean(), rtol=1e-5)
        gradient = jax.grad(lambda w: fn.func(*own, *rows, weights=w, row_weights=mask))(
            jnp.asarray(weights, jnp.float32)
        )  # noqa: B023
        assert np.isfinite(gradient).all()
    weights[0, 3] = np.nan
    with pytest.raises(ValueError, match=r"finite `weights` of zero or more.\n  got nan at index \(0, 3\)"):
        fn(*own, *rows, weights=weights, row_weights=mask)


def change(index, value):
    weights = np.ones((3, 2))
    weights[index] = value
    return weights


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("weights", "got"),
    [
        (change((1, 0), -2.0), "finite `weights` of zero or more.\n  got -2.0 at index (1, 0), the first of 1 such"),
        (change((2, 1), np.nan), "finite `weights` of zero or more.\n  got nan at index (2, 1)"),
        (
            change((slice(None), 1), 0.0),
            "`weights` that are not all zero in any row.\n  got only zeros in row (1,), the first of 1 such\n"
            "They are divided by their sum: at least one member needs a nonzero weight.",
        ),
        (np.ones((2, 3)), "  expected shape (3,) or (3, 2), got (2, 3)\nThe axis `members` comes first"),
        (np.ones((3, 5)), "  expected shape (3,) or (3, 2), got (3, 5)\nWeights are in the order of the members."),
    ],
)
def test_invalid_weights(weights, got):
    with pytest.raises(ValueError, match="`combine.mean` needs ") as caught:
        combine.mean(np.ones((3, 2), np.float32), weights=weights)
    assert got in str(caught.value)


@pytest.mark.usefixtures("unhooked")
def test_classes_have_no_weights_of_their_own():
    with pytest.raises(ValueError, match=r"expected shape \(4,\) or \(4, 6\), got \(4, 6, 3\)"):
        combine.mixture(LOGITS, weights=np.ones(LOGITS.shape))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    "call",
    [
        lambda: combine.median(MEAN, weights=WEIGHTS),
        lambda: scores.crps(MEAN, TARGETS, weights=WEIGHTS),
        lambda: uncertainty.quantile(MEAN, [0.5], weights=WEIGHTS),
    ],
)
def test_others_say_how_they_take_them(call):
    with pytest.raises(ValueError, match="such as a gate's, call it for one row inside `jax.vmap`"):
        call()
