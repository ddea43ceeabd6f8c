"""Evidential classification against scipy's Dirichlet and beta distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats

import eqx_ensemble as ee
from eqx_ensemble.methods import heads

ALPHA = np.array([[2.0, 3.5, 1.2], [1.0, 1.0, 1.0], [40.0, 1.5, 7.0]])
LABELS = np.array([1, 0, 2])
ONE_HOT = np.eye(3)[LABELS]


def beta_mean(function, alpha):
    """The mean of a function of each class's probability, whose marginal distribution is a beta distribution."""
    marginals = [scipy.stats.beta(a, alpha.sum() - a) for a in alpha]
    return np.array([scipy.integrate.quad(lambda p, m=m: function(p) * m.pdf(p), 0, 1)[0] for m in marginals])


def squared_risk(alpha, label):
    known = scipy.stats.dirichlet(alpha)
    return np.sum((np.eye(3)[label] - known.mean()) ** 2 + known.var())


def digamma_risk(alpha, label):
    return beta_mean(lambda p: -np.log(p), alpha)[label]


def divergence(alpha):
    """From the uniform distribution, whose density is the constant (K - 1)!."""
    return -scipy.stats.dirichlet(alpha).entropy() - scipy.special.gammaln(len(alpha))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(("risk", "oracle"), [("squared", squared_risk), ("digamma", digamma_risk)])
def test_risk_is_the_mean_over_the_distribution(risk, oracle, x64):
    with jax.enable_x64(x64):
        dtype = np.float64 if x64 else np.float32
        got = heads.dirichlet_loss(ALPHA.astype(dtype), LABELS, kl_weight=0, risk=risk, reduction="none")
        assert got.dtype == dtype
    expected = [oracle(alpha, label) for alpha, label in zip(ALPHA, LABELS, strict=True)]
    np.testing.assert_allclose(got, expected, rtol=1e-9 if x64 else 1e-5)
    of_mean = np.sum((ONE_HOT - ALPHA / ALPHA.sum(1, keepdims=True)) ** 2, axis=1)
    assert not np.allclose(got, of_mean, rtol=1e-2)


def test_penalty_leaves_the_label_out():
    loss = lambda weight: heads.dirichlet_loss(ALPHA.astype(np.float32), LABELS, kl_weight=weight, reduction="none")
    got = (loss(0.5) - loss(0.0)) / 0.5
    others = ONE_HOT + (1 - ONE_HOT) * ALPHA
    np.testing.assert_allclose(got, [divergence(alpha) for alpha in others], rtol=1e-4, atol=1e-5)
    assert not np.allclose(got, [divergence(alpha) for alpha in ALPHA], rtol=1e-2)


def test_evidence_for_the_label_is_not_penalised_and_for_others_is():
    slope = jax.grad(
        lambda alpha: heads.dirichlet_loss(alpha, 1, kl_weight=1.0) - heads.dirichlet_loss(alpha, 1, kl_weight=0.0)
    )
    found = slope(jnp.array([2.0, 3.0, 4.0]))
    assert found[1] == 0
    assert (found[jnp.array([0, 2])] > 0.01).all()


@pytest.mark.parametrize("evidence", [0.0, 15.0, 1e3, 1e6])
def test_penalty_of_much_evidence_in_single_precision(evidence):
    concentration = 1 + evidence * np.array([[0.3, 1, 2]])
    wrong = np.where([True, False, False], 1, concentration[0])
    loss = lambda weight: heads.dirichlet_loss(
        jnp.asarray(concentration, jnp.float32), np.zeros(1, int), kl_weight=weight
    )
    np.testing.assert_allclose(loss(1.0) - loss(0.0), divergence(wrong), rtol=1e-5, atol=5e-6)


def test_split_is_that_of_the_distribution():
    parts = heads.decompose_dirichlet(ALPHA.astype(np.float32))
    entropies = [beta_mean(lambda p: -scipy.special.xlogy(p, p), alpha).sum() for alpha in ALPHA]
    np.testing.assert_allclose(parts.aleatoric, entropies, rtol=1e-5)
    total = [scipy.stats.entropy(alpha) for alpha in ALPHA]
    np.testing.assert_allclose(parts.total, total, rtol=1e-5)
    np.testing.assert_allclose(parts.epistemic, np.subtract(total, entropies), rtol=1e-4)
    assert (heads.decompose_dirichlet(np.full(4, 1e7, np.float32)).epistemic >= 0).all()


def test_head_vacuity_and_logits():
    raw = np.random.default_rng(0).normal(size=(5, 7, 3)).astype(np.float32)
    alpha = heads.dirichlet(raw)
    np.testing.assert_allclose(alpha, np.log1p(np.exp(raw)) + 1, rtol=1e-5)
    np.testing.assert_allclose(heads.vacuity(alpha), 3 / np.sum(alpha, axis=-1), rtol=1e-6)
    assert heads.vacuity(np.ones(3, np.float32)) == 1
    mean = alpha / alpha.sum(-1, keepdims=True)
    np.testing.assert_allclose(jax.nn.softmax(jnp.log(alpha)), mean, rtol=1e-5)
    assert ee.scores.nll(jnp.log(alpha), np.zeros(7, int)).shape == ()
    slope = jax.grad(lambda raw: heads.dirichlet_loss(heads.dirichlet(raw), 0, kl_weight=1.0))(jnp.full(3, -5.0))
    assert (np.abs(slope) > 1e-4).all()  # a ReLU has none there


@pytest.mark.parametrize("risk", ["squared", "digamma"])
@pytest.mark.parametrize("label", [-1, 3])
def test_labels_out_of_range(risk, label):
    loss = lambda labels: heads.dirichlet_loss(
        ALPHA.astype(np.float32), labels, kl_weight=1.0, risk=risk, reduction="none"
    )
    np.testing.assert_array_equal(np.isnan(jax.jit(loss)(np.array([0, label, 1]))), [False, True, False])
    with pytest.raises(ValueError, match="labels from 0 to 2"):
        loss(np.array([0, label, 1]))


@pytest.mark.usefixtures("unhooked")
def test_wrong_arguments():
    good = ALPHA.astype(np.float32)
    with pytest.raises(ValueError, match="`concentration` above 0"):
        heads.dirichlet_loss(-good, LABELS, kl_weight=1)
    with pytest.raises(ValueError, match="kl_weight"):
        heads.dirichlet_loss(good, LABELS, kl_weight=-0.1)
    with pytest.raises(ValueError, match="risk"):
        heads.dirichlet_loss(good, LABELS, kl_weight=1, risk="nll")
    with pytest.raises(TypeError, match="kl_weight"):
        heads.dirichlet_loss(good, LABELS)
    with pytest.raises(TypeError, match="One-hot"):
        heads.dirichlet_loss(good, ONE_HOT, kl_weight=1)
    with pytest.raises(ValueError, match="at least two classes"):
        heads.vacuity(np.ones((3, 1), np.float32))
