import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine


def test_posterior_of_binomials():
    # Members that predict 0.2, 0.5 and 0.8; seven successes of ten: the posterior in closed form.
    p, data = np.array([0.2, 0.5, 0.8]), np.array([1] * 7 + [0] * 3)
    want = p**7 * (1 - p) ** 3 / np.sum(p**7 * (1 - p) ** 3)
    rows = np.where(data[None], np.log(p)[:, None], np.log(1 - p)[:, None]).astype(np.float32)
    np.testing.assert_allclose(combine.weights.bayesian(rows), want, rtol=1e-5)
    np.testing.assert_allclose(combine.weights.bayesian(rows.reshape(3, 2, 5)), want, rtol=1e-5)
    np.testing.assert_allclose(combine.weights.bayesian(np.sum(rows, axis=1)), want, rtol=1e-5)
    # The mean over rows would not pass.
    assert not np.allclose(combine.weights.bayesian(np.mean(rows, axis=1)), want, rtol=1e-1)
    prior = np.float32([0.5, 0.25, 0.25])
    want = prior * want / np.sum(prior * want)
    np.testing.assert_allclose(combine.weights.bayesian(np.sum(rows, axis=1) + np.log(prior)), want, rtol=1e-5)


def test_a_large_common_part_costs_no_precision():
    rng = np.random.default_rng(0)
    rows = (1e4 + 0.02 * rng.normal(size=(4, 2000))).astype(np.float32)
    total = rows.astype(np.float64).sum(1)
    want = np.exp(total - total.max()) / np.exp(total - total.max()).sum()
    np.testing.assert_allclose(combine.weights.bayesian(rows), want, rtol=1e-4)
    assert not np.allclose(jax.nn.softmax(jnp.sum(jnp.asarray(rows), axis=1)), want, rtol=1e-2)  # summed as they are


def test_masks_impossible_members_and_transforms():
    rows = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    mask = np.array([True, True, False, True, False, True])
    want = combine.weights.bayesian(rows[:, mask])
    for given in (rows, np.where(mask, rows, np.nan)):
        np.testing.assert_allclose(combine.weights.bayesian(given, row_weights=mask), want, rtol=1e-5)
    rows[1, 0] = -np.inf
    found = combine.weights.bayesian(rows)
    assert found[1] == 0
    np.testing.assert_allclose(found[jnp.array([0, 2])], combine.weights.bayesian(rows[[0, 2]]), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(combine.weights.bayesian)(rows), found, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(combine.weights.bayesian)(rows[None])[0], found, rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: combine.weights.bayesian(x)[0])(rows)).all()


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match="`combine.weights.bayesian` needs `log_scores` that are finite"):
        combine.weights.bayesian(np.array([np.nan, 1.0]))
    with pytest.raises(ValueError, match=r"a member above -inf in every row.*\n  got none in row \(\)"):
        combine.weights.bayesian(np.array([-np.inf, -np.inf]))


def test_many_rows_keep_their_digits():
    rows = np.random.default_rng(0).normal(size=(2, 1_000_000)).astype(np.float32)
    rows[0] -= np.float32(np.mean(rows[0].astype(np.float64) - rows[1]))  # so that neither has all of the weight
    odds = np.sum(rows[0].astype(np.float64) - rows[1])
    found = combine.weights.bayesian(rows)
    np.testing.assert_allclose(np.log(found[0] / found[1]), odds, atol=5e-3)
    # Sums relative to the best of each row are near -6e5, where float32 numbers are 0.06 apart.
    behind = np.sum(rows - rows.max(0), axis=1, dtype=np.float64).astype(np.float32)
    assert np.spacing(np.abs(behind)).min() > 0.03
