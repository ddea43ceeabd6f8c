"""Conformal risk control: the split-conformal quantile for losses of 0 and 1, the definition, and the guarantee."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import conformal

RNG = np.random.default_rng(0)
SCORES = np.round(RNG.normal(size=59), 1).astype(np.float32)  # with ties
STEPS = RNG.uniform(size=(40, 3)).astype(np.float32)
DROPS = RNG.choice(np.float32([0.0, 0.125, 0.25]), size=(40, 3))
MASK = RNG.uniform(size=40) < 0.7


def _losses(steps, drops, grid):
    return (drops[:, None] * (grid[None, :, None] < steps[:, None])).sum(-1).astype(np.float32)


@pytest.mark.parametrize("level", [0.5, 0.7, 0.9])
def test_losses_of_zero_and_one_give_the_split_quantile(level):
    want = conformal.quantile(SCORES, level=level)
    ones = np.ones((59, 1), np.float32)
    assert conformal.risk_control_steps(SCORES[:, None], ones, risk=1 - level) == want
    grid = np.unique(SCORES)
    losses = _losses(SCORES[:, None], ones, grid)
    assert conformal.risk_control(losses, grid, risk=1 - level) == want
    # Another bound, and losses in its unit: the same.
    assert conformal.risk_control_steps(SCORES[:, None], 3 * ones, risk=3 * (1 - level), bound=3.0) == want
    with pytest.warns(
        UserWarning, match="59 rows are too few for a risk of 0.01; the threshold is infinite. Hold out 99"
    ):
        assert conformal.risk_control_steps(SCORES[:, None], ones, risk=0.01) == np.inf
    assert conformal.quantile(np.arange(99.0), level=0.99) < np.inf


@pytest.mark.parametrize("unit", [1e-10, 1.0, 1e10])
def test_the_unit_of_the_losses_does_not_matter(unit):
    ones = np.full((59, 1), unit, np.float32)
    want = conformal.quantile(SCORES, level=0.9)
    assert conformal.risk_control_steps(SCORES[:, None], ones, risk=0.1 * unit, bound=unit) == want
    with pytest.warns(UserWarning, match=r"too few for a risk of .*infinite. Allow a higher risk"):
        assert conformal.risk_control_steps(SCORES[:, None], ones, risk=1e-11 * unit, bound=unit) == np.inf


@pytest.mark.filterwarnings("ignore:.*rows are too few")
def test_the_rank_is_exact_for_every_percentage():
    for n in (9, 19, 49):
        scores, ones = np.arange(1, n + 1, dtype=np.float32), np.ones((n, 1), np.float32)
        for percent in range(1, 100):
            rank = -(-(n + 1) * percent // 100)
            got = conformal.risk_control_steps(scores[:, None], ones, risk=1 - percent / 100)
            assert got == (rank if rank <= n else np.inf), (n, percent)


@pytest.mark.parametrize("risk", [0.02, 0.15, 0.3])
def test_is_the_definition(risk):
    exact = Fraction(str(risk))
    for kept in (np.ones(40, bool), MASK):
        n = int(kept.sum())
        at = np.sort(STEPS[kept][DROPS[kept] > 0])
        risks = _losses(STEPS[kept], DROPS[kept], at).astype(np.float64).sum(0)
        # Sums of eighths are exact.
        good = [(Fraction(float(total)) + Fraction(3, 4)) / (n + 1) <= exact for total in risks]
        want = at[np.argmax(good)] if any(good) else np.inf
        spoilt = np.where(kept[:, None], STEPS, np.nan), np.where(kept[:, None], DROPS, np.nan)
        fit = lambda steps, drops, mask: conformal.risk_control_steps(
            steps, drops, risk=risk, bound=0.75, row_weights=mask
        )
        if any(good):
            assert fit(*spoilt, kept) == want
            losses = np.where(kept[:, None], _losses(STEPS, DROPS, at), np.nan)
            assert conformal.risk_control(losses, at, risk=risk, bound=0.75, row_weights=kept) == want
        assert jax.jit(fit)(*spoilt, kept) == want
        assert np.isnan(jax.jit(fit)(spoilt[0], np.where(DROPS > -1, DROPS * np.nan, 0), kept))
    grid = np.linspace(0, 1, 50, dtype=np.float32)
    traced = jax.jit(lambda losses, mask: conformal.risk_control(losses, grid, risk=0.3, bound=0.75, row_weights=mask))
    got, losses = traced(_losses(STEPS, DROPS, grid), MASK), _losses(STEPS, DROPS, grid)
    assert got == conformal.risk_control(losses[MASK], grid, risk=0.3, bound=0.75)
    assert np.isnan(traced(losses * np.nan, MASK))


def test_where_all_thresholds_and_none_qualify():
    assert conformal.risk_control_steps(STEPS[:, :1], np.full((40, 1), 1e-3, np.float32), risk=0.5) == -np.inf
    losses = np.full((40, 2), 0.5, np.float32)
    with pytest.warns(
        UserWarning, match="`conformal.risk_control`: no threshold has a risk of 0.3 or less; .* Add thresh"
    ):
        assert conformal.risk_control(losses, np.float32([0, 1]), risk=0.3) == np.inf
    assert conformal.risk_control(losses, np.float32([0, 1]), risk=0.6) == 0
    with pytest.warns(UserWarning, match="2 rows are too few for a risk of 0.3; .* Hold out 3 rows"):
        conformal.risk_control(0 * losses[:2], np.float32([0, 1]), risk=0.3)
    assert conformal.risk_control(0 * losses[:3], np.float32([0, 1]), risk=0.3) == 0


def test_the_expected_loss_is_controlled():
    # A row's loss is the fraction of four labels whose scores exceed the threshold: at a threshold of 1 - r it is r.
    repeats, n, risk = 20_000, 19, 0.2
    steps = np.random.default_rng(0).uniform(size=(repeats, n, 4)).astype(np.float32)
    drops = np.full((n, 4), 0.25, np.float32)
    control = jax.jit(jax.vmap(lambda steps: conformal.risk_control_steps(steps, drops, risk=risk)))
    expected = 1 - np.asarray(control(steps), np.float64)
    error = 6 * expected.std() / np.sqrt(repeats)
    assert risk - 0.05 < expected.mean() < risk + error
    # Without the bound, whose place the 20th row takes: the threshold is one at which the mean of n rows is the risk.
    tails = np.sort(steps.reshape(repeats, -1), axis=1)
    without = 1 - tails[:, round(4 * n * (1 - risk)) - 1]
    with_one_more = np.float64(without).mean()
    assert with_one_more > risk + error


@pytest.mark.usefixtures("unhooked")
def test_messages():
    grid = np.float32([0.0, 0.5, 1.0])
    losses = np.float32([[1.0, 0.5, 0.0]] * 9)
    fit = lambda losses=losses, grid=grid, **more: conformal.risk_control(losses, grid, **({"risk": 0.3} | more))
    with pytest.raises(
        ValueError, match=r"`losses` that never increase with the threshold.\n  got 0.5 at index \(0, 1\)"
    ):
        fit(losses[:, ::-1])
    with pytest.raises(ValueError, match=r"`losses` of at most `bound` \(0.9\).\n  got 1.0 at index"):
        fit(bound=0.9)
    with pytest.raises(ValueError, match="increasing `thresholds`.\n  got 0.5 after 1.0 at index 1\nSort them"):
        fit(grid=grid[::-1])
    with pytest.raises(ValueError, match=r"`losses` \(rows, thresholds\) and .*\n  got `losses` \(9, 3\) and"):
        fit(grid=grid[:2])
    with pytest.raises(ValueError, match="a `risk` between 0 and `bound`.\n  got 1.5 and 1.0"):
        fit(risk=1.5)
    with pytest.raises(ValueError, match="`losses` without NaN"):
        fit(losses * np.float32([1, np.nan, 1]))
    steps = lambda at, drops, **more: conformal.risk_control_steps(at, drops, risk=0.3, **more)
    with pytest.raises(ValueError, match=r"`drops` of each row that add up to `bound` \(1.0\) or less.\n  got 3.0"):
        steps(losses, np.ones((9, 3), np.float32))
    with pytest.raises(ValueError, match="`drops` of zero or more"):
        steps(losses, -losses)
    with pytest.raises(ValueError, match=r"`steps` and `drops` of shape \(rows, steps\).*\nOne step|\n  got"):
        steps(losses[:, 0], losses[:, 0])
    assert jnp.isfinite(steps(np.where(losses == 0, np.nan, losses), losses / 2))
