"""Adaptive conformal inference: the bound on coverage for any sequence, and the quantile at any level."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal

STEPS = 2000
SCORES = np.random.default_rng(0).normal(size=99).astype(np.float32)


def _wishes():
    """What an adversary would like: misses always, never, at times, in blocks, and just when it hurts."""
    rng = np.random.default_rng(0)
    random = [rng.uniform(size=STEPS) < p for p in (0.02, 0.1, 0.5, 0.9)]
    blocks = [np.arange(STEPS) // length % 2 == 0 for length in (3, 50, 400)]
    return np.stack([np.ones(STEPS, bool), np.zeros(STEPS, bool), *random, *blocks])


def _misses(wishes, level, rate, *, clipped=False):
    """Misses that follow the wishes, except that a set of everything never misses and an empty one always does."""

    def step(state, wish):
        missed = jnp.where(state.level >= 1, False, jnp.where(state.level <= 0, True, wish))
        state = state.update(~missed)
        if clipped:
            state = eqx.tree_at(lambda s: s.level, state, jnp.clip(state.level, 0, 1))
        return state, missed

    start = conformal.aci(level=level, rate=rate)
    return np.asarray(jax.vmap(lambda wishes: jax.lax.scan(step, start, wishes)[1])(wishes))


@pytest.mark.parametrize(("level", "rate"), [(0.9, 0.05), (0.6, 0.3), (0.9, 0.005)])
def test_coverage_of_any_sequence_is_within_the_bound(level, rate):
    misses = _misses(_wishes(), level, rate)
    times = np.arange(1, STEPS + 1)
    gap = np.abs(np.cumsum(misses, axis=1) / times - (1 - level))
    bound = (max(level, 1 - level) + rate) / (rate * times)
    assert (gap <= bound + 1e-5).all()  # the level is a sum of 2000 rounded steps
    # It is nearly met by the sequence that misses only when it must.
    assert (gap[1] / bound).max() > 0.6
    if rate == 0.05:
        wrong = np.abs(np.cumsum(_misses(_wishes(), level, rate, clipped=True), axis=1) / times - (1 - level))
        assert (wrong > 3 * bound).any()


def test_one_step_is_the_formula():
    state = conformal.aci(level=0.9, rate=0.05)
    assert [float(leaf) for leaf in jax.tree.leaves(state)] == pytest.approx([0.9, 0.9, 0.05])
    np.testing.assert_allclose(state.update(False).level, 0.9 + 0.05 * 0.9, rtol=1e-6)
    np.testing.assert_allclose(state.update(jnp.asarray(True)).level, 0.9 - 0.05 * 0.1, rtol=1e-6)
    np.testing.assert_allclose(state.update(0.5).level, 0.9 + 0.05 * 0.4, rtol=1e-6)


def _at(level):
    return eqx.tree_at(lambda s: s.level, conformal.aci(level=0.5), jnp.asarray(level, float))


def test_quantile_at_any_level():
    quantile = jax.jit(lambda level, scores: _at(level).quantile(scores))
    for n in (9, 99):
        for percent in range(1, 100):
            rank = -(-(n + 1) * percent // 100)
            want = np.sort(SCORES[:n])[rank - 1] if rank <= n else np.inf
            assert quantile(percent / 100, SCORES[:n]) == want, (n, percent)
    for level, want in [(1.0, np.inf), (1.3, np.inf), (0.0, -np.inf), (-0.1, -np.inf), (1e-9, SCORES.min())]:
        assert quantile(level, SCORES) == want
    mask = np.arange(99) % 2 == 0
    spoilt = np.where(mask, SCORES, np.nan)
    assert _at(0.8).quantile(spoilt, row_weights=mask) == conformal.quantile(SCORES[mask], level=0.8)
    assert np.isnan(jax.jit(lambda s: _at(0.8).quantile(s))(spoilt))


def test_it_follows_a_change_and_is_stored(tmp_path):
    # The noise grows fivefold: a fixed quantile then covers far too little.
    noise = np.abs(np.random.default_rng(0).normal(size=1200) * np.where(np.arange(1200) < 200, 1, 5)).astype(
        np.float32
    )

    def step(carry, score):
        state, recent = carry
        covered = score <= state.quantile(recent)
        return (state.update(covered), jnp.append(recent[1:], score)), covered

    (state, _), covered = jax.lax.scan(step, (conformal.aci(level=0.8, rate=0.05), noise[:100]), noise[100:])
    bound = (0.8 + 0.05) / (0.05 * 1100)
    assert abs(np.mean(covered) - 0.8) <= bound
    fixed = noise[100:] <= conformal.quantile(noise[:100], level=0.8)
    assert abs(np.mean(fixed) - 0.8) > 10 * bound
    ee.save(tmp_path / "state", state)
    assert eqx.tree_equal(ee.load(tmp_path / "state", conformal.aci(level=0.5)), state)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match="`conformal.aci` needs `rate` to be above zero, got 0.0"):
        conformal.aci(level=0.9, rate=0.0)
    with pytest.raises(ValueError, match="a `level` between 0 and 1"):
        conformal.aci(level=90)
    state = conformal.aci(level=0.9)
    with pytest.raises(ValueError, match=r"`conformal.Aci.update` needs `covered` .*\n  .*\(3,\)"):
        state.update(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="`covered` from 0 to 1.\n  got 3.5"):
        state.update(3.5)
