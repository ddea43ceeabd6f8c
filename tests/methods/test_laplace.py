"""Laplace approximations: closed forms and exact Hessians; members, rows, files and runs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
import scipy.stats

import eqx_ensemble as ee
from eqx_ensemble.methods import laplace
from eqx_ensemble.methods.laplace._laplace import monte_carlo, probit

from ..factories import assert_close, relaxed

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X, NEW = RNG.normal(size=(10, 3)), RNG.normal(size=(2, 3))
LABELS = np.arange(10) * 5 % 3
ONES = np.hstack([X, np.ones((10, 1))])
PRIOR, NOISE = 0.7, 0.4
LINEAR = {"where": lambda model: model, "prior_precision": PRIOR, "batch_size": 4}


@pytest.fixture
def double():
    with jax.enable_x64(True), relaxed():
        yield


def linear(weight, bias=None):
    layer = eqx.nn.Linear(*weight.shape[::-1], use_bias=bias is not None, key=KEY, dtype=float)
    own = jnp.asarray(weight), None if bias is None else jnp.asarray(bias)
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, own, is_leaf=lambda x: x is None)


@pytest.mark.slow
def test_linear_regression(double):
    """The posterior of a linear model with Gaussian noise is exact, and so is its evidence."""
    targets, rows = np.stack([np.sin(X.sum(1)), X[:, 0] ** 2], 1), np.hstack([NEW, np.ones((2, 1))])
    precision = ONES.T @ ONES / NOISE**2 + PRIOR * np.eye(4)
    mean, covariance = np.linalg.solve(precision, ONES.T @ targets / NOISE**2).T, np.linalg.inv(precision)
    ensemble = ee.stack([linear(mean[:, :3], mean[:, 3])])
    posterior = laplace.fit(ensemble, (X, targets), likelihood="regression", noise=NOISE, **LINEAR)
    law = scipy.stats.multivariate_normal(cov=ONES @ ONES.T / PRIOR + NOISE**2 * np.eye(10))
    exact = law.logpdf(targets[:, 0]) + law.logpdf(targets[:, 1])
    assert posterior.log_marginal_likelihood()[0] == pytest.approx(exact, rel=1e-10)
    # away from the posterior's own mode it is another number
    assert abs(posterior.log_marginal_likelihood(7.0)[0] - exact) > 0.1

    variance = np.einsum("ri,ij,rj->r", rows, covariance, rows)
    found = posterior.predict(NEW)
    np.testing.assert_allclose(found[0], ee.predict(posterior.ensemble, NEW), rtol=1e-12)
    np.testing.assert_allclose(found[1][0], np.stack([variance + NOISE**2] * 2, 1), rtol=1e-10)
    expected = variance[:, None, None] * np.eye(2)
    np.testing.assert_allclose(posterior.outputs(NEW).covariance[0], expected, rtol=1e-10, atol=1e-12)

    draws = posterior.sample(4_000, key=KEY).stacked  # within five standard errors
    vectors = np.concatenate([draws.weight - mean[:, :3], (draws.bias - mean[:, 3])[..., None]], -1)
    found, own = np.einsum("nui,nuj->uij", vectors, vectors) / 4_000, np.diag(covariance)
    assert (np.abs(found - covariance) < 5 * np.sqrt((covariance**2 + np.outer(own, own)) / 4_000)).all()
    assert (np.abs(vectors.mean(0)) < 5 * np.sqrt(own / 4_000)).all()


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["binary", "classification"])
def test_gauss_newton_is_the_hessian_of_a_linear_classifier(double, likelihood):
    outputs, labels = (1, LABELS % 2) if likelihood == "binary" else (3, LABELS)
    model = linear(RNG.normal(size=(outputs, 3)))
    logits = lambda vector: X @ vector.reshape(outputs, 3).T
    padded = lambda z: jnp.hstack([jnp.zeros((10, 1)), z]) if outputs == 1 else z
    loss = lambda vector: -jnp.sum(jax.nn.log_softmax(padded(logits(vector)))[jnp.arange(10), labels])
    weight = np.ravel(model.weight)
    precision = np.asarray(jax.hessian(loss)(weight)) + PRIOR * np.eye(len(weight))
    at_mode = -loss(weight) - PRIOR / 2 * weight @ weight + len(weight) / 2 * np.log(PRIOR)
    for structure, expected in (("diag", np.diag(np.diag(precision))), ("full", precision)):
        options = LINEAR | {"likelihood": likelihood, "structure": structure}
        posterior = laplace.fit(ee.stack([model]), (X, labels), **options)
        evidence = at_mode - np.linalg.slogdet(expected)[1] / 2
        np.testing.assert_allclose(posterior.log_marginal_likelihood()[0], evidence, rtol=1e-12)
        one = posterior.members[0]
        vectors = np.eye(len(weight)) if one.vectors is None else np.asarray(one.vectors)
        np.testing.assert_allclose(vectors @ np.diag(one.precision) @ vectors.T, expected, atol=1e-12)
    mean, covariance = posterior.outputs(NEW)
    if likelihood == "binary":
        exact = jax.nn.sigmoid(mean[0, :, 0] / np.sqrt(1 + np.pi / 8 * covariance[0, :, 0, 0]))
        np.testing.assert_allclose(np.exp(posterior.predict(NEW)[0]), np.stack([1 - exact, exact], 1), rtol=1e-12)


@pytest.mark.slow
def test_the_best_prior_and_noise(double):
    """MacKay's fixed point is the maximum of the evidence, of each member, and only that."""
    networks = ee.build(lambda key: eqx.nn.MLP(3, 1, 3, 1, activation=jnp.tanh, key=key, dtype=float), 3, key=KEY)
    posterior = fit(networks, (X, X[:, 0]), likelihood="regression", prior_precision=PRIOR)
    best = posterior.optimise_prior()
    np.testing.assert_array_equal(best.noise, posterior.noise)
    for i in range(3):
        negative = lambda log, i=i: -float(posterior.log_marginal_likelihood(np.exp(log))[i])
        expected = scipy.optimize.minimize_scalar(negative, bounds=(-8, 8), method="bounded", options={"xatol": 1e-9})
        assert np.log(best.prior_precision[i]) == pytest.approx(expected.x, abs=1e-5)
    both = posterior.optimise_prior(fit_noise=True)
    value = lambda pair: jnp.sum(posterior.log_marginal_likelihood(*pair))
    prior, noise = jax.grad(value)((both.prior_precision, both.noise))
    assert max(np.abs(prior * both.prior_precision).max(), np.abs(noise * both.noise).max()) < 1e-11
    assert (both.log_marginal_likelihood() > best.log_marginal_likelihood()).all()
    assert (both.noise > posterior.noise).all()  # that of residuals is too small


@pytest.mark.parametrize(("mean", "variance", "found"), [(1.0, 1.0, 0.7000), (4.0, 25.0, 0.7714)])
def test_links_of_two_classes(mean, variance, found):
    """The integral by quadrature, and MacKay's approximation to it, as MacKay gives it."""
    density = lambda z: scipy.special.expit(mean + np.sqrt(variance) * z) * scipy.stats.norm.pdf(z)
    exact = scipy.integrate.quad(density, -9, 9)[0]
    # One logit varies, or both do by half, with a common part.
    for shared, parts in ((0.0, [0.0, variance]), (3.0, [variance / 2] * 2)):
        two = jnp.array([0.0, mean]), shared + jnp.diag(jnp.array(parts))
        assert jnp.exp(probit(*two))[1] == pytest.approx(found, abs=1e-4)
        draws = jnp.exp(monte_carlo(*two, 20_000, KEY))[1]
        assert draws == pytest.approx(exact, abs=5 * 0.5 / np.sqrt(20_000))


@pytest.mark.slow
def test_links_of_extreme_logits():
    """Whose exponential overflows, or that do not vary or always sum to zero."""
    mean, covariance = jnp.array([2.0, 0.5, -1.0]), jnp.array([[2.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 3.0]])
    np.testing.assert_allclose(probit(mean, covariance + 10), probit(mean, covariance), rtol=1e-5)
    found, grad = jax.value_and_grad(lambda mean: probit(mean, covariance)[0])(600 * mean)
    assert found == pytest.approx(0, abs=1e-6)
    assert np.isfinite(grad).all()
    for link in (probit, lambda mean, covariance: monte_carlo(mean, covariance, 10, KEY)):
        assert np.isfinite([link(600 * mean, covariance), link(mean, jnp.eye(3) - 1 / 3)]).all()
        np.testing.assert_allclose(link(mean, 0 * covariance), jax.nn.log_softmax(mean), rtol=1e-5)


ROWS = jax.random.normal(KEY, (11, 3))
CLASSES = jnp.arange(11) % 3
OPTIONS = {"likelihood": "classification", "where": lambda model: model.layers[-1], "batch_size": 4}
make = lambda key: eqx.nn.MLP(3, 3, 4, 1, key=key)
ENSEMBLE = ee.build(make, 3, key=KEY)


def fit(ensemble=ENSEMBLE, data=(ROWS, CLASSES), **options):
    return laplace.fit(ensemble, data, **OPTIONS | options)


def same(first, second, tolerance=1e-4):
    """Posteriors are compared by what they predict: eigenvectors have no signs."""
    assert_close(first.outputs(ROWS), second.outputs(ROWS), tolerance)
    assert_close(first.log_marginal_likelihood(), second.log_marginal_likelihood(), tolerance)


@pytest.fixture(scope="module")
def posterior():
    return fit()


@pytest.mark.slow
def test_rows_batches_and_weights(posterior):
    """Rows that do not count may hold anything. Rows that a member has seen twice count twice, of each its own."""
    same(posterior, fit(batch_size=11))
    mask = jnp.arange(11) < 8
    x = jnp.where(mask[:, None], ROWS, jnp.nan)
    masked = fit(data=(x, jnp.where(mask, CLASSES, -1)), row_weights=mask)
    same(masked, fit(data=(ROWS[:8], CLASSES[:8])))
    rows = ee.resample.bootstrap(11, 3, key=KEY)
    own = fit(row_weights=ee.Each(ee.resample.counts(rows, 11)))
    same(own, fit(data=(ee.Each(ROWS[rows]), ee.Each(CLASSES[rows]))))
    assert np.abs(own.log_marginal_likelihood() - posterior.log_marginal_likelihood()).min() > 0.01
    halves = fit(row_weights=jnp.full(11, 0.5), prior_precision=0.5)
    assert_close(halves.outputs(ROWS).covariance, 2 * posterior.outputs(ROWS).covariance, 1e-4)


@pytest.mark.slow
def test_members_are_as_alone(posterior, tmp_path):
    """A member's posterior, its draws included, does not depend on the others; in files and under `jit`, too."""
    one = fit(ENSEMBLE[[1]])
    for index in ([1], 1, np.int64(1), jnp.array(1), slice(1, 2)):
        same(one, posterior[index])
    x = ROWS[0]
    draws, keys = posterior.sample(3, key=KEY)(x), ee.member_keys(KEY, 3, purpose="laplace")
    np.testing.assert_allclose(posterior.sample(2, key=KEY)(x)[2:4], draws[3:5], rtol=1e-5)
    np.testing.assert_allclose(posterior[1:].sample(3, key=keys[1:])(x), draws[3:], rtol=1e-5)
    priors = jnp.array([0.1, 1.0, 10.0])
    replaced = laplace.with_prior(posterior, prior_precision=priors)  # as if it had been fitted so
    assert_close(replaced, fit(prior_precision=priors), 1e-5)
    same(replaced[[2]], fit(ENSEMBLE[[2]], prior_precision=10.0))
    assert_close(replaced.log_marginal_likelihood(), posterior.log_marginal_likelihood(priors), 1e-5)

    ee.save(tmp_path / "posterior", posterior)
    like = fit(ee.build(make, 3, key=jax.random.key(1)), (ROWS[:1], CLASSES[:1]))
    assert_close(ee.load(tmp_path / "posterior", like), posterior, 0)
    assert_close(ee.load(tmp_path / "posterior", like, members=[2]), posterior[[2]], 0)
    mixture = posterior.predict(ROWS, combine=ee.combine.mixture)
    np.testing.assert_allclose(jnp.exp(mixture), jnp.exp(posterior.predict(ROWS)).mean(0), rtol=1e-4)


@pytest.mark.slow
def test_a_run():
    """Its best weights; members that diverged are left out, with their hyper-parameters and rows."""

    def loss(model, batch, key, hyper):
        return hyper * optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(batch[0]), batch[1]).mean()

    hyper = jnp.array([1.0, jnp.inf, 1.0])
    with pytest.warns(UserWarning, match="diverged"):
        run = ee.fit(ENSEMBLE, loss, lambda _: optax.sgd(0.1), (ROWS, CLASSES), hyper=hyper, steps=2, key=KEY)
    weights = jnp.ones((3, 11)).at[2, 0].set(5)
    with pytest.warns(UserWarning, match="Members 1 diverged and are left out"):
        posterior = fit(run, prior_precision=jnp.array([1.0, 2.0, 3.0]), row_weights=ee.Each(weights))
    assert posterior.prior_precision.tolist() == [1, 3]
    same(posterior[[1]], fit(run.ensemble[[2]], prior_precision=3.0, row_weights=weights[2]))
    with pytest.raises(ValueError, match=r"needs finite outputs and derivatives.\n  members 1 have none"):
        fit(eqx.tree_at(lambda e: e.stacked.layers[0].bias, ENSEMBLE, replace_fn=lambda x: x.at[1].set(jnp.nan)))


@pytest.mark.slow
def test_single_precision():
    """Directions that the data say nothing about keep the prior's variance, whatever the largest eigenvalue."""
    x = 100 * jax.random.normal(KEY, (1_000, 2))
    x = jnp.concatenate([x, x.sum(1, keepdims=True)], axis=1)
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, use_bias=False, key=key), 1, key=KEY)
    posterior = fit(ensemble, (x, jnp.zeros(1_000)), likelihood="regression", where=lambda m: m, noise=0.1)
    found = posterior.outputs(jnp.array([[1.0, 1.0, -1.0]])).covariance.squeeze()
    assert found == pytest.approx(3, rel=2e-3)  # the squared norm of the row, over a prior precision of 1


def normalised(key):
    norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
    layers = eqx.nn.Linear(3, 4, key=key), norm, eqx.nn.Lambda(jax.nn.relu), eqx.nn.Linear(4, 3, key=key)
    return eqx.nn.Sequential(layers)


@pytest.mark.slow
def test_states_half_precision_and_shared_arrays():
    """Features in inference mode: those of one row do not depend on the other rows."""
    ensemble, state = ee.build(eqx.nn.make_with_state(normalised), 2, key=KEY)
    with relaxed():
        posterior = fit(ensemble, state=state)
        features = ee.predict(ensemble, ROWS, state=state, fn=lambda m, x, s: m[:3](x, s)[0])
        heads = ee.map_members(lambda m: m.layers[-1])(ensemble)
        plain = fit(heads, (ee.Each(features), CLASSES), where=lambda head: head)
        assert_close(posterior.predict(ROWS), plain.predict(ee.Each(features)), 1e-4)
        assert posterior[[1]].predict(ROWS).shape == (1, 11, 3)
    with pytest.raises(TypeError, match="no `state` was given"):
        fit(ensemble)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, ENSEMBLE)
    posterior = fit(half, (ROWS.astype(jnp.bfloat16), CLASSES))
    assert posterior.prior_precision.dtype == jnp.float32
    assert posterior.sample(2, key=KEY).stacked.layers[0].weight.dtype == jnp.bfloat16
    shared = ee.build(make, 2, shared=lambda m: m.layers[0], key=KEY)
    assert fit(shared, where=lambda m: m).members.stacked.values.shape[-1] == 15
    with pytest.raises(ValueError, match="at least one real floating-point array of each member"):
        fit(shared, where=lambda m: m.layers[0])


def test_errors(unhooked, posterior):
    for options, kind, message in [
        ({"noise": 0.1}, TypeError, "`methods.laplace.fit` takes `noise` for regression only"),
        ({"row_weights": jnp.ones((3, 11))}, ValueError, "one of `row_weights` per row"),
        ({"data": (ROWS.at[3].set(jnp.nan), CLASSES), "row_weights": jnp.arange(11) < 8}, ValueError, "finite outputs"),
        ({"data": (ROWS, CLASSES + 1)}, ValueError, "0, 1, 2 have none\nNaN or invalid labels"),
        ({"likelihood": "binary"}, ValueError, "of the shape for `likelihood='binary'`"),
    ]:
        with pytest.raises(kind, match=message):
            fit(**options)
    zero = eqx.tree_at(lambda e: e.stacked.layers[-1], ENSEMBLE, replace_fn=lambda x: jax.tree.map(jnp.zeros_like, x))
    with pytest.raises(ValueError, match=r"needs a maximum of the marginal likelihood"):
        fit(zero).optimise_prior()
