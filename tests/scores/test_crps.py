import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import scores

reference = pytest.importorskip("scoringrules", reason="the reference scores are those of scoringrules")

WEIGHTS = np.array([0.1, 0.4, 0.2, 0.2, 0.1])


def _samples(shape=(5, 30), seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[1:]).astype(np.float32)


def _pairs(samples, targets, weights):
    """The definition: every pair of members, weighted."""
    x, w = np.asarray(samples, np.float64), np.asarray(weights, np.float64) / np.sum(weights)
    outside = np.tensordot(w, np.abs(x - targets), 1)
    between = np.einsum("m,n,mn...->...", w, w, np.abs(x[:, None] - x[None]))
    return outside - between / 2


@pytest.mark.parametrize("num_members", [2, 5, 33])
@pytest.mark.parametrize("estimator", ["nrg", "fair"])
def test_is_scoringrules(estimator, num_members):
    samples, targets = _samples((num_members, 30))
    want = reference.crps_ensemble(
        np.float64(targets), np.float64(samples.T), estimator=estimator, backend="numpy", sorted_ensemble=False
    )
    rows = scores.crps(samples, targets, estimator=estimator, reduction="none")
    np.testing.assert_allclose(rows, want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(scores.crps(samples, targets, estimator=estimator), want.mean(), rtol=1e-5)
    other = scores.crps(samples, targets, estimator="fair" if estimator == "nrg" else "nrg", reduction="none")
    assert not np.allclose(other, want, rtol=1e-2)
    assert not np.allclose(scores.crps(samples, targets[::-1], estimator=estimator, reduction="none"), want, rtol=1e-2)


@pytest.mark.parametrize("shape", [(5,), (5, 7), (5, 4, 3)])
def test_weights_are_those_of_the_definition(shape):
    samples, targets = _samples(shape)
    want = _pairs(samples, targets, WEIGHTS)
    rows = scores.crps(samples, targets, weights=WEIGHTS, reduction="none")
    np.testing.assert_allclose(rows, want, rtol=1e-4, atol=1e-6)
    assert not np.allclose(scores.crps(samples, targets, reduction="none"), want, rtol=1e-2)
    uniform = scores.crps(samples, targets, weights=np.ones(5), reduction="none")
    np.testing.assert_allclose(uniform, scores.crps(samples, targets, reduction="none"), rtol=1e-5, atol=1e-6)


def test_weights_count_members_and_zero_leaves_out():
    samples, targets = _samples((3, 30))
    samples[2] = np.nan
    got = scores.crps(samples, targets, weights=np.array([2, 1, 0]), reduction="none")
    np.testing.assert_allclose(got, scores.crps(samples[[0, 0, 1]], targets, reduction="none"), rtol=1e-5, atol=1e-6)
    assert np.isnan(scores.crps(samples, targets, reduction="none")).all()
    slope = jax.jit(jax.grad(lambda x: scores.crps(x, targets, weights=np.array([2, 1, 0]))))(samples)
    assert np.isfinite(slope).all()


def test_one_member_is_the_absolute_error():
    samples, targets = _samples((1, 30))
    np.testing.assert_allclose(scores.crps(samples, targets, reduction="none"), np.abs(samples[0] - targets), rtol=1e-6)


@pytest.mark.parametrize("weights", [None, np.ones(64)])
def test_a_large_offset_costs_no_precision(weights):
    samples, targets = _samples((64, 30))
    samples, targets = samples + np.float32(1e4), targets + np.float32(1e4)
    want = _pairs(samples, np.float64(targets), np.ones(64))
    got = scores.crps(samples, targets, weights=weights, reduction="none")
    np.testing.assert_allclose(got, want, rtol=2e-5)
    careless = np.abs(samples - targets).mean(0) + samples.mean(0)
    careless -= 2 * (np.sort(samples, 0) * np.arange(64, dtype=np.float32)[:, None]).sum(0) / np.float32(64 * 63)
    fair = reference.crps_ensemble(np.float64(targets), np.float64(samples.T), estimator="fair", backend="numpy")
    assert np.abs(careless - fair).max() > 1e-3  # probability-weighted moments in float32
    np.testing.assert_allclose(
        scores.crps(samples, targets, estimator="fair", reduction="none"), fair, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_gradient_is_that_of_the_pairs(weights):
    samples, targets = _samples((5, 30))
    w = jnp.full(5, 0.2) if weights is None else jnp.asarray(weights, jnp.float32)

    def pairs(x):
        outside = jnp.tensordot(w, jnp.abs(x - targets[None]), 1)
        between = jnp.einsum("m,n,mnb->b", w, w, jnp.abs(x[:, None] - x[None]))
        return jnp.mean(outside - between / 2)

    got = jax.jit(jax.grad(lambda x: scores.crps(x, targets, weights=weights)))(samples)
    np.testing.assert_allclose(got, jax.jit(jax.grad(pairs))(samples), rtol=1e-4, atol=1e-6)


def test_fair_does_not_depend_on_the_number_of_members():
    # The expected score of M draws from N(0, 1) for a target from N(0, 1) is 1 / sqrt(pi), for each M.
    rng = np.random.default_rng(0)
    for num_members in (2, 16):
        samples = rng.normal(size=(num_members, 40_000)).astype(np.float32)
        targets = rng.normal(size=40_000).astype(np.float32)
        rows = np.asarray(scores.crps(samples, targets, estimator="fair", reduction="none"))
        # Six standard errors: a false alarm in a billion.
        assert abs(rows.mean() - 1 / np.sqrt(np.pi)) < 6 * rows.std() / 200
        assert scores.crps(samples, targets) - rows.mean() > 6 * rows.std() / 200


@pytest.mark.usefixtures("unhooked")
def test_messages():
    samples, targets = _samples((3, 6))
    with pytest.raises(ValueError, match="`estimator` to be one of 'nrg', 'fair', got 'pwm'"):
        scores.crps(samples, targets, estimator="pwm")
    with pytest.raises(ValueError, match='at least two members for estimator="fair".\n  got 1\nUse `estimator="nrg"`.'):
        scores.crps(samples[:1], targets, estimator="fair")
    with pytest.raises(ValueError, match='equally weighted members for estimator="fair"'):
        scores.crps(samples, targets, estimator="fair", weights=np.ones(3))


@pytest.mark.parametrize(
    "score", [scores.crps, lambda *args, **kw: scores.threshold_weighted_crps(*args, lower=-1, **kw)]
)
@pytest.mark.parametrize("options", [{}, {"estimator": "fair"}, {"weights": np.array([0.5, 0.3, 0.2])}])
def test_infinite_numbers(score, options):
    """The integral does not converge, unless members and target are at the same infinity."""
    inf = np.inf
    targets = np.array([inf, 0, 0, inf, inf, 0, np.nan], np.float32)
    samples = np.array([[0, 1, 2], [inf, inf, 0], [0, inf, 0], [inf] * 3, [inf, inf, 0], [0, 1, np.nan], [inf] * 3])
    found = score(samples.T.astype(np.float32), targets, reduction="none", **options)
    np.testing.assert_array_equal(found, [inf, inf, inf, 0, inf, np.nan, np.nan])
