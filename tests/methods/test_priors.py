"""Randomised priors, anchors and noise in targets: against training alone, and for linear models the posterior."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import eqx_ensemble as ee
from eqx_ensemble.methods.priors import RandomisedPrior, draw_anchors, noisy_targets

from ..factories import CASES, Alone, assert_close, assert_same, data, distance, in_order, mse, step_key

KEY = jax.random.key(5)
DECAY = optax.adamw(1e-2, weight_decay=0.1)
SCALE = 3.0


def network(key):
    return eqx.nn.MLP(25, 2, 8, 1, key=key)


def pair(key, scale=SCALE):
    own, prior = jax.random.split(key)
    return RandomisedPrior(network(own), network(prior), scale=scale)


def test_trained_with_a_prior_is_trained_on_what_the_prior_leaves():
    """f + βp on y is f on y - βp, an ensemble of its own; a plain ensemble on y is another."""
    x, y = data()
    ensemble = ee.build(pair, 3, key=KEY)
    options = dict(steps=12, batch_size=8, shuffle=False, key=KEY)
    run = ee.fit(ensemble, mse, DECAY, (x, y), **options)
    prior = lambda model, x: SCALE * model.prior.value(x)
    offset = ee.predict(ensemble, x, fn=prior)
    plain = ee.from_stacked(ensemble.stacked.network)
    residual = ee.fit(plain, mse, DECAY, (x, ee.Each(y[None] - offset)), **options)
    assert_close(run.ensemble.stacked.network, residual.ensemble.stacked, 1e-5)
    np.testing.assert_allclose(
        ee.predict(run.ensemble, x), ee.predict(residual.ensemble, x) + offset, rtol=1e-5, atol=1e-5
    )
    assert_same(run.ensemble.stacked.prior, ensemble.stacked.prior)
    ignored = ee.fit(plain, mse, DECAY, (x, y), **options)
    assert distance(run.ensemble.stacked.network, ignored.ensemble.stacked) > 1e-2


@pytest.mark.slow
def test_each_member_with_a_prior_is_the_model_that_is_trained_alone():
    ensemble = ee.build(pair, 3, key=KEY)
    run = ee.fit(ensemble, mse, DECAY, data(), steps=6, batch_size=8, shuffle=False, key=KEY)
    for i, model in enumerate(ensemble.unstack()):
        spec = jax.tree.map(lambda _: False, model)
        spec = eqx.tree_at(lambda m: m.network, spec, jax.tree.map(eqx.is_inexact_array, model.network))
        keys = [step_key(KEY, i, step) for step in range(6)]
        expected, _, _ = Alone(mse, DECAY, trainable=spec)(model, in_order(data(), 8, 6), keys)
        assert_close(run.ensemble[i], expected, 1e-5)


def test_priors_travel_with_their_members():
    ensemble = ee.build(pair, zip={"scale": [1.0, 2.0, 4.0]}, key=KEY)
    x = data()[0]
    expected = ee.predict(ensemble, x)
    np.testing.assert_array_equal(ee.predict(ensemble[[2, 0]], x), expected[np.array([2, 0])])
    one = ensemble[1]
    np.testing.assert_allclose(one(x[0]), one.network(x[0]) + 2.0 * one.prior(x[0]), rtol=1e-6)
    trained = ee.fit(ensemble, mse, DECAY, data(), steps=2, key=KEY).ensemble
    assert [model.scale.value for model in trained.unstack()] == [1.0, 2.0, 4.0]


class Stateful(eqx.Module):
    out: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.out = eqx.nn.Linear(25, 2, key=key)
        self.norm = eqx.nn.BatchNorm(25, axis_name="batch", mode="ema")

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.out(x), state


def test_a_network_with_state_has_a_prior_without():
    make = eqx.nn.make_with_state(lambda key: RandomisedPrior(Stateful(key), network(key)))
    ensemble, state = ee.build(make, 2, key=KEY)
    run = ee.fit(ensemble, CASES["conv and batch norm"].loss, DECAY, data(), state=state, steps=2, key=KEY)
    assert np.isfinite(run.history.loss).all()
    plain, before = eqx.nn.make_with_state(Stateful)(KEY)
    x = data()[0][0]
    model = RandomisedPrior(plain, network(KEY))
    out, after = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x[None], before)
    expected, expected_after = jax.vmap(plain, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
        x[None], before
    )
    np.testing.assert_allclose(out[0], expected[0] + network(KEY)(x), rtol=1e-6)
    assert_same(after, expected_after)


def test_a_prior_has_no_dropout():
    dropout = eqx.nn.Sequential([eqx.nn.Linear(25, 2, key=KEY), eqx.nn.Dropout(0.5)])
    model = RandomisedPrior(eqx.nn.MLP(25, 2, 4, 1, key=KEY), dropout, scale=jnp.float32(2))
    x = data()[0][0]
    np.testing.assert_allclose(model(x, key=KEY), model.network(x) + 2 * dropout.layers[0](x), rtol=1e-6)


def test_outputs_of_several_leaves_and_half_precision():
    class Two(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return {"mean": self.weight @ x, "scale": jnp.sum(self.weight)}

    half, full = Two(jnp.ones((2, 3), jnp.bfloat16)), Two(jnp.full((2, 3), 2.0))
    out = RandomisedPrior(half, full, scale=0.5)(jnp.ones(3, jnp.bfloat16).astype(jnp.bfloat16))
    assert out["mean"].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out["scale"], np.float32), 6 + 0.5 * 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: ((network(KEY), 3.0), {}), "needs `prior` to be a function"),
        (lambda: (("network", network(KEY)), {}), "needs `network` to be a function"),
    ],
)
def test_bad_priors(unhooked, arguments, message):
    args, options = arguments()
    with pytest.raises((TypeError, ValueError), match=message):
        RandomisedPrior(*args, **options)


def test_a_prior_of_another_output():
    wide = RandomisedPrior(network(KEY), eqx.nn.Linear(25, 3, key=KEY))
    with pytest.raises(ValueError, match=r"outputs of one shape; got \(2,\) and \(3,\)"):
        wide(jnp.ones(25))


def test_noise_follows_from_the_members_key_alone():
    y = data()[1]
    noisy = np.asarray(noisy_targets(y, 5, std=0.3, key=KEY).value)
    assert noisy.shape == (5, *y.shape)
    one = jax.random.fold_in(ee.member_keys(KEY, 5, purpose="noise in targets")[3], 7)
    np.testing.assert_allclose(noisy[3, 7], y[7] + 0.3 * jax.random.normal(one, (2,)), rtol=1e-6)
    keys = ee.member_keys(KEY, 5, purpose="noise in targets")[np.array([4, 1])]
    np.testing.assert_array_equal(noisy_targets(y, 2, std=0.3, key=keys).value, noisy[[4, 1]])
    np.testing.assert_array_equal(noisy_targets(y[:6], 5, std=0.3, key=KEY).value, noisy[:, :6])


def test_noise_has_its_distribution_and_is_independent():
    y = jnp.zeros((4000, 1))
    drawn = np.asarray(noisy_targets(y, 4, std=2.0, key=KEY).value)[..., 0] / 2
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 1e-6
    assert np.abs(np.corrcoef(drawn)[np.triu_indices(4, 1)]).max() < 5.5 / np.sqrt(4000)
    per_target = noisy_targets(y, 4, std=np.linspace(0, 4, 4000)[:, None], key=KEY)
    np.testing.assert_allclose(per_target.value[..., 0], drawn * np.linspace(0, 4, 4000), rtol=1e-5, atol=1e-6)


def test_a_row_has_one_noise_in_all_epochs_and_however_often_it_is_drawn():
    """With `rows`, minibatches and a member's own order: what a step sees is what the table says."""
    x, y = data()
    targets = noisy_targets(y, 3, std=0.3, key=KEY)

    def seen(model, batch, key):
        x, y, row = batch
        return mse(model, (x, y), key), (row, y)

    rows = ee.resample.bootstrap(len(y), 3, key=KEY)
    ensemble = ee.build(network, 3, key=KEY)
    run = ee.fit(
        ensemble,
        seen,
        DECAY,
        (x, targets, jnp.arange(len(y))),
        rows=rows,
        has_aux=True,
        batch_size=5,
        epochs=3,
        key=KEY,
    )
    found, noisy = map(np.asarray, run.history.aux)
    assert found.shape == (3, 12, 5)
    for member in range(3):
        np.testing.assert_array_equal(noisy[member], np.asarray(targets.value)[member, found[member]])
        assert sorted(found[member].ravel()) == sorted(np.tile(rows[member], 3))


def test_bad_noise(unhooked):
    with pytest.raises(TypeError, match="floating-point `targets`, got int"):
        noisy_targets(np.arange(3), 2, std=0.1, key=KEY)
    with pytest.raises(ValueError, match="broadcast"):  # one per row would give each row the noise of all
        noisy_targets(np.zeros((3, 1)), 2, std=np.ones(3), key=KEY)


def anchored_loss(model, batch, key, hyper):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2) + hyper["anchor"].penalty(model, num_rows=20)


def test_penalty_is_the_log_prior_of_the_trained_leaves():
    model = eqx.nn.MLP(25, 2, 8, 1, key=KEY)
    ensemble = ee.stack([model, network(jax.random.key(9))])
    weights = lambda leaf: 2.0 if leaf.ndim == 2 else 0.5
    anchors = draw_anchors(ensemble, weights, key=KEY)
    one = ee.tree.take(anchors, 0)
    expected = 0.0
    for layer, anchor in zip(model.layers, one.weights.layers, strict=True):
        expected += stats.norm(anchor.weight, 2.0).logpdf(anchor.weight).sum()
        expected -= stats.norm(anchor.weight, 2.0).logpdf(layer.weight).sum()
        expected += stats.norm(anchor.bias, 0.5).logpdf(anchor.bias).sum()
        expected -= stats.norm(anchor.bias, 0.5).logpdf(layer.bias).sum()
    np.testing.assert_allclose(one.penalty(model, num_rows=20), expected / 20, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(lambda n: one.penalty(model, num_rows=n))(20), expected / 20, rtol=1e-5)


def test_anchors_have_their_distribution_and_follow_from_keys():
    ensemble = ee.build(lambda key: eqx.nn.Linear(30, 30, key=key), 5, key=KEY)
    tree = eqx.tree_at(lambda m: (m.weight, m.bias), ensemble[0], (lambda leaf: 1 / leaf.shape[-1], 3))
    anchors = draw_anchors(ensemble, tree, key=KEY)
    assert stats.kstest(np.ravel(anchors.weights.weight) * 30, "norm").pvalue > 1e-6
    assert stats.kstest(np.ravel(anchors.weights.bias) / 3, "norm").pvalue > 1e-6
    np.testing.assert_allclose(anchors.std.weight, 1 / 30, rtol=1e-6)
    keys = ee.member_keys(KEY, 5, purpose="anchor")[np.array([3, 1])]
    some = draw_anchors(ensemble[[3, 1]], tree, key=keys)
    assert_same(some, ee.tree.take(anchors, np.array([3, 1])))
    assert (anchors.weights.weight[0] != anchors.weights.weight[1]).all()
    for std in (jnp.array(2.0), np.array(2.0), lambda leaf: 2 * jnp.sqrt(1.0)):
        assert_same(draw_anchors(ensemble[[3]], std, key=KEY), draw_anchors(ensemble[[3]], 2.0, key=KEY))
    two = ee.build(lambda key: {name: eqx.nn.Linear(9, 9, key=key) for name in "ab"}, 2, key=KEY)
    first, second = draw_anchors(two, key=KEY).weights.values()
    assert (first.weight != second.weight).all()


def test_only_what_is_trained_has_an_anchor():
    ensemble = ee.build(pair, 2, key=KEY)
    last = lambda model: model.network.layers[1].weight
    only = eqx.tree_at(last, jax.tree.map(lambda _: False, ensemble[0]), True)
    for trainable, count in ((eqx.is_inexact_array, 4), (only, 1)):
        anchors = draw_anchors(ensemble, trainable=trainable, key=KEY)
        assert len(jax.tree.leaves(anchors.weights)) == len(jax.tree.leaves(anchors.std)) == count
        run = ee.fit(
            ensemble, anchored_loss, DECAY, data(), hyper={"anchor": anchors}, trainable=trainable, steps=2, key=KEY
        )
        assert np.isfinite(run.history.loss).all()


FAST = ["bfloat16"]  # whose numbers may not be promoted


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_penalty_of_every_kind_of_model(name):
    """At the anchor itself it is 0, one standard deviation away half the number of weights."""
    case = CASES[name]
    made = ee.build(case.make, 2, key=KEY)
    ensemble = made[0] if case.stateful else made
    anchors = draw_anchors(ensemble, 0.5, key=KEY)
    shifted = lambda shift: jax.tree.map(lambda a: a + jnp.asarray(shift, a.dtype), anchors.weights)
    at = lambda shift: ee.from_stacked(eqx.combine(shifted(shift), ensemble.stacked))
    penalty = ee.map_members(lambda model, anchor: anchor.penalty(model, num_rows=1))
    assert penalty(at(0), ee.Each(anchors)).tolist() == [0.0, 0.0]
    count = sum(x.size for x in jax.tree.leaves(anchors.weights)) / 2
    np.testing.assert_allclose(penalty(at(0.5), ee.Each(anchors)), count / 2, rtol=2e-2 if name == "bfloat16" else 1e-4)


def test_an_anchored_member_is_the_model_that_is_trained_alone():
    ensemble = ee.build(network, 3, key=KEY)
    anchors = draw_anchors(ensemble, 0.7, key=KEY)
    x, y = data()
    targets = noisy_targets(y, 3, std=0.2, key=KEY)
    options = dict(steps=6, batch_size=8, shuffle=False, hyper={"anchor": anchors}, key=KEY)
    run = ee.fit(ensemble, anchored_loss, DECAY, (x, targets), **options)
    for i, model in enumerate(ensemble.unstack()):
        own = ee.tree.take(anchors, i)
        alone = Alone(lambda model, batch, key, own=own: anchored_loss(model, batch, key, {"anchor": own}), DECAY)
        batches = in_order((x, targets.value[i]), 8, 6)
        expected, _, _ = alone(model, batches, [step_key(KEY, i, step) for step in range(6)])
        assert_close(run.ensemble[i], expected, 1e-5)


def test_an_anchored_run_resumes_bit_for_bit(tmp_path):
    ensemble = ee.build(pair, 3, key=KEY)
    anchors = draw_anchors(ensemble, key=KEY)

    def run(folder, epochs, key=KEY):
        x, y = data()
        rows = ee.resample.bootstrap(len(y), 3, key=KEY)
        targets = noisy_targets(y, 3, std=0.2, key=key)
        return ee.fit(
            ensemble, anchored_loss, DECAY, (x, targets), hyper={"anchor": anchors}, rows=rows, batch_size=8,
            epochs=epochs, checkpoint=tmp_path / folder, key=KEY,
        )  # fmt: skip

    whole = run("whole", 4)
    run("parts", 2)
    assert_same(run("parts", 4).ensemble, whole.ensemble)
    with pytest.raises(ValueError, match="data"):
        run("parts", 4, key=jax.random.key(6))


def test_anchors_of_all_members_are_refused(unhooked):
    ensemble = ee.build(network, 2, key=KEY)
    anchor = ee.tree.take(draw_anchors(ensemble, key=KEY), 0)
    with pytest.raises(ValueError, match="one member's model and anchor"):
        anchor.penalty(ensemble.stacked, num_rows=3)
