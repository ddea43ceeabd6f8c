"""Laplace approximations against closed forms, exact Hessians, and figures of laplace-torch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
import scipy.stats

import eqx_ensemble as ee
from eqx_ensemble.methods import laplace
from eqx_ensemble.methods.laplace._laplace import monte_carlo, probit

from ..factories import relaxed

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X, NEW = RNG.normal(size=(10, 3)), RNG.normal(size=(2, 3))
LABELS = np.arange(10) * 5 % 3
ONES = np.hstack([X, np.ones((10, 1))])
PRIOR, NOISE = 0.7, 0.4
LINEAR = {"where": lambda model: model, "prior_precision": PRIOR, "batch_size": 4}
LAST = {"where": lambda model: model.layers[-1], "prior_precision": PRIOR, "batch_size": 4}


@pytest.fixture(scope="module", autouse=True)
def double():
    with jax.enable_x64(True), relaxed():
        yield


def linear(weight, bias=None):
    units, inputs = weight.shape
    layer = eqx.nn.Linear(inputs, units, use_bias=bias is not None, key=KEY, dtype=float)
    layer = eqx.tree_at(lambda layer: layer.weight, layer, jnp.asarray(weight))
    return layer if bias is None else eqx.tree_at(lambda layer: layer.bias, layer, jnp.asarray(bias))


def precision_of(posterior, member=0):
    """The posterior's precision as a matrix, from its eigenvalues and eigenvectors."""
    one = posterior.members[member]
    values = np.asarray(one.precision)
    vectors = np.eye(len(values)) if one.vectors is None else np.asarray(one.vectors)
    return vectors @ np.diag(values) @ vectors.T


@pytest.fixture(scope="module")
def exact_fit():
    targets = np.stack([np.sin(X.sum(1)), X[:, 0] ** 2], 1)
    precision = ONES.T @ ONES / NOISE**2 + PRIOR * np.eye(4)
    mean = np.linalg.solve(precision, ONES.T @ targets / NOISE**2).T
    ensemble = ee.stack([linear(mean[:, :3], mean[:, 3])])
    options = LINEAR | {"likelihood": "regression", "noise": NOISE}
    return targets, precision, laplace.fit(ensemble, (X, targets), **options)


class TestLinearRegression:
    """The posterior of a linear model with Gaussian noise is exact, and so is its evidence."""

    def test_evidence(self, exact_fit):
        targets, _, posterior = exact_fit
        for prior, noise in ((PRIOR, NOISE), (PRIOR * (1 + 1e-9), NOISE)):
            law = scipy.stats.multivariate_normal(cov=ONES @ ONES.T / prior + noise**2 * np.eye(10))
            exact = law.logpdf(targets[:, 0]) + law.logpdf(targets[:, 1])
            value = posterior.log_marginal_likelihood(prior, noise)[0]
            assert value == pytest.approx(exact, rel=1e-10 if prior == PRIOR else 1e-8)
        # away from the posterior's own mode it is another number
        assert abs(posterior.log_marginal_likelihood(7.0)[0] - exact) > 0.1

    def test_predictions(self, exact_fit):
        _, precision, posterior = exact_fit
        rows = np.hstack([NEW, np.ones((2, 1))])
        exact = np.einsum("ri,ij,rj->r", rows, np.linalg.inv(precision), rows)
        mean, variance = posterior.predict(NEW)
        np.testing.assert_allclose(mean, ee.predict(posterior.ensemble, NEW), rtol=1e-12)
        np.testing.assert_allclose(variance[0], np.stack([exact + NOISE**2] * 2, 1), rtol=1e-10)
        covariance = posterior.outputs(NEW).covariance[0]
        np.testing.assert_allclose(covariance, exact[:, None, None] * np.eye(2), rtol=1e-10, atol=1e-12)
        # the mean over rows, in place of the sum, is a posterior of one row
        mean_of_rows = np.linalg.inv(ONES.T @ ONES / 10 / NOISE**2 + PRIOR * np.eye(4))
        assert np.abs(np.einsum("ri,ij,rj->r", rows, mean_of_rows, rows) / exact - 1).min() > 1

    @pytest.mark.slow
    def test_draws(self, exact_fit):
        """Means and covariances of 4,000 draws, within five standard errors."""
        _, precision, posterior = exact_fit
        draws = posterior.sample(4_000, key=KEY).stacked
        mean = posterior.ensemble[0]
        vectors = np.concatenate([draws.weight - mean.weight, (draws.bias - mean.bias)[..., None]], -1)
        covariance = np.linalg.inv(precision)
        for unit in range(2):
            found = vectors[:, unit].T @ vectors[:, unit] / 4_000
            error = np.sqrt((covariance**2 + np.outer(*[np.diag(covariance)] * 2)) / 4_000)
            assert (np.abs(found - covariance) < 5 * error).all()
            assert (np.abs(vectors[:, unit].mean(0)) < 5 * np.sqrt(np.diag(covariance) / 4_000)).all()


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3])
def test_gauss_newton_is_the_hessian_of_a_linear_classifier(classes):
    """And the empirical Fisher matrix is not: it is off by more than a half."""
    model = linear(RNG.normal(size=(classes, 3)), RNG.normal(size=classes))
    labels = np.arange(10) % classes
    options = LINEAR | {"likelihood": "classification"}

    def loss(vector, rows=slice(None)):
        weight, bias = vector[: classes * 3].reshape(classes, 3), vector[classes * 3 :]
        logs = jax.nn.log_softmax(X[rows] @ weight.T + bias)
        return -jnp.sum(logs[jnp.arange(len(logs)), labels[rows]])

    vector = jnp.concatenate([model.weight.ravel(), model.bias])
    hessian = np.asarray(jax.hessian(loss)(vector))
    found = precision_of(laplace.fit(ee.stack([model]), (X, labels), **options)) - PRIOR * np.eye(len(vector))
    np.testing.assert_allclose(found, hessian, atol=1e-12)
    gradients = jnp.stack([jax.grad(loss)(vector, jnp.array([row])) for row in range(10)])
    assert np.linalg.norm(gradients.T @ gradients - hessian) > 0.5 * np.linalg.norm(hessian)


@pytest.mark.slow
def test_binary_is_softmax_of_two_classes():
    model = linear(RNG.normal(size=(1, 3)))
    posterior = laplace.fit(ee.stack([model]), (X, LABELS % 2), likelihood="binary", **LINEAR)
    loss = lambda vector: -jnp.sum(jax.nn.log_sigmoid((2 * (LABELS % 2) - 1) * (X @ vector)))
    found = precision_of(posterior) - PRIOR * np.eye(3)
    np.testing.assert_allclose(found, jax.hessian(loss)(model.weight[0]), atol=1e-13)
    mean, covariance = posterior.outputs(NEW)
    exact = jax.nn.sigmoid(mean[0, :, 0] / np.sqrt(1 + np.pi / 8 * covariance[0, :, 0, 0]))
    np.testing.assert_allclose(np.exp(posterior.predict(NEW)[0]), np.stack([1 - exact, exact], 1), rtol=1e-12)


# Weights and data without random numbers: the figures below are those of laplace-torch 0.3 with torch 2.15.0, in double
# precision.
TORCH_X = np.cos(np.arange(30).reshape(10, 3) * 0.7)
TORCH_NEW = np.array([[0.3, -1.2, 0.7], [4.0, -3.0, 2.0]])
TORCH_CLASSES = {
    "full": (-13.558876736849404, [0.4287361589480003, 0.37946389598237074, 0.1917999450696289]),
    "diag": (-16.552035580726354, [0.4407083222690426, 0.38269295898423994, 0.1765987187467174]),
}


def network_of_torch(out):
    model = eqx.nn.MLP(3, out, 4, 1, activation=jnp.tanh, key=KEY, dtype=float)
    values = [
        np.sin(np.arange(12).reshape(4, 3) * 1.7 + 0.3),
        np.cos(np.arange(4) * 0.9),
        np.sin(np.arange(4 * out).reshape(out, 4) * 2.3 + 1.1) * 0.8,
        np.cos(np.arange(out) * 1.3 + 0.4) * 0.5,
    ]
    leaves = lambda model: [x for i in (0, 1) for x in (model.layers[i].weight, model.layers[i].bias)]
    return ee.stack([eqx.tree_at(leaves, model, [jnp.asarray(x) for x in values])])


@pytest.mark.parametrize("structure", TORCH_CLASSES)
def test_classification_of_laplace_torch(structure):
    options = LAST | {"likelihood": "classification", "structure": structure}
    posterior = laplace.fit(network_of_torch(3), (TORCH_X, LABELS), **options)
    evidence, probit = TORCH_CLASSES[structure]
    np.testing.assert_allclose(posterior.log_marginal_likelihood(), evidence, rtol=1e-12)
    # Its probit link divides each logit by the root of its own variance.
    mean, covariance = (value[0, 0] for value in posterior.outputs(TORCH_NEW))
    scaled = jax.nn.softmax(mean / np.sqrt(1 + np.pi / 8 * np.diagonal(covariance)))
    np.testing.assert_allclose(scaled, probit, rtol=1e-11)


@pytest.fixture(scope="module")
def networks():
    """Three networks that are no optima, with one output for regression."""
    return ee.build(lambda key: eqx.nn.MLP(3, 1, 3, 1, activation=jnp.tanh, key=key, dtype=float), 3, key=KEY)


@pytest.fixture(scope="module")
def posterior(networks):
    return laplace.fit(networks, (X, X[:, 0]), likelihood="regression", **LAST)


class TestOptimum:
    def test_prior(self, posterior):
        """MacKay's fixed point is the maximum of the evidence, of each member, and only that."""
        best = posterior.optimise_prior()
        np.testing.assert_array_equal(best.noise, posterior.noise)
        for i in range(3):
            negative = lambda log, i=i: -float(posterior.log_marginal_likelihood(np.exp(log))[i])
            expected = scipy.optimize.minimize_scalar(
                negative, bounds=(-8, 8), method="bounded", options={"xatol": 1e-9}
            )
            assert np.log(best.prior_precision[i]) == pytest.approx(expected.x, abs=1e-5)
        slope = jax.grad(lambda prior: jnp.sum(posterior.log_marginal_likelihood(prior)))
        assert np.abs(slope(best.prior_precision) * best.prior_precision).max() < 1e-12
        assert np.abs(slope(1.1 * best.prior_precision) * best.prior_precision).min() > 1e-3

    @pytest.mark.slow
    def test_prior_and_noise(self, posterior):
        best = posterior.optimise_prior(fit_noise=True)
        value = lambda pair: jnp.sum(posterior.log_marginal_likelihood(*pair))
        prior, noise = jax.grad(value)((best.prior_precision, best.noise))
        assert max(np.abs(prior * best.prior_precision).max(), np.abs(noise * best.noise).max()) < 1e-11
        assert (best.log_marginal_likelihood() > posterior.optimise_prior().log_marginal_likelihood()).all()
        assert (best.noise > posterior.noise).all()  # that of residuals is too small


MEAN = jnp.array([2.0, 0.5, -1.0])
COVARIANCE = jnp.array([[2.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 3.0]])


class TestLinks:
    """Averages of probabilities over Gaussian logits, against quadrature and draws of NumPy."""

    @pytest.mark.parametrize(
        ("mean", "variance", "exact", "found"), [(1.0, 1.0, 0.6967, 0.7000), (4.0, 25.0, 0.7743, 0.7714)]
    )
    def test_two_classes(self, mean, variance, exact, found):
        """The integral by quadrature, and MacKay's approximation to it, as MacKay gives it."""
        density = lambda z: scipy.special.expit(mean + np.sqrt(variance) * z) * scipy.stats.norm.pdf(z)
        assert scipy.integrate.quad(density, -9, 9)[0] == pytest.approx(exact, abs=1e-4)
        # One logit varies, or both do by half, with a common part.
        for shared, parts in ((0.0, [0.0, variance]), (3.0, [variance / 2] * 2)):
            two = jnp.array([0.0, mean]), shared + jnp.diag(jnp.array(parts))
            assert jnp.exp(probit(*two))[1] == pytest.approx(found, abs=1e-4)
            draws = jnp.exp(monte_carlo(*two, 20_000, KEY))[1]
            assert draws == pytest.approx(exact, abs=5 * 0.5 / np.sqrt(20_000))

    @pytest.mark.slow
    def test_three_classes(self):
        """20,000 draws against 200,000 of NumPy's: five standard errors of probabilities."""
        draws = np.random.default_rng(0).multivariate_normal(MEAN, COVARIANCE, 200_000)
        expected = scipy.special.softmax(draws, axis=1)
        error = expected.std(0) * np.sqrt(1 / 20_000 + 1 / 200_000)
        found = jnp.exp(monte_carlo(MEAN, COVARIANCE, 20_000, KEY))
        assert (np.abs(found - expected.mean(0)) < 5 * error).all()
        assert (np.abs(jax.nn.softmax(MEAN) - expected.mean(0)) > 20 * error).any()  # without the variance
        np.testing.assert_allclose(probit(MEAN, COVARIANCE + 10), probit(MEAN, COVARIANCE), rtol=1e-12)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
    def test_extreme_logits(self, dtype):
        """Logits whose exponential overflows, and that do not vary or always sum to zero."""
        mean, covariance = MEAN.astype(dtype), COVARIANCE.astype(dtype)
        found, grad = jax.value_and_grad(lambda mean: probit(mean, covariance)[0])(600 * mean)
        assert found == pytest.approx(0, abs=1e-6)
        assert np.isfinite(grad).all()
        centred = jnp.eye(3, dtype=dtype) - 1 / 3
        for link in (probit, lambda mean, covariance: monte_carlo(mean, covariance, 10, KEY)):
            assert np.isfinite(link(600 * mean, covariance)).all()
            assert np.isfinite(link(mean, centred)).all()
            np.testing.assert_allclose(link(mean, 0 * covariance), jax.nn.log_softmax(mean), rtol=1e-5)
