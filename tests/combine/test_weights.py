"""Stacking and greedy selection beside SciPy, closed forms, and the algorithm as it is written down."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine

optimize = pytest.importorskip("scipy.optimize", reason="the reference optimiser is scipy's")


def log_scores_of(shape, *, seed=0, scale=1.0):
    return scale * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def mean_log_score(log_scores, weights):
    exact = np.asarray(log_scores, np.float64)
    top = exact.max(0)
    return np.mean(top + np.log(np.asarray(weights, np.float64) @ np.exp(exact - top)))


def gap_of(log_scores, weights):
    exact = np.asarray(log_scores, np.float64)
    likelihood = np.exp(exact - exact.max(0))
    return np.max(np.mean(likelihood / (np.asarray(weights, np.float64) @ likelihood), axis=1)) - 1


def indicators():
    """Four members that each explain their own 10, 20, 30 and 40 of 100 rows, and no others."""
    log_scores = np.full((4, 100), -np.inf, np.float32)
    for member, (start, stop) in enumerate([(0, 10), (10, 30), (30, 60), (60, 100)]):
        log_scores[member, start:stop] = 0
    return log_scores


@pytest.mark.parametrize("x64", [False, True])
def test_closed_forms(x64):
    with jax.enable_x64(x64):
        dtype = np.float64 if x64 else np.float32
        found = combine.stacking(indicators().astype(dtype))
        np.testing.assert_allclose(found.weights, [0.1, 0.2, 0.3, 0.4], rtol=1e-9 if x64 else 1e-4)
        assert found.weights.dtype == dtype
        assert found.gap <= (1e-10 if x64 else 1e-6)
        log_scores = log_scores_of((2, 80)).astype(np.float64)
        p, q = np.exp(log_scores)
        root = optimize.brentq(lambda w: np.mean((p - q) / (w * p + (1 - w) * q)), 0, 1, xtol=1e-14)
        assert abs(root - 0.5) > 0.01
        got = combine.stacking(log_scores.astype(dtype)).weights[0]
        np.testing.assert_allclose(got, root, rtol=1e-7 if x64 else 1e-3)


@pytest.mark.parametrize(("shape", "scale"), [((64, 20), 1.0), ((5, 8, 25), 5.0), ((5, 200), 300.0)])
def test_no_weights_are_better_by_more_than_the_gap(shape, scale):
    log_scores = log_scores_of(shape, scale=scale)
    flat = log_scores.reshape(shape[0], -1)
    found = combine.stacking(log_scores)
    assert found.gap <= 1e-6
    assert found.num_steps < 20
    np.testing.assert_allclose(np.sum(found.weights), 1, rtol=1e-6)
    # The proof, computed again in float64: float32 adds its rounding.
    assert gap_of(flat, found.weights) <= 1.5e-6
    negative = lambda w: -mean_log_score(flat, np.abs(w) / np.abs(w).sum())
    best = optimize.minimize(negative, np.full(shape[0], 1 / shape[0]), method="SLSQP", options={"ftol": 1e-12})
    assert mean_log_score(flat, found.weights) > -best.fun - 1.5e-6


def test_members_that_do_not_help_get_exactly_nothing_and_equal_ones_share():
    log_scores = np.stack([np.zeros(50), np.full(50, -0.5), np.full(50, -1.0)]).astype(np.float32)
    np.testing.assert_array_equal(combine.stacking(log_scores).weights, [1, 0, 0])
    np.testing.assert_array_equal(combine.stacking(log_scores[:1]).weights, [1])
    base = log_scores_of((3, 100))
    alone, doubled = (combine.stacking(log_scores).weights for log_scores in (base, base[[0, 1, 2, 2]]))
    np.testing.assert_allclose(doubled[2], doubled[3], rtol=1e-4)
    np.testing.assert_allclose(doubled[2] + doubled[3], alone[2], atol=1e-2)
    assert alone[2] > 0.1


def test_a_row_that_no_member_explains_does_not_count():
    log_scores, mask = log_scores_of((5, 200)), np.arange(200) % 3 > 0
    want = combine.stacking(log_scores[:, mask]).weights
    impossible = np.where(mask, log_scores, -np.inf)
    for stacking in (combine.stacking, jax.jit(combine.stacking)):
        np.testing.assert_allclose(stacking(impossible).weights, want, atol=1e-5)
    assert not np.allclose(combine.stacking(log_scores).weights, want, atol=1e-3)


def test_a_common_part_of_a_row_and_many_rows_cost_no_precision():
    log_scores = log_scores_of((5, 200))
    offset = 1e4 * np.random.default_rng(1).normal(size=200).astype(np.float32)
    # float32 keeps numbers near 1e4 to 1e-3: the same rounded scores are the fair reference.
    want = combine.stacking((log_scores + offset) - offset).weights
    np.testing.assert_allclose(combine.stacking(log_scores + offset).weights, want, atol=1e-5)
    many = log_scores_of((2, 200_000), scale=3.0) - np.float32([[0], [1]])
    assert gap_of(many, combine.stacking(many).weights) < 1.5e-6


def test_jit_vmap_and_tolerances():
    log_scores = log_scores_of((2, 3, 50))
    both = jax.jit(jax.vmap(lambda one: combine.stacking(one).weights))(log_scores)
    np.testing.assert_allclose(both, [combine.stacking(one).weights for one in log_scores], atol=1e-5)
    with pytest.warns(UserWarning, match="`combine.stacking` ended"):
        assert combine.stacking(log_scores[0], tolerance=-1.0).num_steps == 100
    loose = combine.stacking(log_scores[0], tolerance=0.01)
    assert loose.num_steps < combine.stacking(log_scores[0]).num_steps
    assert gap_of(log_scores[0], loose.weights) < 0.0101


# Greedy selection.


def greedy_as_written(predictions, score, num_steps, num_initial=1):
    """Caruana's algorithm: one candidate after another, in float64."""
    alone = np.argsort([score(one) for one in predictions], kind="stable")
    order, path = [], []
    for step in range(num_steps):
        values = [score(np.mean(predictions[[*order, m]], axis=0)) for m in range(len(predictions))]
        order.append(alone[step] if step < num_initial else int(np.argmin(values)))
        path.append(values[order[-1]])
    best = num_initial - 1 + int(np.argmin(path[num_initial - 1 :]))
    return np.bincount(order[: best + 1], minlength=len(predictions)), np.array(order), np.array(path)


@pytest.mark.parametrize("num_initial", [1, 3])
@pytest.mark.parametrize("kind", ["squared error", "log score"])
def test_is_the_algorithm_as_written(kind, num_initial):
    rng = np.random.default_rng(0)
    targets = rng.normal(size=40)
    noise = rng.normal(size=(6, 40)) * rng.uniform(0.3, 2, (6, 1))
    if kind == "squared error":
        predictions = targets + noise
        score_in = lambda xp: lambda mean: xp.mean((mean - xp.asarray(targets, mean.dtype)) ** 2)
    else:
        predictions, score_in = np.exp(noise), lambda xp: lambda mean: -xp.mean(xp.log(mean))
    predictions = predictions.astype(np.float32)
    exact = predictions.astype(np.float64)
    counts, order, path = greedy_as_written(exact, score_in(np), 21, num_initial)
    found = combine.greedy(predictions, score_in(jnp), num_steps=21, num_initial=num_initial)
    np.testing.assert_array_equal(found.order, order)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_allclose(found.scores, path, rtol=1e-5)
    np.testing.assert_allclose(found.weights, counts / counts.sum(), rtol=1e-6)


def test_ties_broken_members_and_transforms():
    predictions = np.float32([[3, 3], [1, 1], [1, 1], [np.nan, 0]])
    found = combine.greedy(predictions, jnp.sum, num_steps=3)
    np.testing.assert_array_equal(found.order, [1, 1, 1])
    np.testing.assert_array_equal(found.counts, [0, 1, 0, 0])  # the smallest of the ensembles that tie
    found = combine.greedy(np.float32([0, 1, 2]), lambda mean: mean**2, num_steps=3, num_initial=3)
    np.testing.assert_array_equal(found.counts, [1, 1, 1])  # the initial members are a unit
    many = np.random.default_rng(6).normal(size=(2, 4, 30)).astype(np.float32)
    of = lambda one: combine.greedy(one, lambda mean: jnp.mean(mean**2), num_steps=6).order
    np.testing.assert_array_equal(jax.jit(jax.vmap(of))(many), [of(one) for one in many])


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: combine.stacking(np.ones((3, 4), int)), TypeError, "`combine.stacking` needs floating-point `log_sc"),
        (lambda: combine.stacking(np.float32([[0, np.nan]])), ValueError, "finite or -inf"),
        (lambda: combine.stacking(np.float32([[np.inf]])), ValueError, "finite or -inf"),
        (lambda: combine.stacking(np.ones((3, 0), np.float32)), ValueError, "at least one row"),
        (lambda: combine.stacking(indicators(), row_weights=np.zeros(100, bool)), ValueError, "keep at least one row"),
        (lambda: combine.greedy(indicators(), lambda mean: mean), ValueError, r"one number.\n  got shape \(100,\)"),
        (lambda: combine.greedy(indicators(), jnp.sum, num_steps=0), ValueError, "`num_steps` of at least 1, got 0"),
        (lambda: combine.mean(np.ones((4, 3)), weights=combine.stacking(indicators())), TypeError, "Pass its weights"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()
