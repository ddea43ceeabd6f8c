import itertools

import jax
import jax.numpy as jnp
import numpy as np

import eqx_ensemble as ee


def _rows(num_rows=60, seed=0, distinct=None):
    rng = np.random.default_rng(seed)
    values, losses = rng.normal(size=num_rows), rng.exponential(size=num_rows)
    if distinct is not None:
        values = np.round(values * distinct) / distinct
    return (values + 0.3 * losses if distinct is None else values).astype(np.float32), losses.astype(np.float32)


def _risks(order, losses):
    exact = losses.astype(np.float64)
    return np.array([np.mean([exact[i] for i in order[: k + 1]]) for k in range(len(order))])


def test_risk_is_the_mean_loss_of_the_most_certain():
    values, losses = _rows()
    want = _risks(np.argsort(values), losses)
    found = ee.scores.risk_coverage(values, losses)
    np.testing.assert_allclose(found.risk, want, rtol=1e-5)
    np.testing.assert_allclose(found.coverage, np.arange(1, 61) / 60, rtol=1e-6)
    np.testing.assert_allclose(ee.scores.aurc(values, losses), want.mean(), rtol=1e-5)
    best = _risks(np.argsort(losses), losses).mean()
    np.testing.assert_allclose(ee.scores.excess_aurc(values, losses), want.mean() - best, rtol=1e-5)
    # The least certain first would not pass.
    assert not np.allclose(_risks(np.argsort(-values), losses), want, rtol=1e-2)
    with jax.enable_x64(True):
        wide = values.astype(np.float64), losses.astype(np.float64)
        np.testing.assert_allclose(ee.scores.aurc(*wide), want.mean(), rtol=1e-12)
        np.testing.assert_allclose(ee.scores.excess_aurc(*wide), want.mean() - best, rtol=1e-12)


def test_tied_rows_have_the_mean_of_their_weights():
    args = jnp.array([0.0, 1.0, 1.0]), jnp.array([0.0, 0.0, 1.0])
    weights = jnp.array([1.0, 1.0, 3.0])  # of which 1, 3 and 5 are covered, at risks 0, 1.5 / 3 and 3 / 5
    np.testing.assert_allclose(ee.scores.aurc(*args, row_weights=weights), (2 * 0.5 + 2 * 0.6) / 5, rtol=1e-6)


def test_ties_are_the_mean_over_all_orders():
    values, losses = np.float32([2, 1, 1, 1, 3, 3]), np.float32([0.5, 3, 0, 1, 2, 7])
    orders = [p for p in itertools.permutations(range(6)) if (np.diff(values[list(p)]) >= 0).all()]
    assert len(orders) == 12
    want = np.mean([_risks(order, losses) for order in orders], axis=0)
    np.testing.assert_allclose(ee.scores.risk_coverage(values, losses).risk, want, rtol=1e-6)
    # The order in which rows that tie were passed is one of them, and would not pass.
    assert not np.allclose(_risks(np.argsort(values, kind="stable"), losses), want, rtol=1e-2)
    np.testing.assert_allclose(ee.scores.aurc(values, losses), want.mean(), rtol=1e-6)


def test_the_order_of_rows_does_not_matter():
    values, losses = _rows(200, distinct=2)
    shuffled = np.random.default_rng(1).permutation(200)
    for area in (ee.scores.aurc, ee.scores.excess_aurc):
        np.testing.assert_allclose(area(values[shuffled], losses[shuffled]), area(values, losses), rtol=1e-5)


def test_closed_forms():
    losses = np.float32([0, 0, 0, 1, 1])
    constant = np.zeros(5, np.float32)
    np.testing.assert_allclose(ee.scores.aurc(constant, losses), 0.4, rtol=1e-6)  # the mean loss
    perfect = (1 / 4 + 2 / 5) / 5
    np.testing.assert_allclose(ee.scores.aurc(losses, losses), perfect, rtol=1e-6)
    assert ee.scores.excess_aurc(losses, losses) == 0
    worst = (1 + 1 + 2 / 3 + 2 / 4 + 2 / 5) / 5
    np.testing.assert_allclose(ee.scores.excess_aurc(-losses, losses), worst - perfect, rtol=1e-6)
    np.testing.assert_allclose(ee.scores.excess_aurc(constant, losses), 0.4 - perfect, rtol=1e-6)


def test_what_losses_have_in_common_costs_the_excess_nothing():
    values, losses = _rows(500)
    losses = np.round(losses * 512) / 512  # exact also after 1e4 is added
    far = (1e4 + losses).astype(np.float32)
    want = ee.scores.excess_aurc(values, losses)
    np.testing.assert_allclose(ee.scores.excess_aurc(values, far), want, rtol=1e-5)
    plain = ee.scores.aurc(values, far) - ee.scores.aurc(far, far)
    assert abs(plain / want - 1) > 1e-4  # the difference of two large areas


def test_masked_rows_are_left_out_whatever_they_hold():
    values, losses = _rows()
    mask = np.arange(60) % 3 > 0
    values[5] = np.inf  # a row that counts, as uncertain as can be
    broken = np.where(mask, values, np.nan).astype(np.float32), np.where(mask, losses, np.nan).astype(np.float32)
    want, got = ee.scores.risk_coverage(values[mask], losses[mask]), ee.scores.risk_coverage(*broken, row_weights=mask)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one[:40], other, rtol=1e-5)
        np.testing.assert_allclose(one[40:], other[-1], rtol=1e-5)
    for area in (ee.scores.aurc, ee.scores.excess_aurc):
        np.testing.assert_allclose(area(*broken, row_weights=mask), area(values[mask], losses[mask]), rtol=1e-5)
        assert not np.allclose(area(*_rows()), area(values[mask], losses[mask]), rtol=1e-2)


def test_transforms_and_unknown_rows():
    values, losses = _rows()
    for area in (ee.scores.aurc, ee.scores.excess_aurc):
        want = area(values, losses)
        np.testing.assert_allclose(jax.jit(area)(values, losses), want, rtol=1e-5)
        both = jax.vmap(area, in_axes=(0, None))(np.stack([values, -values]), losses)
        np.testing.assert_allclose(both, [want, area(-values, losses)], rtol=1e-5)
        np.testing.assert_allclose(area(values.reshape(6, 10), losses.reshape(6, 10)), want, rtol=1e-5)
        assert np.isnan(area(values, np.where(np.arange(60) == 7, np.nan, losses)))
        assert np.isnan(area(np.where(np.arange(60) == 7, np.nan, values), losses))
    assert ee.scores.aurc(values, (losses > 1).astype(int)).dtype == jnp.float32
    # The area is linear in the losses, and its gradient is the weight of each.
    gradient = jax.grad(ee.scores.aurc, argnums=1)(values, losses)
    np.testing.assert_allclose(np.sum(gradient * losses), ee.scores.aurc(values, losses), rtol=1e-5)
    np.testing.assert_allclose(np.sum(gradient), 1, rtol=1e-5)
