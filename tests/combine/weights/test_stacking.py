import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, scores

optimize = pytest.importorskip("scipy.optimize", reason="the reference solutions are scipy's")


def _log_scores(shape=(5, 200), seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def _mean_log_score(log_scores, weights):
    """Of the mixture, in NumPy and float64."""
    exact = np.asarray(log_scores, np.float64)
    top = exact.max(0)
    return np.mean(top + np.log(np.asarray(weights, np.float64) @ np.exp(exact - top)))


def _gap(log_scores, weights):
    exact = np.asarray(log_scores, np.float64)
    likelihood = np.exp(exact - exact.max(0))
    return np.max(np.mean(likelihood / (np.asarray(weights, np.float64) @ likelihood), axis=1)) - 1


def _indicators():
    """Four members that each explain their own 10, 20, 30 and 40 of 100 rows, and no others."""
    log_scores = np.full((4, 100), -np.inf, np.float32)
    for member, (start, stop) in enumerate([(0, 10), (10, 30), (30, 60), (60, 100)]):
        log_scores[member, start:stop] = 0
    return log_scores


def test_members_of_rows_of_their_own_get_the_shares_of_these():
    found = combine.weights.stacking(_indicators())
    np.testing.assert_allclose(found.weights, [0.1, 0.2, 0.3, 0.4], atol=1e-5)
    # The equal weights from which the search starts would not pass.
    assert _gap(_indicators(), np.full(4, 0.25)) > 0.5
    with jax.enable_x64(True):
        found = combine.weights.stacking(_indicators().astype(np.float64))
        np.testing.assert_allclose(found.weights, [0.1, 0.2, 0.3, 0.4], rtol=1e-9)


def test_two_members_by_the_root_of_the_derivative():
    log_scores = _log_scores((2, 80)).astype(np.float64)
    p, q = np.exp(log_scores)
    root = optimize.brentq(lambda w: np.mean((p - q) / (w * p + (1 - w) * q)), 0, 1, xtol=1e-14)
    assert 0.1 < root < 0.9
    assert abs(root - 0.5) > 0.01
    np.testing.assert_allclose(combine.weights.stacking(log_scores.astype(np.float32)).weights[0], root, atol=1e-4)
    with jax.enable_x64(True):
        np.testing.assert_allclose(combine.weights.stacking(log_scores).weights[0], root, rtol=1e-7)


@pytest.mark.parametrize(("shape", "scale"), [((5, 200), 0.1), ((64, 20), 1.0), ((5, 8, 25), 5.0), ((5, 200), 300.0)])
def test_no_weights_are_better_by_more_than_the_gap(shape, scale):
    log_scores = _log_scores(shape, scale=scale)
    flat = log_scores.reshape(shape[0], -1)
    found = combine.weights.stacking(log_scores)
    assert found.gap <= 1e-6
    assert found.num_steps < 20
    np.testing.assert_allclose(np.sum(found.weights), 1, rtol=1e-6)
    # The proof, computed again in float64: float32 adds its rounding.
    assert _gap(flat, found.weights) <= 1.5e-6
    start = np.full(shape[0], 1 / shape[0])
    best = optimize.minimize(
        lambda w: -_mean_log_score(flat, np.abs(w) / np.abs(w).sum()), start, method="SLSQP", options={"ftol": 1e-12}
    )
    assert _mean_log_score(flat, found.weights) > -best.fun - 1.5e-6
    assert _mean_log_score(flat, start) < -best.fun - 1e-4


def test_float64_is_exact_to_its_own_tolerance():
    with jax.enable_x64(True):
        log_scores = jnp.asarray(_log_scores((12, 300)), jnp.float64)
        found = combine.weights.stacking(log_scores)
        assert found.weights.dtype == jnp.float64
        assert found.gap <= 1e-10
        assert _gap(log_scores, found.weights) <= 1.1e-10


def test_members_that_do_not_help_get_exactly_nothing():
    log_scores = np.stack([np.zeros(50), np.full(50, -0.5), np.full(50, -1.0)]).astype(np.float32)
    np.testing.assert_array_equal(combine.weights.stacking(log_scores).weights, [1, 0, 0])


def test_equal_members_share_their_weight():
    base = _log_scores((3, 100))
    alone, doubled = (combine.weights.stacking(log_scores) for log_scores in (base, base[[0, 1, 2, 2]]))
    np.testing.assert_allclose(doubled.weights[2], doubled.weights[3], rtol=1e-4)
    np.testing.assert_allclose(doubled.weights[2] + doubled.weights[3], alone.weights[2], atol=1e-2)
    assert alone.weights[2] > 0.1


def test_a_common_part_of_a_row_changes_nothing():
    log_scores = _log_scores((5, 200))
    offset = 1e4 * np.random.default_rng(1).normal(size=200).astype(np.float32)
    want = combine.weights.stacking(log_scores).weights
    # float32 keeps numbers near 1e4 to 1e-3: the same rounded scores are the fair reference.
    rounded = (log_scores + offset) - offset
    got = combine.weights.stacking(log_scores + offset).weights
    np.testing.assert_allclose(got, combine.weights.stacking(rounded).weights, atol=1e-5)
    assert np.abs(want - 0.2).max() > 0.02


def test_masked_rows_are_left_out_whatever_they_hold():
    log_scores, mask = _log_scores((5, 200)), np.arange(200) % 3 > 0
    want = combine.weights.stacking(log_scores[:, mask])
    for given in (log_scores, np.where(mask, log_scores, np.nan), np.where(mask, log_scores, np.inf)):
        np.testing.assert_allclose(combine.weights.stacking(given, row_weights=mask).weights, want.weights, atol=1e-5)
    assert not np.allclose(combine.weights.stacking(log_scores).weights, want.weights, atol=1e-3)


def test_one_member_and_one_row():
    np.testing.assert_array_equal(combine.weights.stacking(_log_scores((1, 9))).weights, [1])
    np.testing.assert_allclose(combine.weights.stacking(np.float32([[-1], [0], [-2]])).weights, [0, 1, 0], atol=1e-6)


def test_improves_what_it_claims_to():
    logits = 3 * np.random.default_rng(3).normal(size=(4, 300, 5)).astype(np.float32)
    labels = np.argmax(logits[0] + logits[2] + 3 * np.random.default_rng(4).normal(size=(300, 5)), axis=-1)
    log_scores = -scores.per_member(scores.nll, logits, labels, reduction="none")
    found = combine.weights.stacking(log_scores)
    got = scores.nll(logits, labels, weights=found.weights)
    np.testing.assert_allclose(got, -_mean_log_score(log_scores, found.weights), rtol=1e-5)
    rng = np.random.default_rng(5)
    assert all(got < scores.nll(logits, labels, weights=weights) for weights in rng.dirichlet(np.ones(4), size=20))


def test_many_rows_lose_no_proof_to_rounding():
    log_scores = _log_scores((2, 200_000), scale=3.0) - np.float32([[0], [1]])
    assert _gap(log_scores, combine.weights.stacking(log_scores).weights) < 1.5e-6
    # Plain float32 sums over all rows have a larger error at the exact solution.
    likelihood = np.exp(log_scores - log_scores.max(0))
    with jax.enable_x64(True):
        exact = np.asarray(combine.weights.stacking(log_scores.astype(np.float64)).weights, np.float32)
    plain = np.cumsum((likelihood / (exact @ likelihood)), axis=1, dtype=np.float32)[:, -1] / 200_000
    assert abs(plain.max() - 1) > 3e-6


def test_a_tolerance_that_is_not_reached_is_said():
    log_scores = _log_scores((64, 20), scale=5.0)
    message = r"ended .* nats at most from the best mean log score, above its tolerance 1e-06.\nRaise `tolerance` or"
    with pytest.warns(UserWarning, match=message):
        found = combine.weights.stacking(log_scores, max_steps=2)
    assert found.num_steps == 2
    assert found.gap > 1e-6
    np.testing.assert_allclose(_gap(log_scores, found.weights), found.gap, rtol=1e-3)


@pytest.mark.parametrize(("shape", "scale"), [((64, 20), 5.0), ((5, 200), 0.01)])
@pytest.mark.filterwarnings("ignore:.*nats at most")
def test_beyond_what_the_dtype_resolves_nothing_breaks(shape, scale):
    log_scores = _log_scores(shape, scale=scale)
    found = combine.weights.stacking(log_scores, tolerance=0.0)
    assert _gap(log_scores, found.weights) < 1e-6
    np.testing.assert_allclose(np.sum(found.weights), 1, rtol=1e-6)


def test_jit_vmap_and_half_precision():
    log_scores = np.stack([_log_scores((3, 40)), _log_scores((3, 40), seed=1, scale=4.0)])
    both = jax.vmap(lambda one: combine.weights.stacking(one).weights)(log_scores)
    for one, got in zip(log_scores, both, strict=True):
        np.testing.assert_allclose(got, combine.weights.stacking(one).weights, atol=1e-5)
        np.testing.assert_allclose(jax.jit(combine.weights.stacking)(one).weights, got, atol=1e-5)
    assert combine.weights.stacking(log_scores[0].astype(jnp.bfloat16)).weights.dtype == jnp.float32
    # What no member allows is an error where it can be seen, and left out while tracing.
    hopeless = np.concatenate([log_scores[0], np.full((3, 1), -np.inf, np.float32)], axis=1)
    np.testing.assert_allclose(jax.jit(combine.weights.stacking)(hopeless).weights, both[0], atol=1e-5)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    log_scores = _log_scores((3, 4))
    with pytest.raises(TypeError, match="`combine.weights.stacking` needs floating-point `log_scores`"):
        combine.weights.stacking(np.ones((3, 4), int))
    for value in (np.nan, np.inf):
        log_scores[1, 2] = value
        with pytest.raises(
            ValueError, match=r"finite or -inf.\n  got (nan|inf) at index \(1, 2\), the first of 1 such"
        ):
            combine.weights.stacking(log_scores)
    for search in (combine.weights.stacking, combine.weights.greedy, combine.weights.bayesian):
        with pytest.raises(ValueError, match=r"at least one row in `log_scores`.\n  got shape \(3, 0\)"):
            search(log_scores[:, :0])
    log_scores[:, 2] = -np.inf
    with pytest.raises(ValueError, match=r"a member above -inf in every row.*\n  got none in row \(2,\)"):
        combine.weights.stacking(log_scores)
    with pytest.raises(ValueError, match=r"one of `row_weights` per row.\n  expected shape \(4,\), got \(3,\)"):
        combine.weights.stacking(log_scores, row_weights=np.ones(3, bool))
    with pytest.raises(ValueError, match="`row_weights` that leave a row"):
        combine.weights.stacking(log_scores, row_weights=np.zeros(4, bool))
    with pytest.raises(ValueError, match="`tolerance` to be at least 0 and finite, got -1.0"):
        combine.weights.stacking(log_scores, tolerance=-1.0)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("find", [combine.weights.stacking, combine.weights.bayesian])
def test_what_is_no_log_score(find):
    logits = np.random.default_rng(7).normal(size=(3, 20, 4)).astype(np.float32)
    of_classes = jax.nn.log_softmax(logits)
    of_labels = of_classes[..., 1]
    for shaped in (of_classes, of_classes.reshape(3, 4, 5, 4)):
        with pytest.raises(ValueError, match=r"one of `log_scores` per member and row.\n.*\nTake the log-prob"):
            find(shaped)
    mask = np.arange(20) > 2
    with pytest.warns(UserWarning, match="takes natural logarithms, but all .* as probabilities are"):
        find(jnp.where(mask, jnp.exp(of_labels), -1.0), row_weights=mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find(of_labels)
        find(of_labels.reshape(3, 5, 4))
        find(np.zeros((3, 5), np.float32))  # every member is certain, and right
