"""Stacking and greedy selection beside SciPy, closed forms, and the algorithm as it is written down."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, scores

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
        assert 0.1 < root < 0.9
        assert abs(root - 0.5) > 0.01
        got = combine.stacking(log_scores.astype(dtype)).weights[0]
        np.testing.assert_allclose(got, root, rtol=1e-7 if x64 else 1e-3)
    assert gap_of(indicators(), np.full(4, 0.25)) > 0.5  # the equal weights from which the search starts


@pytest.mark.parametrize(("shape", "scale"), [((5, 200), 0.1), ((64, 20), 1.0), ((5, 8, 25), 5.0), ((5, 200), 300.0)])
def test_no_weights_are_better_by_more_than_the_gap(shape, scale):
    log_scores = log_scores_of(shape, scale=scale)
    flat = log_scores.reshape(shape[0], -1)
    found = combine.stacking(log_scores)
    assert found.gap <= 1e-6
    assert found.num_steps < 20
    np.testing.assert_allclose(np.sum(found.weights), 1, rtol=1e-6)
    # The proof, computed again in float64: float32 adds its rounding.
    assert gap_of(flat, found.weights) <= 1.5e-6
    start = np.full(shape[0], 1 / shape[0])
    best = optimize.minimize(
        lambda w: -mean_log_score(flat, np.abs(w) / np.abs(w).sum()), start, method="SLSQP", options={"ftol": 1e-12}
    )
    assert mean_log_score(flat, found.weights) > -best.fun - 1.5e-6
    assert mean_log_score(flat, start) < -best.fun - 1e-4


def test_members_that_do_not_help_get_exactly_nothing_and_equal_ones_share():
    log_scores = np.stack([np.zeros(50), np.full(50, -0.5), np.full(50, -1.0)]).astype(np.float32)
    np.testing.assert_array_equal(combine.stacking(log_scores).weights, [1, 0, 0])
    np.testing.assert_array_equal(combine.stacking(log_scores[:1]).weights, [1])
    np.testing.assert_allclose(combine.stacking(np.float32([[-1], [0], [-2]])).weights, [0, 1, 0], atol=1e-6)
    base = log_scores_of((3, 100))
    alone, doubled = (combine.stacking(log_scores).weights for log_scores in (base, base[[0, 1, 2, 2]]))
    np.testing.assert_allclose(doubled[2], doubled[3], rtol=1e-4)
    np.testing.assert_allclose(doubled[2] + doubled[3], alone[2], atol=1e-2)
    assert alone[2] > 0.1


def test_rows_that_do_not_count():
    log_scores, mask = log_scores_of((5, 200)), np.arange(200) % 3 > 0
    want = combine.stacking(log_scores[:, mask]).weights
    for value in (log_scores, np.nan, np.inf):
        spoilt = np.where(mask, log_scores, np.float32(value))
        np.testing.assert_allclose(combine.stacking(spoilt, row_weights=mask).weights, want, atol=1e-5)
    # A row that no member explains is ignored, too.
    impossible = np.where(mask, log_scores, -np.inf)
    np.testing.assert_allclose(combine.stacking(impossible).weights, want, atol=1e-5)
    np.testing.assert_allclose(jax.jit(combine.stacking)(impossible).weights, want, atol=1e-5)
    whole = combine.stacking(log_scores).weights
    assert not np.allclose(whole, want, atol=1e-3)
    times = np.random.default_rng(1).integers(4, size=200)
    want = combine.stacking(np.repeat(log_scores, times, axis=1)).weights
    np.testing.assert_allclose(combine.stacking(log_scores, row_weights=times).weights, want, atol=1e-4)
    assert not np.allclose(whole, want, atol=1e-3)


def test_a_common_part_of_a_row_and_many_rows_cost_no_precision():
    log_scores = log_scores_of((5, 200))
    offset = 1e4 * np.random.default_rng(1).normal(size=200).astype(np.float32)
    # float32 keeps numbers near 1e4 to 1e-3: the same rounded scores are the fair reference.
    want = combine.stacking((log_scores + offset) - offset).weights
    np.testing.assert_allclose(combine.stacking(log_scores + offset).weights, want, atol=1e-5)
    many = log_scores_of((2, 200_000), scale=3.0) - np.float32([[0], [1]])
    weights = np.asarray(combine.stacking(many).weights)
    assert gap_of(many, weights) < 1.5e-6
    # Plain float32 sums over all rows have a larger error there.
    likelihood = np.exp(many - many.max(0))
    plain = np.add.accumulate(likelihood / (weights @ likelihood), axis=1, dtype=np.float32)[:, -1] / 200_000
    assert np.max(np.abs(plain - 1)) > 1.5e-6


def test_improves_what_it_claims_to():
    logits = 3 * np.random.default_rng(3).normal(size=(4, 300, 5)).astype(np.float32)
    labels = np.argmax(logits[0] + logits[2] + 3 * np.random.default_rng(4).normal(size=(300, 5)), axis=-1)
    log_scores = -scores.per_member(scores.nll, logits, labels, reduction="none")
    found = combine.stacking(log_scores)
    got = scores.nll(logits, labels, weights=found.weights)
    np.testing.assert_allclose(got, -mean_log_score(log_scores, found.weights), rtol=1e-5)
    rng = np.random.default_rng(5)
    assert all(got < scores.nll(logits, labels, weights=weights) for weights in rng.dirichlet(np.ones(4), size=20))


def test_jit_vmap_half_precision_and_warnings():
    log_scores = log_scores_of((2, 3, 50))
    both = jax.jit(jax.vmap(lambda one: combine.stacking(one).weights))(log_scores)
    for one, weights in zip(log_scores, both, strict=True):
        np.testing.assert_allclose(combine.stacking(one).weights, weights, atol=1e-5)
    assert combine.stacking(log_scores[0].astype(jnp.bfloat16)).weights.dtype == jnp.float32
    with pytest.warns(UserWarning, match="`combine.stacking` ended .* nats at most from .* its tolerance -1"):
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
    predictions = targets + noise if kind == "squared error" else np.exp(rng.normal(size=(6, 40)))
    predictions = predictions.astype(np.float32)
    score_in = {
        "squared error": lambda xp: lambda mean: xp.mean((mean - xp.asarray(targets, mean.dtype)) ** 2),
        "log score": lambda xp: lambda mean: -xp.mean(xp.log(mean)),
    }[kind]
    exact = predictions.astype(np.float64)
    counts, order, path = greedy_as_written(exact, score_in(np), 21, num_initial)
    found = combine.greedy(predictions, score_in(jnp), num_steps=21, num_initial=num_initial)
    np.testing.assert_array_equal(found.order, order)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_allclose(found.scores, path, rtol=1e-5)
    np.testing.assert_allclose(found.weights, counts / counts.sum(), rtol=1e-6)
    assert len(set(order.tolist())) > 1
    if kind == "squared error":
        assert not np.array_equal(greedy_as_written(exact, score_in(np), 21, 4 - num_initial)[1], order)


def test_comes_close_to_stacking():
    log_scores = log_scores_of((5, 200), seed=2)
    found = combine.greedy(np.exp(log_scores), lambda mean: -jnp.mean(jnp.log(mean)), num_steps=200)
    best = combine.stacking(log_scores).weights
    value = lambda w: -mean_log_score(log_scores, w)
    assert value(best) - 1e-5 < value(found.weights) < value(best) + 1e-4
    assert value(np.full(5, 0.2)) > value(best) + 1e-4


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
        (
            lambda: combine.stacking(np.float32([[0, np.nan]])),
            ValueError,
            r"or -inf.\n  got nan at index \(0, 1",
        ),
        (lambda: combine.stacking(np.float32([[np.inf]])), ValueError, "finite or -inf"),
        (lambda: combine.stacking(np.ones((3, 0), np.float32)), ValueError, "at least one row"),
        (lambda: combine.stacking(indicators(), row_weights=np.ones(4)), ValueError, "one of `row_weights` per row"),
        (lambda: combine.stacking(indicators(), row_weights=np.zeros(100, bool)), ValueError, "leave a row"),
        (lambda: combine.greedy(indicators(), lambda mean: mean), ValueError, r"one number.\n  got shape \(100,\)"),
        (lambda: combine.greedy(indicators(), jnp.sum, num_steps=0), ValueError, "`num_steps` of at least 1, got 0"),
        (lambda: combine.mean(np.ones((4, 3)), weights=combine.stacking(indicators())), TypeError, "Pass its weights"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()
