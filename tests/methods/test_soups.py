"""Greedy soups: the rule written again in NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods.adapters import low_rank, merge
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
    """In any order of the members, of which the average of all is worse."""
    sign = 1 if mode == "min" else -1
    soup = greedy(of_weights(WEIGHTS), lambda model: sign * score(model), mode=mode)
    chosen, best = by_hand(WEIGHTS)
    assert 1 < len(chosen) < 6, "the case decides nothing"
    np.testing.assert_allclose(soup.weights, np.isin(np.arange(6), chosen) / len(chosen))
    np.testing.assert_allclose(soup.model.weight[0], WEIGHTS[chosen].mean(0), rtol=1e-6)
    np.testing.assert_allclose(soup.score, sign * best, rtol=1e-5)
    np.testing.assert_allclose(soup.member_scores, [sign * score(m) for m in of_weights(WEIGHTS).unstack()])
    everything = score(ee.average_parameters(of_weights(WEIGHTS)))
    assert sign * soup.score < everything, "the case decides nothing"
    order = np.array([4, 2, 0, 5, 1, 3])
    other = greedy(of_weights(WEIGHTS[order]), lambda model: sign * score(model), mode=mode)
    np.testing.assert_array_equal(other.weights, soup.weights[order])
    ties = of_weights(np.repeat(WEIGHTS[:1], 2, axis=0))
    assert greedy(ties, score, mode="min").weights.tolist() == [0.5, 0.5]


def test_adapters_are_averaged_merged():
    """The product of averaged matrices is not the average of the products."""
    ensemble = low_rank(eqx.nn.Linear(4, 2, key=KEY), 3, rank=1, key=KEY)
    own = lambda e: [getattr(e.stacked, name) for name in e.stacked.own]
    ensemble = eqx.tree_at(own, ensemble, replace_fn=lambda x: x + jax.random.normal(KEY, x.shape))
    average = ee.average_parameters(ensemble, [1, 2, 1])
    want = ee.average_parameters(ee.map_members(merge)(ensemble), [1, 2, 1])
    np.testing.assert_allclose(average.weight, want.weight, rtol=1e-6)
    soup = greedy(ensemble, lambda model: jnp.sum(model(X[0])), mode="min")
    np.testing.assert_allclose(soup.model.weight, ee.average_parameters(ensemble, soup.weights).weight, rtol=1e-6)


def test_members_without_a_score_are_left_out(unhooked):
    weights = WEIGHTS.copy()
    weights[by_hand(WEIGHTS)[0][0]] = np.nan
    soup = greedy(of_weights(weights), score, mode="min")
    assert np.isfinite(soup.score)
    assert np.isfinite(soup.model.weight).all()
    make = lambda key: eqx.nn.Sequential([eqx.nn.Linear(4, 1, key=key), eqx.nn.Dropout(0.5)])
    soup = greedy(ee.build(make, 3, key=KEY), lambda model: score(lambda x: model(x)), mode="min")  # of inference mode
    assert not soup.model.layers[1].inference
    with pytest.raises(ValueError, match="all scores are NaN"):
        greedy(of_weights(weights), lambda model: np.nan, mode="max")
