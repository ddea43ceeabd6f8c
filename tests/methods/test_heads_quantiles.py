"""Quantile heads against `scores.pinball`, quantiles of samples and the CRPS."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from eqx_ensemble import scores
from eqx_ensemble.methods import heads

RNG = np.random.default_rng(0)
LEVELS = np.array([0.1, 0.5, 0.8])
QUANTILES, TARGETS = RNG.normal(size=(20, 3)).astype(np.float32), RNG.normal(size=20).astype(np.float32)


def test_each_level_is_the_score_of_that_level():
    pytest.importorskip("scoringrules")
    each = [scores.pinball(QUANTILES[:, i], TARGETS, level=level) for i, level in enumerate(LEVELS)]
    np.testing.assert_allclose(heads.pinball_loss(QUANTILES, TARGETS, levels=LEVELS), np.mean(each), rtol=1e-5)
    for i, level in enumerate(LEVELS):
        got = heads.pinball_loss(QUANTILES[:, i : i + 1], TARGETS, levels=LEVELS[i : i + 1])
        np.testing.assert_allclose(got, scores.pinball(QUANTILES[:, i], TARGETS, level=level), rtol=1e-5)


def test_the_best_constants_are_the_quantiles_of_the_sample():
    sample = np.sort(RNG.normal(size=101)).astype(np.float32)  # 101 rows: no level falls between two of them
    loss = lambda q, i: heads.pinball_loss(jnp.broadcast_to(q, (101, 1)), sample, levels=LEVELS[i : i + 1])
    for i, level in enumerate(LEVELS):
        values = jax.vmap(lambda q, i=i: loss(q, i))(jnp.asarray(sample))
        assert sample[np.argmin(values)] == np.quantile(sample, level, method="inverted_cdf")


def test_twice_the_loss_at_many_levels_is_the_crps():
    levels = (np.arange(2000) + 0.5) / 2000
    quantiles = scipy.stats.norm(0.3, 1.5).ppf(levels)[None].astype(np.float32)
    got = 2 * heads.pinball_loss(quantiles, np.ones(1, np.float32), levels=levels)
    crps = scores.crps_gaussian(np.full(1, 0.3, np.float32), np.full(1, 2.25, np.float32), np.ones(1, np.float32))
    np.testing.assert_allclose(got, crps, rtol=1e-3)


def test_sorting_never_raises_the_loss():
    crossed = np.array(list(itertools.permutations([0.0, 1.0, 2.5])), np.float32)
    for y in (-1.0, 0.4, 1.7, 3.0):
        targets = np.full(len(crossed), y, np.float32)
        loss = lambda q, targets=targets: heads.pinball_loss(q, targets, levels=LEVELS, reduction="none")
        before, after = loss(crossed), loss(heads.sort_quantiles(crossed))
        assert (after <= before + 1e-6).all()
        assert (after < before - 1e-3).any()
        assert (loss(np.flip(np.sort(crossed), -1)) > after + 1e-3).all()  # the other order does


def test_sorting():
    got = heads.sort_quantiles(np.array([[[3.0, 1.0, 2.0]], [[np.nan, 1.0, 0.0]]], np.float32))
    np.testing.assert_array_equal(got, [[[1, 2, 3]], [[np.nan] * 3]])


@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_jit_and_vmap(x64):
    with jax.enable_x64(x64):
        dtype = np.float64 if x64 else np.float32
        loss = lambda q, y: heads.pinball_loss(q, y, levels=LEVELS)
        eager = loss(QUANTILES, TARGETS.astype(dtype))
        assert eager.dtype == dtype
        np.testing.assert_allclose(jax.jit(loss)(QUANTILES, TARGETS), eager, rtol=1e-5)
        each = jax.vmap(loss)(QUANTILES, TARGETS)
        np.testing.assert_allclose(each.mean(), eager, rtol=1e-5)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("levels", "match"),
    [
        ([0.5, 0.1, 0.9], "increasing"),
        ([0.1, 0.1, 0.9], "increasing"),
        ([0.0, 0.5, 0.9], "between 0 and 1"),
        ([10.0, 50.0, 90.0], "between 0 and 1"),
        ([0.5], "one level per quantile"),
        (0.5, "one level per quantile"),
    ],
)
def test_wrong_levels(levels, match):
    with pytest.raises(ValueError, match=match):
        heads.pinball_loss(QUANTILES, TARGETS, levels=levels)


@pytest.mark.usefixtures("unhooked")
def test_wrong_shapes():
    with pytest.raises(ValueError, match="targets"):
        heads.pinball_loss(QUANTILES, TARGETS[:, None], levels=LEVELS)
    with pytest.raises(ValueError, match="levels"):
        heads.sort_quantiles(np.float32(1))
