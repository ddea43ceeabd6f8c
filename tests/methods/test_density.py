"""Densities and distances of hidden units against scikit-learn and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from eqx_ensemble.methods.density import gaussian_discriminant, mahalanobis

sklearn = pytest.importorskip("sklearn", reason="the oracle")

RNG = np.random.default_rng(0)
LABELS = RNG.integers(3, size=90)
SKEW = RNG.normal(size=(2, 3, 4, 4))
# (members, batch, hidden): each class of each member has a covariance of its own.
FEATURES = np.stack([
    np.stack([SKEW[m, c] @ RNG.normal(size=4) + 3 * c for c in LABELS]) for m in range(2)
]).astype(np.float32)  # fmt: skip
NEW = (4 * RNG.normal(size=(2, 7, 4))).astype(np.float32)


def mixture(m, covariance, ddof=1):
    """The log-density, by SciPy."""
    parts = []
    for c in range(3):
        rows = FEATURES[m, LABELS == c].astype(np.float64)
        gaussian = stats.multivariate_normal(rows.mean(0), covariance(rows, ddof))
        parts.append(np.log(len(rows) / 90) + gaussian.logpdf(NEW[m].astype(np.float64)))
    return np.array(parts)


def test_density_is_that_of_a_mixture_of_gaussians():
    fitted = gaussian_discriminant(FEATURES, LABELS, num_classes=3)
    covariance = lambda rows, ddof: np.cov(rows.T, ddof=ddof)
    for m in range(2):
        joint = mixture(m, covariance)
        np.testing.assert_allclose(fitted.log_joint(NEW)[m], joint, rtol=2e-4, atol=1e-3)
        np.testing.assert_allclose(fitted(NEW)[m], logsumexp(joint, axis=0), rtol=2e-4, atol=1e-3)
        assert np.abs(logsumexp(mixture(m, covariance, 0), axis=0) - logsumexp(joint, axis=0)).max() > 0.01


def test_distances_are_those_of_linear_discriminants():
    from sklearn.covariance import EmpiricalCovariance
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    fitted = mahalanobis(FEATURES, LABELS, num_classes=3)
    plain, relative = fitted(NEW, relative=False), fitted(NEW)
    for m in range(2):
        rows, new = FEATURES[m].astype(np.float64), NEW[m].astype(np.float64)
        oracle = LinearDiscriminantAnalysis(solver="lsqr").fit(rows, LABELS)
        precision = np.linalg.inv(oracle.covariance_)
        away = new[:, None] - oracle.means_[None]
        nearest = np.einsum("nci,ij,ncj->nc", away, precision, away).min(axis=1)
        background = EmpiricalCovariance().fit(rows).mahalanobis(new)
        np.testing.assert_allclose(plain[m], nearest, rtol=1e-3)
        np.testing.assert_allclose(relative[m], nearest - background, rtol=1e-3, atol=1e-2)


def test_a_ridge_a_mask_and_one_member():
    mask = np.arange(90) % 3 > 0
    spoilt = np.where(mask[:, None], FEATURES, np.nan)
    for fit in (gaussian_discriminant, mahalanobis):
        masked = fit(spoilt, LABELS, num_classes=3, ridge=0.5, row_weights=mask)(NEW)
        left_out = fit(FEATURES[:1, mask], LABELS[mask], num_classes=3, ridge=0.5)(NEW[:1])
        np.testing.assert_allclose(masked[:1], left_out, rtol=1e-4)
    joint = mixture(0, lambda rows, ddof: np.cov(rows.T, ddof=ddof) + 0.5 * np.eye(4))
    found = gaussian_discriminant(FEATURES, LABELS, num_classes=3, ridge=0.5)(NEW)[0]
    np.testing.assert_allclose(found, logsumexp(joint, axis=0), rtol=2e-4, atol=1e-3)


def test_a_large_offset_costs_no_digits():
    """Means of 4096 and deviations of 1, of which float32 holds 11 bits."""
    coarse = np.round(FEATURES * 64) / 64
    here = gaussian_discriminant(coarse, LABELS, num_classes=3)(coarse)
    there = gaussian_discriminant(coarse + np.float32(4096), LABELS, num_classes=3)(coarse + np.float32(4096))
    np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-2)


def test_under_jit_with_double_precision():
    with jax.enable_x64(True):
        fit = jax.jit(lambda f, y: gaussian_discriminant(f, y, num_classes=3)(NEW.astype(np.float64)))
        found = np.asarray(fit(FEATURES.astype(np.float64), LABELS))
        few = np.asarray(fit(FEATURES[:, :3].astype(np.float64), LABELS[:3]))
    joint = mixture(0, lambda rows, ddof: np.cov(rows.T, ddof=ddof))
    np.testing.assert_allclose(found[0], logsumexp(joint, axis=0), rtol=1e-11)
    assert np.isnan(few).all()


@pytest.mark.parametrize("fit", [gaussian_discriminant, mahalanobis])
@pytest.mark.parametrize("spoil", ["constant", "a sum of others"])
def test_variances_of_rounding_are_none(fit, spoil):
    """Rounding makes some of these covariances positive definite."""
    rng, labels = np.random.default_rng(1), np.arange(24) % 2
    features = rng.normal(size=(30, 24, 3)).astype(np.float32)
    constant = 0.1 + np.arange(30)[:, None]
    features[..., 2] = constant if spoil == "constant" else features[..., 0] + features[..., 1]
    values = jax.jit(lambda f: fit(f, labels, num_classes=2)(f))(features)
    assert jnp.isnan(values).all()
    assert jnp.isfinite(fit(features, labels, num_classes=2, ridge=1e-3)(features)).all()
    features[..., 2] += 1e-2 * rng.normal(size=(30, 24))
    assert jnp.isfinite(fit(features, labels, num_classes=2)(features)).all()


FLAT = FEATURES * np.array([1, 1, 1, 0], np.float32)


@pytest.mark.parametrize("fit", [gaussian_discriminant, mahalanobis])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": FEATURES[0]}, r"`features` of shape \(members, rows, hidden\)"),
        ({"features": FEATURES * np.nan}, "finite `features`"),
        ({"labels": LABELS[1:]}, "`labels` of the rows of `features`"),
        ({"labels": LABELS + 1}, "labels from 0 to 2, as `num_classes` is 3"),
        ({"num_classes": 4}, "singular"),
        ({"features": FLAT}, "singular\\.\n  got one of member 0\n.*`ridge`"),
        ({"ridge": -1.0}, "`ridge` of zero or more"),
    ],
)
def test_bad_input(unhooked, fit, change, message):
    with pytest.raises((TypeError, ValueError), match=rf"`methods.density.{fit.__name__}` needs .*{message}"):
        fit(**({"features": FEATURES, "labels": LABELS, "num_classes": 3} | change))


@pytest.mark.parametrize("fit", [gaussian_discriminant, mahalanobis])
def test_other_members_and_layers(unhooked, fit):
    fitted = fit(FEATURES, LABELS, num_classes=3)
    for other in (NEW[:1], NEW[..., :3], NEW[..., :1]):
        with pytest.raises(ValueError, match=r"that it was fitted on.\n  expected .* = \(2, rows, 4\), got"):
            fitted(other)
    assert jnp.isfinite(fit(FLAT, LABELS, num_classes=3, ridge=0.1)(NEW)).all()
