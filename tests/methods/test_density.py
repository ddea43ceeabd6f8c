"""Densities and distances of hidden units against scikit-learn and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from eqx_ensemble.methods.density import gaussian_discriminant, mahalanobis

RNG = np.random.default_rng(0)
LABELS = RNG.integers(3, size=90)
SKEW = RNG.normal(size=(2, 3, 4, 4))
# (members, batch, hidden): each class of each member has a covariance of its own.
FEATURES = np.stack([
    np.stack([SKEW[m, c] @ RNG.normal(size=4) + 3 * c for c in LABELS]) for m in range(2)
]).astype(np.float32)  # fmt: skip
NEW = (4 * RNG.normal(size=(2, 7, 4))).astype(np.float32)
FLAT = FEATURES * np.array([1, 1, 1, 0], np.float32)
BOTH = pytest.mark.parametrize("fit", [gaussian_discriminant, mahalanobis])


def joint(m, ridge=0.0, ddof=1):
    """The log-densities of the classes and a row, by SciPy."""
    parts = []
    for c in range(3):
        rows = FEATURES[m, LABELS == c].astype(np.float64)
        gaussian = stats.multivariate_normal(rows.mean(0), np.cov(rows.T, ddof=ddof) + ridge * np.eye(4))
        parts.append(np.log(len(rows) / 90) + gaussian.logpdf(NEW[m].astype(np.float64)))
    return np.array(parts)


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_density_is_that_of_a_mixture_of_gaussians(ridge):
    fitted = gaussian_discriminant(FEATURES, LABELS, num_classes=3, ridge=ridge)
    for m in range(2):
        expected = joint(m, ridge)
        np.testing.assert_allclose(fitted.log_joint(NEW)[m], expected, rtol=2e-4, atol=1e-3)
        np.testing.assert_allclose(fitted(NEW)[m], logsumexp(expected, axis=0), rtol=2e-4, atol=1e-3)
        assert np.abs(joint(m, ridge, ddof=0) - expected).max() > 0.01


def test_distances_are_those_of_linear_discriminants():
    pytest.importorskip("sklearn", reason="the oracle")
    from sklearn.covariance import EmpiricalCovariance
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    fitted = mahalanobis(FEATURES, LABELS, num_classes=3)
    plain, relative = fitted(NEW, relative=False), fitted(NEW)
    for m in range(2):
        rows, new = FEATURES[m].astype(np.float64), NEW[m].astype(np.float64)
        oracle = LinearDiscriminantAnalysis(solver="lsqr").fit(rows, LABELS)
        away = new[:, None] - oracle.means_[None]
        nearest = np.einsum("nci,ij,ncj->nc", away, np.linalg.inv(oracle.covariance_), away).min(axis=1)
        background = EmpiricalCovariance().fit(rows).mahalanobis(new)
        np.testing.assert_allclose(plain[m], nearest, rtol=1e-3)
        np.testing.assert_allclose(relative[m], nearest - background, rtol=1e-3, atol=1e-2)


@BOTH
def test_a_mask_one_member_and_a_large_offset(fit):
    mask = np.arange(90) % 3 > 0
    masked = fit(np.where(mask[:, None], FEATURES, np.nan), LABELS, num_classes=3, ridge=0.5, row_weights=mask)(NEW)
    left_out = fit(FEATURES[:1, mask], LABELS[mask], num_classes=3, ridge=0.5)(NEW[:1])
    np.testing.assert_allclose(masked[:1], left_out, rtol=1e-4)
    # Means of 4096 and deviations of 1, of which float32 holds 11 bits.
    here, there = (np.round(FEATURES * 64) / 64 + np.float32(offset) for offset in (0, 4096))
    here, there = (fit(x, LABELS, num_classes=3)(x) for x in (here, there))
    np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-2)


@BOTH
@pytest.mark.parametrize("spoil", ["constant", "a sum of others"])
def test_variances_of_rounding_are_none(fit, spoil):
    """Rounding makes some of these covariances positive definite."""
    rng, labels = np.random.default_rng(1), np.arange(24) % 2
    features = rng.normal(size=(30, 24, 3)).astype(np.float32)
    constant = 0.1 + np.arange(30)[:, None]
    features[..., 2] = constant if spoil == "constant" else features[..., 0] + features[..., 1]
    assert jnp.isnan(jax.jit(lambda f: fit(f, labels, num_classes=2)(f))(features)).all()
    assert jnp.isfinite(fit(features, labels, num_classes=2, ridge=1e-3)(features)).all()
    features[..., 2] += 1e-2 * rng.normal(size=(30, 24))
    assert jnp.isfinite(fit(features, labels, num_classes=2)(features)).all()


@BOTH
def test_bad_input(unhooked, fit):
    for change, message in [
        ({"labels": LABELS + 1}, "labels from 0 to 2"),
        ({"num_classes": 4}, "singular"),
        ({"features": FLAT}, "singular\\.\n  got one of member 0\n.*`ridge`"),
    ]:
        with pytest.raises((TypeError, ValueError), match=rf"`methods.density.{fit.__name__}` needs .*{message}"):
            fit(**({"features": FEATURES, "labels": LABELS, "num_classes": 3} | change))
    fitted = fit(FEATURES, LABELS, num_classes=3)
    for other in (NEW[:1], NEW[..., :3], NEW[..., :1]):  # other members and layers
        with pytest.raises(ValueError, match=r"that it was fitted on.\n  expected .* = \(2, rows, 4\), got"):
            fitted(other)
    assert jnp.isfinite(fit(FLAT, LABELS, num_classes=3, ridge=0.1)(NEW)).all()
