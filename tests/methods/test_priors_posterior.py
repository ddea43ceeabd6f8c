"""Linear members with anchors and noise in their targets are draws from the Bayesian posterior."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import eqx_ensemble as ee
from eqx_ensemble.methods.priors import RandomisedPrior, draw_anchors, noisy_targets

KEY = jax.random.key(4)
MEMBERS, ROWS, NOISE = 2000, 12, 0.5
STD = np.array([0.5, 0.5, 0.5, 2.0])  # of three weights and a bias

_RNG = np.random.default_rng(1)
X = _RNG.normal(size=(ROWS, 3))
Y = X @ [0.4, -0.3, 0.2] + 1.0 + NOISE * _RNG.normal(size=ROWS)
DESIGN = np.column_stack([X, np.ones(ROWS)])
PRECISION = DESIGN.T @ DESIGN / NOISE**2 + np.diag(STD**-2.0)
COVARIANCE = np.linalg.inv(PRECISION)
MEAN = COVARIANCE @ DESIGN.T @ Y / NOISE**2
# The best rate for the mean of the log-likelihoods, whose curvature is the precision divided by the number of rows.
SGD = optax.sgd(2 * ROWS / (np.linalg.eigvalsh(PRECISION)[[0, -1]].sum()))


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def build():
    return ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), MEMBERS, key=KEY)


def std(leaf):
    return 0.5 if len(leaf.shape) == 2 else 2.0


def anchored(model, batch, key, hyper):
    x, y = batch
    likelihood = jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2) / (2 * NOISE**2)
    return likelihood + hyper["anchor"].penalty(model, num_rows=hyper["num_rows"])


def train(ensemble, loss, y, **options):
    run = ee.fit(ensemble, loss, SGD, (X, y), steps=200, batch_size=ROWS, shuffle=False, key=KEY, **options)
    return run.ensemble.stacked


def as_draws(linear):
    return np.column_stack([np.asarray(linear.weight)[:, 0], np.asarray(linear.bias)])


def p_value(draws):
    """How probable draws from the posterior are: their mean, variances and correlations, by Bonferroni."""
    white = np.linalg.solve(np.linalg.cholesky(COVARIANCE), (draws - MEAN).T)
    number, count = white.shape
    one_sided = [stats.chi2(number).sf(count * (white.mean(1) ** 2).sum())]
    for total in count * white.var(1):
        one_sided += [2 * stats.chi2(count - 1).sf(total), 2 * stats.chi2(count - 1).cdf(total)]
    one_sided += [stats.pearsonr(white[i], white[j]).pvalue for i in range(number) for j in range(i)]
    return min(one_sided) * len(one_sided)


def test_anchored_linear_members_are_draws_from_the_posterior():
    ensemble = build()
    anchors = draw_anchors(ensemble, std, key=KEY)
    noisy = noisy_targets(Y, MEMBERS, std=NOISE, key=KEY)
    hyper = lambda num_rows: {"anchor": anchors, "num_rows": np.full(MEMBERS, float(num_rows))}

    draws = as_draws(train(ensemble, anchored, noisy, hyper=hyper(ROWS)))
    prior = np.column_stack([np.asarray(anchors.weights.weight)[:, 0], np.asarray(anchors.weights.bias)])
    exact = (np.asarray(noisy.value) @ DESIGN / NOISE**2 + prior / STD**2) @ COVARIANCE
    np.testing.assert_allclose(draws, exact, rtol=1e-8, atol=1e-8)
    assert p_value(draws) > 1e-6

    same = ee.Each(jnp.broadcast_to(Y, (MEMBERS, ROWS)))
    assert p_value(as_draws(train(ensemble, anchored, same, hyper=hyper(ROWS)))) < 1e-6, "no noise in targets"
    assert p_value(as_draws(train(ensemble, anchored, noisy, hyper=hyper(np.inf)))) < 1e-6, "no anchor"
    slow = optax.sgd(0.02)  # the curvature is another
    unscaled = ee.fit(ensemble, anchored, slow, (X, noisy), hyper=hyper(1), steps=200, batch_size=ROWS, key=KEY)
    assert p_value(as_draws(unscaled.ensemble.stacked)) < 1e-6, "no 1/N"


@pytest.mark.slow
def test_a_prior_function_and_a_penalty_towards_zero_are_an_anchor():
    ensemble = build()
    anchors = draw_anchors(ensemble, std, key=KEY)
    noisy = noisy_targets(Y, MEMBERS, std=NOISE, key=KEY)
    own = jax.tree.map(lambda x: 0 * x, anchors)

    def make(key):
        return RandomisedPrior(eqx.nn.Linear(3, 1, key=key), eqx.nn.Linear(3, 1, key=key))

    both = ee.build(make, MEMBERS, key=KEY)
    drawn = lambda e: (e.stacked.prior.value.weight, e.stacked.prior.value.bias)
    both = eqx.tree_at(drawn, both, (anchors.weights.weight, anchors.weights.bias))
    zeros = eqx.tree_at(lambda a: a.std, own, anchors.std)

    def loss(model, batch, key, hyper):
        x, y = batch
        likelihood = jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2) / (2 * NOISE**2)
        return likelihood + hyper["zero"].penalty(model.network, num_rows=ROWS)

    trained = train(both, loss, noisy, hyper={"zero": zeros})
    total = as_draws(trained.network) + as_draws(trained.prior.value)
    prior = as_draws(trained.prior.value)
    exact = (np.asarray(noisy.value) @ DESIGN / NOISE**2 + prior / STD**2) @ COVARIANCE
    np.testing.assert_allclose(total, exact, rtol=1e-8, atol=1e-8)
