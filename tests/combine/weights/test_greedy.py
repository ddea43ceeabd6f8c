import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, scores


def _greedy(predictions, score, num_steps, num_initial=0):
    """Caruana's algorithm as it is written down: one candidate after another, in float64."""
    alone = np.argsort([score(one) for one in predictions], kind="stable")
    order, path = [], []
    for step in range(num_steps):
        values = [score(np.mean(predictions[[*order, m]], axis=0)) for m in range(len(predictions))]
        order.append(alone[step] if step < num_initial else int(np.argmin(values)))
        path.append(values[order[-1]])
    first = max(num_initial - 1, 0)
    best = first + int(np.argmin(path[first:]))
    return np.bincount(order[: best + 1], minlength=len(predictions)), np.array(order), np.array(path)


def _problem(members=6, rows=40, seed=0):
    rng = np.random.default_rng(seed)
    targets = rng.normal(size=rows)
    return (targets + rng.normal(size=(members, rows)) * rng.uniform(0.3, 2, (members, 1))).astype(np.float32), targets


@pytest.mark.parametrize("num_initial", [0, 1, 3])
def test_is_the_algorithm_as_written(num_initial):
    predictions, targets = _problem()
    counts, order, path = _greedy(
        predictions.astype(np.float64), lambda mean: np.mean((mean - targets) ** 2), 21, num_initial
    )
    score = lambda mean: jnp.mean((mean - targets.astype(np.float32)) ** 2)
    found = combine.weights.greedy(predictions, score, num_steps=21, num_initial=num_initial)
    np.testing.assert_array_equal(found.order, order)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_allclose(found.scores, path, rtol=1e-5)
    np.testing.assert_allclose(found.weights, counts / counts.sum(), rtol=1e-6)
    assert len(set(order.tolist())) > 1
    assert counts.sum() < 21  # the last ensemble is not the best one: returning it would not pass
    if num_initial == 3:
        assert not np.array_equal(_greedy(predictions, lambda mean: np.mean((mean - targets) ** 2), 21)[1], order)


@pytest.mark.parametrize("shape", [(5, 60), (4, 3, 20)])
def test_log_score_is_that_of_the_mixture(shape):
    log_scores = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    probabilities = np.exp(log_scores.astype(np.float64))
    counts, order, path = _greedy(probabilities, lambda mean: -np.mean(np.log(mean)), 12)
    found = combine.weights.greedy(log_scores, num_steps=12)
    np.testing.assert_array_equal(found.order, order)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_allclose(found.scores, path, rtol=1e-5, atol=1e-6)
    # The mean of the logarithms, another mixture, would not pass.
    assert not np.array_equal(_greedy(log_scores, lambda mean: -np.mean(mean), 12)[0], counts)


def test_comes_close_to_stacking():
    log_scores = np.random.default_rng(2).normal(size=(5, 200)).astype(np.float32)
    found = combine.weights.greedy(log_scores, num_steps=200)
    best = combine.weights.stacking(log_scores).weights
    value = lambda w: -np.mean(np.log(np.asarray(w, np.float64) @ np.exp(log_scores.astype(np.float64))))
    assert value(best) - 1e-5 < value(found.weights) < value(best) + 1e-4
    assert value(np.full(5, 0.2)) > value(best) + 1e-4


def test_log_scores_below_the_smallest_float():
    log_scores = np.float32([[-200, -300], [-300, -200], [-250, -250]])
    found = combine.weights.greedy(log_scores, num_steps=4)
    np.testing.assert_array_equal(found.counts, [1, 1, 0])
    np.testing.assert_allclose(np.min(found.scores), 200 + np.log(2), rtol=1e-6)


def test_members_that_explain_all_rows_only_together_are_found():
    log_scores = np.where(np.repeat(np.eye(3), 2, axis=1) > 0, 0, -np.inf).astype(np.float32)
    found = combine.weights.greedy(log_scores, num_steps=3)
    np.testing.assert_array_equal(found.counts, [1, 1, 1])
    np.testing.assert_allclose(found.scores, [np.inf, np.inf, np.log(3)], rtol=1e-6)


def test_ties_go_to_the_first():
    predictions = np.float32([[3, 3], [1, 1], [1, 1]])
    found = combine.weights.greedy(predictions, lambda mean: jnp.sum(mean), num_steps=3)
    np.testing.assert_array_equal(found.order, [1, 1, 1])
    np.testing.assert_array_equal(found.counts, [0, 1, 0])  # the smallest of the ensembles that tie


def test_any_score_of_this_library_and_broken_members():
    logits = 2 * np.random.default_rng(3).normal(size=(5, 80, 3)).astype(np.float32)
    labels = np.argmax(logits[1] + logits[2] + np.random.default_rng(4).normal(size=(80, 3)), axis=-1)
    probabilities = np.array(jax.nn.softmax(logits))
    probabilities[3] = np.nan
    score = lambda mean: scores.brier(jnp.log(mean)[None], labels)
    found = combine.weights.greedy(probabilities, score, num_steps=10)
    assert found.counts[3] == 0
    np.testing.assert_allclose(
        np.min(found.scores),
        scores.brier(jnp.log(jnp.asarray(probabilities)), labels, weights=found.weights),
        rtol=1e-5,
    )
    alone = [scores.brier(jnp.log(jnp.asarray(member))[None], labels) for member in probabilities[[0, 1, 2, 4]]]
    assert np.min(found.scores) < 0.9 * np.min(alone)


def test_masked_rows_are_left_out_whatever_they_hold():
    log_scores, mask = np.random.default_rng(5).normal(size=(4, 30)).astype(np.float32), np.arange(30) % 3 > 0
    want = combine.weights.greedy(log_scores[:, mask], num_steps=8)
    for given in (log_scores, np.where(mask, log_scores, np.nan)):
        found = combine.weights.greedy(given, num_steps=8, row_weights=mask)
        np.testing.assert_array_equal(found.order, want.order)
        np.testing.assert_allclose(found.scores, want.scores, rtol=1e-5)
    assert not np.array_equal(combine.weights.greedy(log_scores, num_steps=8).order, want.order)


def test_jit_and_vmap():
    log_scores = np.random.default_rng(6).normal(size=(2, 4, 30)).astype(np.float32)
    both = jax.jit(jax.vmap(lambda one: combine.weights.greedy(one, num_steps=6)))(log_scores)
    for i, one in enumerate(log_scores):
        np.testing.assert_array_equal(both.order[i], combine.weights.greedy(one, num_steps=6).order)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    predictions, _ = _problem()
    score = lambda mean: jnp.mean(mean)
    with pytest.raises(ValueError, match='needs `score` to be "log" or a function of the combined prediction'):
        combine.weights.greedy(predictions, "brier")
    with pytest.raises(ValueError, match=r"one number for one combined prediction.\n  got shape \(40,\)"):
        combine.weights.greedy(predictions, lambda mean: mean)
    with pytest.raises(ValueError, match="no `row_weights` with a score of your own"):
        combine.weights.greedy(predictions, score, row_weights=np.ones(40, bool))
    with pytest.raises(ValueError, match="`num_steps` of at least 1, got 0"):
        combine.weights.greedy(predictions, score, num_steps=0)
    with pytest.raises(ValueError, match="got 7, with 6 members and 50 steps"):
        combine.weights.greedy(predictions, score, num_initial=7)
    with pytest.raises(ValueError, match="`num_initial` of at least 1, got -1"):
        combine.weights.greedy(predictions, score, num_initial=-1)
    with pytest.raises(ValueError, match="finite or -inf"):
        combine.weights.greedy(np.full((2, 3), np.nan))
