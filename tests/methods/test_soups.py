"""Greedy soups: the rule written again in NumPy, and what they may never do."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods.soups import greedy

KEY = jax.random.key(1)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 4)).astype(np.float32)
Y = (X @ np.ones(4) + RNG.normal(size=50)).astype(np.float32)
WEIGHTS = (1 + 0.5 * RNG.normal(size=(6, 4))).astype(np.float32)


def of_weights(weights):
    make = lambda key: eqx.nn.Linear(4, 1, use_bias=False, key=key)
    ensemble = ee.build(make, len(weights), key=KEY)
    return eqx.tree_at(lambda e: e.stacked.weight, ensemble, jnp.asarray(weights)[:, None, :])


def score(model):
    return jnp.mean((jax.vmap(model)(X)[:, 0] - Y) ** 2)


def by_hand(weights):
    """The members that a soup has, in the order in which they are added."""
    error = lambda w: np.mean((X.astype(np.float64) @ w - Y) ** 2)
    chosen, best = [], np.inf
    for member in sorted(range(len(weights)), key=lambda i: error(weights[i].astype(np.float64))):
        found = error(np.mean(weights[[*chosen, member]].astype(np.float64), axis=0))
        if found <= best:
            chosen, best = [*chosen, member], found
    return chosen, best


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_rule(mode):
    sign = 1 if mode == "min" else -1
    soup = greedy(of_weights(WEIGHTS), lambda model: sign * score(model), mode=mode)
    chosen, best = by_hand(WEIGHTS)
    assert 1 < len(chosen) < 6, "the case decides nothing"
    np.testing.assert_allclose(soup.weights, np.isin(np.arange(6), chosen) / len(chosen))
    np.testing.assert_allclose(soup.model.weight[0], WEIGHTS[chosen].mean(0), rtol=1e-6)
    np.testing.assert_allclose(soup.score, sign * best, rtol=1e-5)
    np.testing.assert_allclose(soup.member_scores, [sign * score(m) for m in of_weights(WEIGHTS).unstack()])
    everything = score(ee.average_parameters(of_weights(WEIGHTS)))
    assert sign * soup.score <= min(sign * soup.member_scores)
    assert sign * soup.score < everything, "the case decides nothing"


def test_the_order_of_members_does_not_matter():
    order = np.array([4, 2, 0, 5, 1, 3])
    there, here = (greedy(of_weights(w), score, mode="min").weights for w in (WEIGHTS, WEIGHTS[order]))
    np.testing.assert_array_equal(here, there[order])


def permuted(mlp, order):
    """The same function with its hidden units in another order."""
    first, last = mlp.layers
    where = lambda m: (m.layers[0].weight, m.layers[0].bias, m.layers[1].weight)
    return eqx.tree_at(where, mlp, (first.weight[order], first.bias[order], last.weight[:, order]))


def test_a_permuted_twin_is_not_averaged():
    """It is as good a member as the other, and their average is no good model."""
    model = eqx.nn.MLP(4, 1, 16, 1, key=KEY)
    twin = permuted(model, np.roll(np.arange(16), 1))
    x = jnp.asarray(X)
    target = jax.vmap(model)(x)
    distance = lambda other: jnp.mean((jax.vmap(other)(x) - target) ** 2)
    ensemble = ee.stack([model, twin])
    assert distance(twin) < 1e-12 < 1e-3 < distance(ee.average_parameters(ensemble))
    assert greedy(ensemble, distance, mode="min").weights.tolist() in ([1.0, 0.0], [0.0, 1.0])
    same = ee.stack([model, model])
    assert greedy(same, distance, mode="min").weights.tolist() == [0.5, 0.5]


def test_members_without_a_score_are_left_out():
    weights = WEIGHTS.copy()
    weights[by_hand(WEIGHTS)[0][0]] = np.nan
    soup = greedy(of_weights(weights), score, mode="min")
    assert np.isfinite(soup.score)
    assert np.isfinite(soup.model.weight).all()
    with pytest.raises(ValueError, match="all scores are NaN"):
        greedy(of_weights(weights), lambda model: np.nan, mode="max")


def test_scores_see_models_in_inference_mode():
    make = lambda key: eqx.nn.Sequential([eqx.nn.Linear(4, 1, key=key), eqx.nn.Dropout(0.5)])
    ensemble = ee.build(make, 3, key=KEY)
    soup = greedy(ensemble, lambda model: score(lambda x: model(x)), mode="min")
    assert not soup.model.layers[1].inference
