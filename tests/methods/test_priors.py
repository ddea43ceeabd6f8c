"""Prior functions, anchors and noise in targets: for linear models the posterior, and else training alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import eqx_ensemble as ee
from eqx_ensemble.methods.priors import RandomisedPrior, draw_anchors, gaussian_penalty, noisy_targets

from ..factories import Alone, assert_close, assert_same, data, in_order, mse, step_key

KEY = jax.random.key(5)
DECAY = optax.adamw(1e-2, weight_decay=0.1)


def network(key):
    return eqx.nn.MLP(25, 2, 8, 1, key=key)


def pair(key, scale=3.0):
    own, prior = jax.random.split(key)
    return RandomisedPrior(network(own), network(prior), scale=scale)


MEMBERS, ROWS, NOISE = 20, 12, 0.5
STD = np.array([0.5, 0.5, 0.5, 2.0])  # of three weights and a bias
_RNG = np.random.default_rng(1)
X = _RNG.normal(size=(ROWS, 3))
Y = X @ [0.4, -0.3, 0.2] + 1.0 + NOISE * _RNG.normal(size=ROWS)
DESIGN = np.column_stack([X, np.ones(ROWS)])
PRECISION = DESIGN.T @ DESIGN / NOISE**2 + np.diag(STD**-2.0)
COVARIANCE = np.linalg.inv(PRECISION)
# The best rate for the mean of the log-likelihoods, whose curvature is the precision divided by the number of rows.
SGD = optax.sgd(2 * ROWS / (np.linalg.eigvalsh(PRECISION)[[0, -1]].sum()))


@pytest.mark.slow
def test_linear_members_are_draws_from_the_posterior():
    def anchored(model, batch, key, hyper):
        x, y = batch
        likelihood = jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2) / (2 * NOISE**2)
        return likelihood + hyper.penalty(model, num_rows=ROWS)

    as_draws = lambda linear: np.column_stack([np.asarray(linear.weight)[:, 0], np.asarray(linear.bias)])
    with jax.enable_x64(True):
        ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), MEMBERS, key=KEY)
        anchors = draw_anchors(ensemble, lambda leaf: 0.5 if len(leaf.shape) == 2 else 2.0, key=KEY)
        noisy = noisy_targets(Y, MEMBERS, std=NOISE, key=KEY)
        options = dict(hyper=anchors, steps=200, batch_size=ROWS, shuffle=False, key=KEY)
        draws = as_draws(ee.fit(ensemble, anchored, lambda hyper: SGD, (X, noisy), **options).ensemble.stacked)
    exact = (np.asarray(noisy.value) @ DESIGN / NOISE**2 + as_draws(anchors.weights) / STD**2) @ COVARIANCE
    np.testing.assert_allclose(draws, exact, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_trained_with_a_prior_is_trained_on_what_the_prior_leaves():
    """f + βp on y is f on y - βp, an ensemble of its own; a plain ensemble on y is another."""
    x, y = data()
    ensemble = ee.build(pair, 3, key=KEY)
    options = dict(steps=12, batch_size=8, shuffle=False, key=KEY)
    run = ee.fit(ensemble, mse, DECAY, (x, y), **options)
    offset = ee.predict(ensemble, x, fn=lambda model, x: 3.0 * model.prior.value(x))
    plain = ee.from_stacked(ensemble.stacked.network)
    residual = ee.fit(plain, mse, DECAY, (x, ee.Each(y[None] - offset)), **options)
    assert_close(run.ensemble.stacked.network, residual.ensemble.stacked, 1e-5)
    found, expected = ee.predict(run.ensemble, x), ee.predict(residual.ensemble, x) + offset
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert_same(run.ensemble.stacked.prior, ensemble.stacked.prior)


@pytest.mark.slow
def test_priors_travel_with_their_members():
    ensemble, x = ee.build(pair, zip={"scale": [1.0, 2.0, 4.0]}, key=KEY), data()[0]
    expected = ee.predict(ensemble, x)
    np.testing.assert_array_equal(ee.predict(ensemble[[2, 0]], x), expected[np.array([2, 0])])
    one = ensemble[1]
    np.testing.assert_allclose(one(x[0]), one.network(x[0]) + 2.0 * one.prior(x[0]), rtol=1e-6)


@pytest.mark.slow
def test_states_dropout_and_half_precision():
    made, before = eqx.nn.make_with_state(lambda: eqx.nn.BatchNorm(25, axis_name="batch", mode="ema"))()
    x, prior = data()[0][0], eqx.nn.Linear(25, 25, key=KEY)
    call = lambda model: jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x[None], before)
    (out, after), (expected, expected_after) = call(RandomisedPrior(made, prior)), call(made)
    np.testing.assert_allclose(out[0], expected[0] + prior(x), rtol=1e-6)
    assert_same(after, expected_after)
    dropout = eqx.nn.Sequential([eqx.nn.Linear(25, 2, key=KEY), eqx.nn.Dropout(0.5)])  # a prior has none
    model = RandomisedPrior(network(KEY), dropout, scale=jnp.float32(2))
    np.testing.assert_allclose(model(x, key=KEY), model.network(x) + 2 * dropout.layers[0](x), rtol=1e-6)
    half = eqx.nn.Linear(25, 2, dtype=jnp.bfloat16, key=KEY)
    assert RandomisedPrior(half, half)(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.slow
def test_noise_follows_from_the_members_key_alone():
    y, keys = data()[1], ee.member_keys(KEY, 5, purpose="noise in targets")
    noisy = np.asarray(noisy_targets(y, 5, std=0.3, key=KEY).value)
    assert noisy.shape == (5, *y.shape)
    one = jax.random.fold_in(keys[3], 7)
    np.testing.assert_allclose(noisy[3, 7], y[7] + 0.3 * jax.random.normal(one, (2,)), rtol=1e-6)
    np.testing.assert_array_equal(noisy_targets(y, 2, std=0.3, key=keys[np.array([4, 1])]).value, noisy[[4, 1]])
    np.testing.assert_array_equal(noisy_targets(y[:6], 5, std=0.3, key=KEY).value, noisy[:, :6])
    per_target = noisy_targets(y, 5, std=np.full_like(y, 0.3), key=KEY).value
    np.testing.assert_allclose(per_target, noisy, rtol=1e-6)
    with pytest.raises(ValueError, match="broadcast"):  # one per row would give each row the noise of all
        noisy_targets(np.zeros((3, 1)), 2, std=np.ones(3), key=KEY)


@pytest.mark.slow
def test_penalties_are_log_priors_of_the_trained_leaves():
    model = eqx.tree_at(lambda m: m.layers[1].bias, network(KEY), jnp.ones(2))
    ensemble = ee.stack([model, network(jax.random.key(9))])
    std = lambda leaf: 2.0 if len(leaf.shape) == 2 else 0.5
    one = ee.tree.take(draw_anchors(ensemble, std, key=KEY), 0)
    leaves = lambda tree: [np.asarray(x) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))]
    pairs = lambda tree, at: zip(leaves(tree), leaves(at), strict=True)
    density = lambda tree, at: sum(stats.norm(a, std(w)).logpdf(w).sum() for w, a in pairs(tree, at))
    expected = density(one.weights, one.weights) - density(model, one.weights)
    np.testing.assert_allclose(one.penalty(model, num_rows=20), expected / 20, rtol=1e-5)

    zeros = jax.tree.map(lambda x: 0 * x, one.weights)
    expected = density(zeros, zeros) - density(model, zeros)
    whole = {"model": model, "frozen": ee.train.Frozen(jnp.full(5, 100.0)), "count": jnp.array(3)}
    np.testing.assert_allclose(gaussian_penalty(whole, std, num_rows=20), expected / 20, rtol=1e-5)
    half = {"w": jnp.full(5000, 0.1, jnp.bfloat16), "b": jnp.zeros(3, jnp.float32)}
    found = gaussian_penalty(half, num_rows=1)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 5000 * np.float32(half["w"][0]) ** 2 / 2, rtol=1e-5)
    with pytest.raises(TypeError, match="the model of one member, got an `Ensemble`"):
        gaussian_penalty(ensemble, num_rows=10)
    with pytest.raises(ValueError, match="one member's model and anchor"):
        one.penalty(ensemble.stacked, num_rows=3)


@pytest.mark.slow
def test_anchors_have_their_distribution_and_follow_from_keys():
    ensemble = ee.build(lambda key: eqx.nn.Linear(30, 30, key=key), 5, key=KEY)
    tree = eqx.tree_at(lambda m: (m.weight, m.bias), ensemble[0], (lambda leaf: 1 / leaf.shape[-1], 3))
    anchors = draw_anchors(ensemble, tree, key=KEY)
    assert stats.kstest(np.ravel(anchors.weights.weight) * 30, "norm").pvalue > 1e-6
    assert stats.kstest(np.ravel(anchors.weights.bias) / 3, "norm").pvalue > 1e-6
    np.testing.assert_allclose(anchors.std.weight, 1 / 30, rtol=1e-6)
    keys = ee.member_keys(KEY, 5, purpose="anchor")[np.array([3, 1])]
    assert_same(draw_anchors(ensemble[[3, 1]], tree, key=keys), ee.tree.take(anchors, np.array([3, 1])))
    two = ee.build(lambda key: {name: eqx.nn.Linear(9, 9, key=key) for name in "ab"}, 2, key=KEY)
    first, second = draw_anchors(two, key=KEY).weights.values()
    assert (first.weight != second.weight).all()

    only = eqx.tree_at(lambda m: m.bias, jax.tree.map(lambda _: False, ensemble[0]), True)
    found = draw_anchors(ensemble, trainable=only, key=KEY)
    assert len(jax.tree.leaves(found.weights)) == len(jax.tree.leaves(found.std)) == 1


@pytest.mark.slow
def test_an_anchored_member_is_the_model_that_is_trained_alone():
    def loss(model, batch, key, hyper):
        return mse(model, batch, key) + hyper["anchor"].penalty(model, num_rows=20)

    ensemble, (x, y) = ee.build(network, 3, key=KEY), data()
    anchors, targets = draw_anchors(ensemble, 0.7, key=KEY), noisy_targets(y, 3, std=0.2, key=KEY)
    options = dict(batch_size=8, shuffle=False, hyper={"anchor": anchors}, key=KEY)
    run = ee.fit(ensemble, loss, DECAY, (x, targets), steps=6, **options)
    for i, model in enumerate(ensemble.unstack()):
        own = ee.tree.take(anchors, i)
        alone = Alone(lambda model, batch, key, own=own: loss(model, batch, key, {"anchor": own}), DECAY)
        batches = in_order((x, targets.value[i]), 8, 6)
        expected, _, _ = alone(model, batches, [step_key(KEY, i, step) for step in range(6)])
        assert_close(run.ensemble[i], expected, 1e-5)
