"""SNGP against its kernel, the Gaussian process and SVD; densities and distances of hidden units."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import integrate, stats
from scipy.special import expit, logsumexp, softmax

import eqx_ensemble as ee
from eqx_ensemble.methods.density import gaussian_discriminant, mahalanobis
from eqx_ensemble.methods.sngp import SNGP, bound_spectral_norm, mean_field, update_covariance

from ..factories import assert_same, relaxed

KEY = jax.random.key(4)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(37, 3)).astype(np.float32)


def plain(key, out=1, **options):
    """A Gaussian process of the inputs themselves."""
    return SNGP(eqx.nn.Identity(), 3, out, **({"num_features": 16} | options), key=key)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(plain, 3, key=KEY)


def features(model, x):
    """The features written out in double precision."""
    frequencies, phases = (np.asarray(v.value, np.float64) for v in (model.frequencies, model.phases))
    return np.sqrt(2 / len(phases)) * np.cos(np.asarray(x, np.float64) @ frequencies.T + phases)


def test_features_approximate_the_kernel():
    points = jnp.asarray(RNG.normal(size=(60, 3)), jnp.float32)
    model = plain(KEY, num_features=1024, length_scale=1.7)
    phi = np.asarray(jax.vmap(model.features)(points))
    np.testing.assert_allclose(phi, features(model, points), atol=1e-5)
    squared = ((np.asarray(points)[:, None] - np.asarray(points)[None]) ** 2).sum(-1)
    rms = lambda scale: np.sqrt(np.mean((phi @ phi.T - np.exp(-squared / (2 * scale**2))) ** 2))
    assert 0.014 < rms(1.7) < 0.036  # as the root of the number of features
    assert rms(1.0) > 0.084, "another length scale is told apart"


@pytest.mark.slow
def test_covariance_is_that_of_the_gaussian_process():
    """From the kernel matrix of all rows, without any matrix of features' size."""
    with jax.enable_x64(True):
        noise, x, new = 0.3, X.astype(np.float64), RNG.normal(size=(5, 3))
        built = ee.build(lambda key: plain(key, noise_variance=noise, ridge=2.0), 2, key=KEY)
        fitted = update_covariance(built, x, batch_size=10)
        variance = lambda ensemble: np.asarray(ee.predict(ensemble, new).variance[..., 0])
        found, again = variance(fitted), variance(update_covariance(fitted, x))
    for i in range(2):
        phi, other = features(built[i], x), features(built[i], new)
        kernel, cross = phi @ phi.T / 2.0, other @ phi.T / 2.0  # over the ridge
        expected = other @ other.T / 2.0 - cross @ np.linalg.solve(kernel + noise * np.eye(len(x)), cross.T)
        np.testing.assert_allclose(found[i], np.diag(expected), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(again, found, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("likelihood", "out"), [("bernoulli", 2), ("categorical", 3)])
def test_covariances_of_classes_are_laplaces(likelihood, out):
    built = ee.build(lambda key: plain(key, out, likelihood=likelihood), 1, key=KEY)
    built = eqx.tree_at(lambda e: e.stacked.weight, built, 5 * built.stacked.weight)
    found, model = ee.predict(update_covariance(built, X, batch_size=16), X), built[0]
    assert np.isnan(ee.predict(built, X).variance).all()  # before the data
    phi = features(model, X)
    logits = phi @ np.asarray(model.weight, np.float64).T
    p = expit(logits) if likelihood == "bernoulli" else softmax(logits, axis=1)
    np.testing.assert_allclose(found.mean[0], logits, rtol=1e-4, atol=1e-5)
    for k in range(out):
        precision = np.eye(16) + (phi * (p * (1 - p))[:, [k]]).T @ phi
        expected = np.einsum("ni,ij,nj->n", phi, np.linalg.inv(precision), phi)
        np.testing.assert_allclose(found.variance[0, :, k], expected, rtol=1e-4)


def test_rows_of_each_member_are_its_own_and_what_members_share_stays_shared(ensemble):
    """The covariance is each member's own once it is known."""
    own = np.stack([X[:20], X[10:30], X[17:]])
    found = update_covariance(ensemble, ee.Each(own)).stacked.root.value
    for i in range(3):
        alone = update_covariance(ensemble[[i]], own[i]).stacked.root.value[0]
        np.testing.assert_allclose(np.abs(found[i]), np.abs(alone), rtol=1e-3, atol=1e-5)
    models = [eqx.tree_at(lambda m: m.weight, model, ensemble[0].weight) for model in ensemble]
    found = update_covariance(ee.stack(models, shared=lambda m: (m.weight, m.root.value)), X)
    assert found.stacked.weight.shape == ensemble[0].weight.shape
    np.testing.assert_array_equal(found[1].root.value, update_covariance(ensemble, X)[1].root.value)


@pytest.mark.slow
def test_a_small_ridge_does_not_break_single_precision():
    """The precision's condition number is beyond float32: its Cholesky factor does not exist there."""
    built = ee.build(lambda key: plain(key, num_features=64, ridge=1e-6), 1, key=KEY)
    new, x = np.float32([[0, 0, 0], [4, 0, 0]]), np.tile(X, (20, 1))
    phi, other = features(built[0], x), features(built[0], new)
    expected = np.einsum("ni,ij,nj->n", other, np.linalg.inv(1e-6 * np.eye(64) + phi.T @ phi), other)
    np.testing.assert_allclose(ee.predict(update_covariance(built, x), new).variance[0, :, 0], expected, rtol=0.02)


@pytest.mark.parametrize(("m", "v"), [(1, 1), (4, 25)])
def test_mean_field_is_near_the_mean_probability(m, v):
    exact = integrate.quad(lambda z: expit(z) * stats.norm.pdf(z, m, v**0.5), -60, 60)[0]
    found = mean_field(np.float32([m]), np.float32([v]))
    np.testing.assert_allclose(expit(np.asarray(found))[0], exact, atol=0.004)
    wide = mean_field(np.float32([m]), np.float32([v]), factor=20)
    np.testing.assert_allclose(wide[0], m / np.sqrt(1 + 20 * v), rtol=1e-6)


@pytest.mark.slow
def test_in_fit_with_state_and_files(tmp_path):
    norm = lambda: eqx.nn.BatchNorm(3, "batch", mode="batch")
    make = eqx.nn.make_with_state(lambda key: SNGP(norm(), 3, 2, num_features=8, key=key))

    def loss(model, state, batch, key):
        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch[0], state)
        return optax.softmax_cross_entropy_with_integer_labels(out.mean, batch[1]).mean(), state

    built, state = ee.build(make, 2, key=KEY)
    data, options = (X, (X[:, 0] > 0).astype(np.int32)), dict(epochs=3, batch_size=8, state=state, key=KEY)
    with relaxed(), jax.debug_nans(True):  # the variance, which is not yet known, does not disturb training
        run = ee.fit(built, loss, optax.adamw(1e-2), data, **options)
    for name in ("frequencies", "phases", "root"):
        np.testing.assert_array_equal(getattr(run.ensemble.stacked, name).value, getattr(built.stacked, name).value)
    with relaxed():
        fitted = update_covariance(run.ensemble, X, state=run.state)
        ee.save(tmp_path / "sngp", fitted)
        variance = lambda ensemble: ee.predict(ensemble, X, state=run.state).variance
        assert np.isfinite(variance(fitted)).all()
        np.testing.assert_array_equal(variance(ee.load(tmp_path / "sngp", built)), variance(fitted))


@pytest.mark.slow
def test_norms_are_bounded_and_what_is_below_is_left_alone():
    built = ee.build(lambda key: eqx.nn.MLP(3, 2, 6, 1, key=key), 2, key=KEY)
    mse = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)
    data = tuple(v.astype(jnp.result_type(float)) for v in (X, X @ RNG.normal(size=(3, 2))))
    train = lambda optimiser, **more: ee.fit(built, mse, optimiser, data, steps=30, batch_size=37, key=KEY, **more)
    free = train(optax.sgd(0.1)).ensemble.stacked.layers
    bounded = lambda bound: bound_spectral_norm(optax.sgd(0.1), bound, where=lambda model: model.layers[0])
    layers = train(bounded, hyper=jnp.array([0.4, 100.0])).ensemble.stacked.layers
    norms = lambda weight: np.linalg.norm(weight, 2, axis=(1, 2))
    assert norms(free[0].weight).min() > 0.8
    np.testing.assert_allclose(norms(layers[0].weight)[0], 0.4, rtol=1e-3)
    second = lambda layers: jax.tree.map(lambda x: x[1], eqx.filter(layers, eqx.is_array))
    assert_same(second(layers), second(free))
    assert norms(layers[1].weight)[0] > 0.4, "the last layer was not selected"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_it_is_the_new_weight_that_is_bounded(dtype):
    draws = RNG.normal(size=(2, 2, 5, 2, 2))
    weight, change = jnp.asarray(draws[0] if dtype == np.float32 else draws[0] + 1j * draws[1], dtype)
    optimiser = bound_spectral_norm(optax.sgd(1.0), 0.7, where=lambda w: w, num_iterations=50)
    with relaxed():
        updates, _ = optimiser.update(-change, optimiser.init(weight), weight)
    new = np.asarray(weight + change)
    expected = 0.7 * new / np.linalg.norm(new.reshape(5, 4), 2)
    np.testing.assert_allclose(weight + updates, expected, rtol=1e-4, atol=1e-6)
    zero = jnp.zeros((3, 4), dtype)  # weights that begin at zero are bounded, too
    with relaxed():
        state = optimiser.init(zero)
        for _ in range(3):
            updates, state = optimiser.update(-jnp.ones_like(zero), state, zero)
            zero += updates
    np.testing.assert_allclose(np.linalg.norm(zero, 2), 0.7, rtol=1e-5)


def test_bad_input(unhooked, ensemble):
    with pytest.raises(ValueError, match="methods.sngp.update_covariance"):
        update_covariance(ensemble, X[:0])
    bound = bound_spectral_norm(optax.sgd(0.1), 1.0, where=lambda m: m.bias)
    with pytest.raises(ValueError, match="arrays of two or more axes, got none"):
        bound.init(eqx.nn.Linear(3, 2, key=KEY))


# Densities and distances of hidden units, against scikit-learn and SciPy

DRAWS = np.random.default_rng(0)
LABELS = DRAWS.integers(3, size=90)
SKEW = DRAWS.normal(size=(2, 3, 4, 4))
# (members, batch, hidden): each class of each member has a covariance of its own.
HIDDEN = np.stack([
    np.stack([SKEW[m, c] @ DRAWS.normal(size=4) + 3 * c for c in LABELS]) for m in range(2)
]).astype(np.float32)  # fmt: skip
NEW = (4 * DRAWS.normal(size=(2, 7, 4))).astype(np.float32)
FLAT = HIDDEN * np.array([1, 1, 1, 0], np.float32)
BOTH = pytest.mark.parametrize("fit", [gaussian_discriminant, mahalanobis])


def joint(m, ridge=0.0, ddof=1):
    """The log-densities of the classes and a row, by SciPy."""
    parts = []
    for c in range(3):
        rows = HIDDEN[m, LABELS == c].astype(np.float64)
        gaussian = stats.multivariate_normal(rows.mean(0), np.cov(rows.T, ddof=ddof) + ridge * np.eye(4))
        parts.append(np.log(len(rows) / 90) + gaussian.logpdf(NEW[m].astype(np.float64)))
    return np.array(parts)


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_density_is_that_of_a_mixture_of_gaussians(ridge):
    fitted = gaussian_discriminant(HIDDEN, LABELS, num_classes=3, ridge=ridge)
    for m in range(2):
        expected = joint(m, ridge)
        np.testing.assert_allclose(fitted.log_joint(NEW)[m], expected, rtol=2e-4, atol=1e-3)
        np.testing.assert_allclose(fitted(NEW)[m], logsumexp(expected, axis=0), rtol=2e-4, atol=1e-3)
        assert np.abs(joint(m, ridge, ddof=0) - expected).max() > 0.01


def test_distances_are_those_of_linear_discriminants():
    pytest.importorskip("sklearn", reason="the oracle")
    from sklearn.covariance import EmpiricalCovariance
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    fitted = mahalanobis(HIDDEN, LABELS, num_classes=3)
    plain, relative = fitted(NEW, relative=False), fitted(NEW)
    for m in range(2):
        rows, new = HIDDEN[m].astype(np.float64), NEW[m].astype(np.float64)
        oracle = LinearDiscriminantAnalysis(solver="lsqr").fit(rows, LABELS)
        away = new[:, None] - oracle.means_[None]
        nearest = np.einsum("nci,ij,ncj->nc", away, np.linalg.inv(oracle.covariance_), away).min(axis=1)
        background = EmpiricalCovariance().fit(rows).mahalanobis(new)
        np.testing.assert_allclose(plain[m], nearest, rtol=1e-3)
        np.testing.assert_allclose(relative[m], nearest - background, rtol=1e-3, atol=1e-2)


@BOTH
def test_a_mask_one_member_and_a_large_offset(fit):
    mask = np.arange(90) % 3 > 0
    masked = fit(np.where(mask[:, None], HIDDEN, np.nan), LABELS, num_classes=3, ridge=0.5, row_weights=mask)(NEW)
    left_out = fit(HIDDEN[:1, mask], LABELS[mask], num_classes=3, ridge=0.5)(NEW[:1])
    np.testing.assert_allclose(masked[:1], left_out, rtol=1e-4)
    # Means of 4096 and deviations of 1, of which float32 holds 11 bits.
    here, there = (np.round(HIDDEN * 64) / 64 + np.float32(offset) for offset in (0, 4096))
    here, there = (fit(x, LABELS, num_classes=3)(x) for x in (here, there))
    np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-2)


@pytest.mark.slow
@BOTH
def test_variances_of_rounding_are_none(fit):
    """Rounding makes some of these covariances positive definite."""
    rng, labels = np.random.default_rng(1), np.arange(24) % 2
    features = rng.normal(size=(30, 24, 3)).astype(np.float32)
    features[..., 2] = features[..., 0] + features[..., 1]
    features[:15, :, 2] = 0.1 + np.arange(15)[:, None]
    assert jnp.isnan(jax.jit(lambda f: fit(f, labels, num_classes=2)(f))(features)).all()
    assert jnp.isfinite(fit(features, labels, num_classes=2, ridge=1e-3)(features)).all()


@BOTH
def test_bad_densities(unhooked, fit):
    for change, message in [
        ({"labels": LABELS + 1}, "labels from 0 to 2"),
        ({"num_classes": 4}, "singular"),
        ({"features": FLAT}, "singular\\.\n  got a singular one for member 0\n.*`ridge`"),
    ]:
        with pytest.raises((TypeError, ValueError), match=rf"`methods.density.{fit.__name__}` needs .*{message}"):
            fit(**({"features": HIDDEN, "labels": LABELS, "num_classes": 3} | change))
    fitted = fit(HIDDEN, LABELS, num_classes=3)
    for other in (NEW[:1], NEW[..., :3], NEW[..., :1]):  # other members and layers
        with pytest.raises(ValueError, match=r"that it was fitted on.\n  expected .* = \(2, rows, 4\), got"):
            fitted(other)
