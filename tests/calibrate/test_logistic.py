"""Platt scaling and beta calibration: scikit-learn's and scipy's minima, closed forms, members, masks, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import calibrate

optimize = pytest.importorskip("scipy.optimize")

RNG = np.random.default_rng(0)
ODDS = 3 * RNG.normal(size=400) + 1
LABELS = (RNG.uniform(size=400) < 1 / (1 + np.exp(0.3 - 0.4 * ODDS))).astype(int)
NO_SLOPE = (np.arange(400) % 3 == 0).astype(int)


def _logits(odds):
    """One member of two classes."""
    return np.stack([0 * odds, odds], axis=-1)[None]


def _binary(kind, odds, labels):
    """The parameters of the second class; always of 400 rows, of which some are masked, so that one program serves."""
    pad = (0, 400 - len(odds))
    logits, mask = _logits(np.pad(odds, pad)).astype(np.float32), np.arange(400) < len(odds)
    fitted = getattr(calibrate, kind)(logits, np.pad(labels, pad), pool="mixture", row_weights=mask)
    names = ("slope", "offset") if kind == "platt" else ("a", "b", "c")
    return np.array([getattr(fitted, name)[0, 1] for name in names])


def _beta_loss(params, odds, labels):
    a, b, c = params
    margin = -a * np.logaddexp(0, -odds) + b * np.logaddexp(0, odds) + c
    return np.mean(np.logaddexp(0, np.where(labels == 1, -margin, margin)))


def test_platt_is_scikit_learns():
    pytest.importorskip("sklearn")
    from sklearn.calibration import _SigmoidCalibration

    for odds, labels in [(ODDS, LABELS), (ODDS, NO_SLOPE), (ODDS[:5], np.array([0, 1, 1, 0, 1]))]:
        want = _SigmoidCalibration().fit(odds, labels)
        # scikit-learn stops within about 1e-6 of the minimum.
        np.testing.assert_allclose(_binary("platt", odds, labels), [-want.a_, -want.b_], rtol=1e-4, atol=1e-5)
    raw = optimize.minimize(
        lambda p: np.mean(np.logaddexp(0, np.where(LABELS[:9] == 1, -1, 1) * (p[0] * ODDS[:9] + p[1]))), [0, 0]
    )
    assert not np.allclose(_binary("platt", ODDS[:9], LABELS[:9]), raw.x, rtol=0.05)


@pytest.mark.slow
def test_platt_of_three_classes_is_scikit_learns():
    pytest.importorskip("sklearn")
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.frozen import FrozenEstimator

    class LogOdds(ClassifierMixin, BaseEstimator):
        def fit(self, x, y):
            self.classes_ = np.unique(y)
            return self

        def predict(self, x):
            return x.argmax(-1)

        def decision_function(self, x):
            p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
            return np.log(p) - np.log1p(-p)

    labels = RNG.integers(3, size=60)
    logits = 2 * RNG.normal(size=(60, 3)) + np.eye(3)[labels]
    model = FrozenEstimator(LogOdds().fit(logits, labels))
    want = CalibratedClassifierCV(model, method="sigmoid").fit(logits, labels).predict_proba(logits)
    fitted = calibrate.platt(logits[None].astype(np.float32), labels, pool="mixture")
    np.testing.assert_allclose(np.exp(fitted(logits[None].astype(np.float32)))[0], want, rtol=1e-3, atol=1e-4)
    assert not np.allclose(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), want, atol=0.05)


def test_platt_of_separable_rows_and_of_one_class():
    # Symmetric and separable: smoothed targets 4/5 and 1/5; the loss of raw ones has no minimum.
    odds = np.array([-2.0, -2, -2, 2, 2, 2])
    slope, offset = _binary("platt", odds, (odds > 0).astype(int))
    np.testing.assert_allclose([slope, offset], [np.log(4) / 2, 0], rtol=1e-5, atol=1e-6)
    slope, offset = _binary("platt", np.array([1.0, 2, 3]), np.ones(3, int))
    np.testing.assert_allclose([slope, offset], [0, np.log(4)], atol=1e-4)
    # One score alone: the smoothed frequency, whatever the slope.
    slope, offset = _binary("platt", np.ones(6), np.array([0, 1, 1, 0, 1, 1]))
    rate = (4 * 5 / 6 + 2 * 1 / 4) / 6
    np.testing.assert_allclose(slope + offset, np.log(rate / (1 - rate)), rtol=1e-5)


@pytest.mark.parametrize(("move", "unit"), [(1000.0, 1.0), (0.0, 1e-3), (1e4, 1e3)])
def test_scores_of_any_size(move, unit):
    slope, offset = _binary("platt", ODDS, LABELS)
    other = _binary("platt", unit * ODDS + move, LABELS)
    # Of scores near 1000 float32 keeps five digits after the mean is taken off.
    np.testing.assert_allclose([other[0] * unit, other[1] + other[0] * move], [slope, offset], rtol=1e-3, atol=1e-3)


def test_beta_is_logistic_regression_where_no_bound_is_met():
    want = optimize.minimize(_beta_loss, [1, 1, 0], (ODDS, LABELS), tol=1e-10).x
    assert (want[:2] > 0).all()
    np.testing.assert_allclose(_binary("beta", ODDS, LABELS), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["a", "b", "both"])
def test_beta_is_scipys_minimum_where_a_bound_is_met(kind):
    # Frequencies that fall at one end of the probabilities, or everywhere.
    rng = np.random.default_rng(1)
    rate = {"a": ODDS * (ODDS > 0) - 0.3 * ODDS * (ODDS < 0), "b": ODDS * (ODDS < 0) - 0.3 * ODDS * (ODDS > 0)}
    labels = (rng.uniform(size=400) < 1 / (1 + np.exp(-rate.get(kind, -0.2 * ODDS)))).astype(int)
    bounds = [(0, None), (0, None), (None, None)]
    want = optimize.minimize(
        _beta_loss, [1, 1, 0], (ODDS, labels), bounds=bounds, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9}
    ).x
    got = _binary("beta", ODDS, labels)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    zero = {"a": [0], "b": [1], "both": [0, 1]}[kind]
    assert (got[zero] == 0).all()
    free = optimize.minimize(_beta_loss, [1, 1, 0], (ODDS, labels), tol=1e-10).x
    assert free[zero].min() < -0.05


@pytest.mark.parametrize("kind", ["platt", "beta"])
def test_equal_predictions_become_the_frequency(kind):
    """The logarithm of 1/2 has a mean that rounds to another number."""
    labels = LABELS[:297]
    for odds in (0.0, 1.3):
        params = _binary(kind, np.full(297, odds), labels)
        p = 1 / (1 + np.exp(-odds))
        if kind == "platt":
            margin, want = params @ [odds, 1], (labels.sum() ** 2 + labels.sum()) / (labels.sum() + 2)
            want = (want + (297 - labels.sum()) / (299 - labels.sum())) / 297
        else:
            margin, want = params @ [np.log(p), -np.log(1 - p), 1], labels.mean()
        np.testing.assert_allclose(1 / (1 + np.exp(-margin)), want, rtol=1e-5)


@pytest.mark.slow
def test_beta_of_beta_distributions():
    # a and b are the differences of the distributions' parameters, c the log-ratio of their constants.
    stats = pytest.importorskip("scipy.stats")
    from scipy.special import betaln

    rng, n = np.random.default_rng(0), 40_000
    labels = np.arange(n) % 2
    p = np.where(labels == 1, stats.beta(4, 2).rvs(n, random_state=rng), stats.beta(1, 3).rvs(n, random_state=rng))
    want = np.array([3.0, 1.0, betaln(1, 3) - betaln(4, 2)])
    features = np.stack([np.log(p), -np.log1p(-p), np.ones(n)])
    rate = 1 / (1 + np.exp(-want @ features))
    error = 6 * np.sqrt(np.diag(np.linalg.inv(features * rate * (1 - rate) @ features.T)))
    fitted = calibrate.beta(_logits(np.log(p) - np.log1p(-p)).astype(np.float32), labels, pool="mixture")
    got = np.array([leaf[0, 1] for leaf in jax.tree.leaves(fitted)])
    assert (np.abs(got - want) < error).all()
    assert np.abs(got - want[[1, 0, 2]])[0] > 3 * error[0]


def test_one_one_zero_is_the_identity():
    logits = np.concatenate([3 * RNG.normal(size=(1, 50, 4)), np.float32([[[90, 0, -20, 5]]])], axis=1).astype(
        np.float32
    )
    pooling = calibrate.histogram(logits[:, :8], np.arange(8) % 4, pool="mixture", num_bins=1).pooling
    ones = jnp.ones((1, 4))
    for fitted in (calibrate.Beta(ones, ones, 0 * ones, pooling), calibrate.Platt(ones, 0 * ones, pooling)):
        np.testing.assert_allclose(fitted(logits), jax.nn.log_softmax(logits), rtol=1e-5, atol=1e-5)
    other = calibrate.Beta(ones, 2 * ones, 0 * ones, pooling)
    assert not np.allclose(other(logits), jax.nn.log_softmax(logits), atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["platt", "beta"])
def test_members_masks_weights_and_jit(kind):
    fit = getattr(calibrate, kind)
    logits = np.stack([np.stack([0 * ODDS, ODDS * size], -1) for size in (1, 2, 0.5)]).astype(np.float32)
    together = fit(logits, LABELS, pool="members")
    leaves = lambda fitted: np.stack(jax.tree.leaves(fitted))
    alone = np.concatenate([leaves(fit(one[None], LABELS, pool="members")) for one in logits], axis=1)
    np.testing.assert_allclose(leaves(together), alone, rtol=1e-3, atol=1e-4)
    mask = np.arange(400) % 3 > 0
    spoilt, labels = np.where(mask[:, None], logits, np.nan), np.where(mask, LABELS, -9)
    want = leaves(fit(logits[:, mask], LABELS[mask], pool="members"))
    np.testing.assert_allclose(
        leaves(fit(spoilt, labels, pool="members", row_weights=mask)), want, rtol=1e-3, atol=1e-4
    )
    traced = jax.jit(lambda x, y, mask: fit(x, y, pool="members", row_weights=mask))(spoilt, labels, mask)
    np.testing.assert_allclose(leaves(traced), want, rtol=1e-3, atol=1e-4)
    assert not np.allclose(leaves(together), want, rtol=1e-2)
    spoilt = np.where(np.arange(3)[:, None, None] == 1, np.nan, logits)
    mixed = fit(spoilt, LABELS, pool="mixture", weights=np.array([1, 0, 1]))
    both = fit(logits[[0, 2]], LABELS, pool="mixture")
    np.testing.assert_allclose(mixed(spoilt), both(logits[[0, 2]]), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["platt", "beta"])
def test_gradient_is_that_of_the_implicit_function(kind):
    with jax.enable_x64(True):
        logits, way = _logits(ODDS[:60]), np.random.default_rng(0).normal(size=(1, 60, 2))

        def total(step):
            fitted = getattr(calibrate, kind)(logits + step * way, LABELS[:60], pool="mixture")
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fitted))

        found = jax.grad(total)(jnp.asarray(0.0))
        np.testing.assert_allclose(found, (total(1e-5) - total(-1e-5)) / 2e-5, rtol=1e-5)
        assert abs(found) > 1e-4


def test_beta_has_no_optimum_for_separable_rows():
    odds = np.array([-3.0, -2, -1, 1, 2, 3])
    for labels in ((odds > 0).astype(int), np.ones(6, int)):
        with pytest.raises(
            ValueError, match="`calibrate.beta` needs labels for which optimal parameters exist.\n  class 0"
        ):
            _binary("beta", odds, labels)
        fit = lambda y: calibrate.beta(_logits(odds).astype(np.float32), y, pool="mixture").a
        assert np.isnan(jax.jit(fit)(labels)).all()
    # The wrong way round the rate of the labels is left, without a slope.
    np.testing.assert_allclose(_binary("beta", odds, (odds < 0).astype(int)), [0, 0, 0], atol=1e-6)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    fitted = calibrate.platt(_logits(ODDS), LABELS, pool="mixture")
    with pytest.raises(ValueError, match="`calibrate.Platt` needs logits of the classes that it was fitted on"):
        fitted(np.zeros((1, 5, 3), np.float32))
    with pytest.raises(ValueError, match="`weights` only with `pool"):
        calibrate.beta(_logits(ODDS), LABELS, pool="members", weights=np.ones(1))
    with pytest.raises(ValueError, match="`calibrate.platt` needs finite `logits`"):
        calibrate.platt(np.where(_logits(ODDS) > 5, np.inf, _logits(ODDS)), LABELS, pool="mixture")
