"""Parts that training leaves as they are, whatever selects the trained leaves and whatever the optimiser decays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_ensemble as ee

from ..factories import Alone, assert_close, assert_same, data, distance, in_order, mse, step_key

KEY = jax.random.key(2)
DECAY = optax.adamw(1e-2, weight_decay=0.5)


class Model(eqx.Module):
    trunk: eqx.Module
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(jax.nn.relu(self.trunk(x)))


def make(key, wrap=ee.train.Frozen):
    first, second = jax.random.split(key)
    return Model(wrap(eqx.nn.Linear(25, 8, key=first)), eqx.nn.Linear(8, 2, key=second))


def fitted(ensemble, **options):
    return ee.fit(ensemble, mse, DECAY, data(), steps=5, batch_size=8, shuffle=False, key=KEY, **options)


@pytest.mark.parametrize("trainable", [eqx.is_inexact_array, True, eqx.is_array], ids=["default", "all", "arrays"])
def test_whatever_is_selected_it_does_not_change(trainable):
    if trainable is True:
        trainable = jax.tree.map(eqx.is_array, make(KEY))
    ensemble = ee.build(make, 3, key=KEY)
    run = fitted(ensemble, trainable=trainable)
    assert_same(run.ensemble.stacked.trunk, ensemble.stacked.trunk)
    assert distance(run.ensemble.stacked.head, ensemble.stacked.head) > 1e-2
    assert jax.tree.leaves(run.train_state.params.trunk) == []


def test_without_the_mark_it_does():
    ensemble = ee.build(lambda key: make(key, wrap=lambda x: x), 3, key=KEY)
    assert distance(fitted(ensemble).ensemble.stacked.trunk, ensemble.stacked.trunk) > 1e-2


@pytest.mark.slow
def test_each_member_is_the_model_that_is_trained_alone():
    ensemble = ee.build(make, 3, key=KEY)
    run = fitted(ensemble)
    for i, model in enumerate(ensemble.unstack()):
        spec = eqx.tree_at(lambda m: m.trunk, jax.tree.map(eqx.is_inexact_array, model), replace=False)
        keys = [step_key(KEY, i, step) for step in range(5)]
        expected, _, _ = Alone(mse, DECAY, trainable=spec)(model, in_order(data(), 8, 5), keys)
        assert_close(run.ensemble[i], expected, 1e-5)


def test_gradients_reach_its_inputs_and_not_its_arrays():
    frozen = ee.train.Frozen(eqx.nn.Linear(3, 1, use_bias=False, key=KEY))
    total = lambda both: both[0](both[1])[0]
    of_frozen, of_input = eqx.filter_grad(total)((frozen, jnp.ones(3)))
    assert jnp.array_equal(of_input, frozen.value.weight[0])
    assert not of_frozen.value.weight.any()


def test_nothing_else_to_train_is_an_error():
    ensemble = ee.build(lambda key: ee.train.Frozen(eqx.nn.Linear(25, 2, key=key)), 2, key=KEY)
    with pytest.raises(ValueError, match="found nothing to train"):
        fitted(ensemble)
