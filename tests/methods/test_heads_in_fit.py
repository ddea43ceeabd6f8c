"""Losses of heads inside `fit`: members as if trained alone, masks, and coefficients that differ between members."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import heads

from ..factories import Alone, assert_close, distance, in_order, step_key

KEY, ADAM, STEPS = jax.random.key(11), optax.adam(1e-2), 5
X = jax.random.normal(jax.random.key(0), (20, 3))
Y, CLASSES = jnp.sin(X[:, 0]), (X[:, 0] > 0).astype(jnp.int32)
LEVELS = jnp.array([0.1, 0.5, 0.9])

# The size of the output, targets, and the loss of raw outputs.
HEADS = {
    "evidential": (4, Y, lambda raw, y, **o: heads.evidential_loss(heads.normal_inverse_gamma(raw), y, **o)),
    "squared": (2, CLASSES, lambda raw, y, **o: heads.dirichlet_loss(heads.dirichlet(raw), y, kl_weight=0.5, **o)),
    "digamma": (
        2,
        CLASSES,
        lambda raw, y, **o: heads.dirichlet_loss(heads.dirichlet(raw), y, kl_weight=0.5, risk="digamma", **o),
    ),
    "quantiles": (3, Y, lambda raw, y, **o: heads.pinball_loss(raw, y, levels=LEVELS, **o)),
    "mixture": (6, Y, lambda raw, y, **o: heads.mixture_density_loss(heads.mixture_density(raw), y, **o)),
}


def members(name, count=3):
    size, targets, of_raw = HEADS[name]

    def loss(model, batch, key):
        x, y = batch
        return of_raw(jax.vmap(model)(x), y)

    return ee.build(lambda key: eqx.nn.MLP(3, size, 8, 1, key=key), count, key=jax.random.key(3)), loss, (X, targets)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_a_member_is_the_model_that_training_it_alone_gives(name):
    ensemble, loss, data = members(name)
    run = ee.fit(ensemble, loss, ADAM, data, steps=STEPS, batch_size=8, shuffle=False, key=KEY)
    keys = [step_key(KEY, 1, step) for step in range(STEPS)]
    alone, _, losses = Alone(loss, ADAM)(ensemble[1], in_order(data, 8, STEPS), keys)
    assert distance(alone, ensemble[1]) > 1e-2
    assert_close(run.ensemble[1], alone, 1e-5)
    np.testing.assert_allclose(run.history.loss[1], losses, rtol=1e-5)
    assert distance(run.ensemble[0], alone) > 1e-2


# What each loss takes for one member: the losses of parameters, of which masked rows may be NaN.
LOSSES = {
    "evidential": (heads.normal_inverse_gamma, heads.evidential_loss, {}),
    "squared": (heads.dirichlet, heads.dirichlet_loss, {"kl_weight": 0.5}),
    "digamma": (heads.dirichlet, heads.dirichlet_loss, {"kl_weight": 0.5, "risk": "digamma"}),
    "quantiles": (lambda raw: raw, heads.pinball_loss, {"levels": LEVELS}),
    "mixture": (heads.mixture_density, heads.mixture_density_loss, {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_masked_rows_change_no_value_and_no_gradient(name):
    size, targets, _ = HEADS[name]
    head, loss, options = LOSSES[name]
    parameters = jax.tree.map(np.array, head(jax.random.normal(jax.random.key(1), (20, size))))
    kept = np.arange(20) % 3 > 0
    rows = np.asarray(loss(parameters, targets, reduction="none", **options))
    assert rows.shape == (20,)
    bad = np.array(targets)
    bad[~kept] = -7 if bad.dtype.kind == "i" else np.nan
    for leaf in jax.tree.leaves(parameters):
        leaf[~kept] = np.nan
    spoilt = lambda parameters: loss(parameters, bad, row_weights=kept, **options)
    got, slope = jax.jit(jax.value_and_grad(spoilt))(parameters)
    np.testing.assert_allclose(got, rows[kept].mean(), rtol=1e-5)
    np.testing.assert_allclose(spoilt(parameters), got, rtol=1e-5)
    for leaf in jax.tree.leaves(slope):
        assert np.isfinite(leaf).all()
        assert not leaf[~kept].any()
        assert leaf[kept].any()


@pytest.mark.slow
def test_a_coefficient_of_each_member():
    ensemble, _, data = members("evidential")
    coefficients = jnp.array([0.0, 0.01, 1.0])

    def loss(model, batch, key, hyper):
        x, y = batch
        return heads.evidential_loss(heads.normal_inverse_gamma(jax.vmap(model)(x)), y, coefficient=hyper["penalty"])

    options = {"steps": STEPS, "batch_size": 8, "shuffle": False, "key": KEY}
    run = ee.fit(ensemble, loss, lambda hyper: ADAM, data, hyper={"penalty": coefficients}, **options)
    for i, coefficient in enumerate(coefficients):
        fixed = lambda model, batch, key, c=coefficient: loss(model, batch, key, {"penalty": c})
        keys = [step_key(KEY, i, step) for step in range(STEPS)]
        assert_close(run.ensemble[i], Alone(fixed, ADAM)(ensemble[i], in_order(data, 8, STEPS), keys)[0], 1e-5)


@pytest.mark.slow
def test_predictions_of_an_ensemble_are_named_tuples_of_members():
    class Head(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, x):
            return heads.normal_inverse_gamma(self.mlp(x))

    ensemble = ee.build(lambda key: Head(eqx.nn.MLP(3, 4, 8, 1, key=key)), 3, key=KEY)
    parameters = ee.predict(ensemble, X)
    assert isinstance(parameters, heads.NormalInverseGamma)
    total = heads.decompose_evidential(parameters).total
    assert ee.combine.gaussian(parameters.mean, total).variance.shape == (20,)
