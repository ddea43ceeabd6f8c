from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_ensemble as ee

pytestmark = pytest.mark.usefixtures("unhooked")
MEANS, VARIANCES = jnp.zeros((3, 8, 2)), jnp.ones((3, 8, 2))


@pytest.mark.parametrize(
    "function", [ee.combine.mean, ee.combine.mixture, ee.combine.median, ee.uncertainty.decompose_entropy]
)
def test_a_mean_and_a_variance_are_not_two_members(function):
    for pair, words in (
        (ee.combine.Gaussian(MEANS, VARIANCES), "a Gaussian of 2: mean, variance"),
        (ee.methods.sngp.SNGPOutput(MEANS, VARIANCES), "a SNGPOutput of 2: mean, variance"),
        ((MEANS, VARIANCES), "a tuple of 2 arrays"),
    ):
        with pytest.raises(TypeError, match=rf"as one array.\n  got {words}\nPass the one you mean, such as `"):
            function(pair)
        with pytest.raises(TypeError, match="as one array"):
            jax.jit(function)(pair)
    function([MEANS[0], MEANS[1]])  # a list with an array for each member, as ever


def test_members_that_predict_a_pair():
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 2, key=key), 3, key=jax.random.key(0))
    of_pairs = lambda model, x: ee.combine.Gaussian(model(x), jnp.ones(2))
    with pytest.raises(TypeError, match="`combine.mixture` needs `logits` as one array"):
        ee.predict(ensemble, jnp.ones((5, 2)), fn=of_pairs, combine=ee.combine.mixture)
    assert ee.predict(ensemble, jnp.ones((5, 2)), fn=of_pairs, combine=ee.combine.gaussian).mean.shape == (5, 2)


def test_an_ensemble_is_no_prediction():
    ensemble: Any = ee.build(lambda key: eqx.nn.Linear(2, 2, key=key), 3, key=jax.random.key(0))
    message = r"`scores.nll` needs `logits` as an array of numbers.\n  got an Ensemble\n.*: `run.predict\(x\)`.$"
    with pytest.raises(TypeError, match=message):
        ee.scores.nll(ensemble, jnp.zeros(8, int))
