import jax
import numpy as np
import pytest

from eqx_ensemble import scores


def _classes(shape=(4, 20, 3), seed=0):
    rng = np.random.default_rng(seed)
    return 2 * rng.normal(size=shape).astype(np.float32), rng.integers(shape[-1], size=shape[1:-1])


def _gaussians(shape=(4, 20), seed=0):
    rng = np.random.default_rng(seed)
    mean, targets = rng.normal(size=shape), rng.normal(size=shape[1:])
    return mean.astype(np.float32), rng.uniform(0.1, 3, size=shape).astype(np.float32), targets.astype(np.float32)


@pytest.mark.parametrize("name", ["nll", "brier", "accuracy", "mean_member_accuracy", "ece"])
def test_is_the_loop_over_members(name):
    score, (logits, labels) = getattr(scores, name), _classes()
    got = scores.per_member(score, logits, labels)
    assert got.shape == (4,)
    np.testing.assert_allclose(got, [score(logits[i : i + 1], labels) for i in range(4)], rtol=1e-5)
    assert not np.allclose(got, score(logits, labels), rtol=1e-2)


@pytest.mark.parametrize("name", ["nll_gaussian_mixture", "crps_gaussian_mixture"])
def test_all_arrays_but_the_last_are_predictions(name):
    score, (mean, variance, targets) = getattr(scores, name), _gaussians()
    got = scores.per_member(score, mean, variance, targets)
    want = [score(mean[i : i + 1], variance[i : i + 1], targets) for i in range(4)]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_mean_member_scores_are_its_means():
    logits, labels = _classes()
    np.testing.assert_allclose(
        np.mean(scores.per_member(scores.accuracy, logits, labels)),
        scores.mean_member_accuracy(logits, labels),
        rtol=1e-6,
    )
    mean, _, targets = _gaussians()
    np.testing.assert_allclose(
        np.mean(scores.per_member(scores.rmse, mean, targets)), scores.mean_member_rmse(mean, targets), rtol=1e-6
    )


def test_options_pass_through():
    logits, labels = _classes()
    rows = scores.per_member(scores.nll, logits, labels, reduction="none")
    assert rows.shape == (4, 20)
    np.testing.assert_allclose(rows[2], scores.nll(logits[2:3], labels, reduction="none"), rtol=1e-5)
    coarse = scores.per_member(scores.ece, logits, labels, num_bins=2)
    np.testing.assert_allclose(coarse[1], scores.ece(logits[1:2], labels, num_bins=2), rtol=1e-5)


def test_the_mixture_is_never_worse_than_the_mean_member():
    logits, labels = _classes()
    assert scores.nll(logits, labels) < np.mean(scores.per_member(scores.nll, logits, labels))


def test_jit():
    logits, labels = _classes()
    jitted = jax.jit(lambda l, y: scores.per_member(scores.brier, l, y))(logits, labels)
    np.testing.assert_allclose(jitted, scores.per_member(scores.brier, logits, labels), rtol=1e-5)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    logits, labels = _classes()
    mean, variance, targets = _gaussians()
    with pytest.raises(ValueError, match="needs predictions, then the target.\n  got 1 arrays"):
        scores.per_member(scores.nll, logits)
    with pytest.raises(ValueError, match=r"equally many members, at least one.\n  got shapes \(4, 20\), \(3, 20\)"):
        scores.per_member(scores.nll_gaussian_mixture, mean, variance[:3], targets)
    with pytest.raises(ValueError, match="needs no `weights`"):
        scores.per_member(scores.nll, logits, labels, weights=np.ones(4))
    # The score's own checks still see the target, which is not traced.
    with pytest.raises(ValueError, match="labels from 0 to 2"):
        scores.per_member(scores.nll, logits, labels + 3)
    with pytest.raises(ValueError, match="`labels` of the rows of"):
        scores.per_member(scores.nll, logits, labels[:, None])
