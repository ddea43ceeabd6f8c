import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_ensemble as ee


def _ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 2, 4, 1, key=key), ids=[5, 6, 7, 8], key=jax.random.key(0))


def test_a_pruned_ensemble_predicts_what_the_weighted_one_did():
    ensemble, weights, x = _ensemble(), np.float32([0.5, 0.0, 0.1, 0.4]), np.float32([1, -2, 3])
    small, kept = ee.prune_members(ensemble, weights)
    np.testing.assert_array_equal(small.ids, [5, 7, 8])
    want = ee.combine.mean(ensemble(x), weights=weights)
    np.testing.assert_allclose(ee.combine.mean(small(x), weights=kept), want, rtol=1e-5)
    assert not np.allclose(ee.combine.mean(small(x)), want, rtol=1e-2)
    one, kept = ee.prune_members(ensemble, weights, num_members=1)
    assert one.ids.tolist() == [5]
    assert kept.tolist() == [1]
    assert ee.prune_members(ensemble, weights, above=0.2)[0].ids.tolist() == [5, 8]


def test_messages():
    with pytest.raises(
        ValueError, match=r"`prune_members` needs one weight per member.\n  expected shape \(4,\), got \(3,\)"
    ):
        ee.prune_members(_ensemble(), np.ones(3))
    with pytest.raises(TypeError, match=r"`prune_members` needs `weights` as an array.*\n.*\nPass its weights alone"):
        ee.prune_members(_ensemble(), ee.combine.weights.sparsify(np.ones(4)))
    with pytest.raises(TypeError, match="prune"):
        ee.prune_members(eqx.nn.Linear(1, 1, key=jax.random.key(0)), np.ones(3))
