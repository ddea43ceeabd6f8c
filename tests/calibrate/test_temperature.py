import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import calibrate, combine, scores

STORED = json.loads((pathlib.Path(__file__).parents[1] / "scores" / "figures.json").read_text())
LOGITS, LABELS = (np.asarray(STORED["data"][name]) for name in ("logits", "labels"))
FIGURES = STORED["figures"]


def _loss(logits, labels, temperature):
    z = np.float64(logits) / temperature
    return np.mean(np.logaddexp.reduce(z, axis=-1) - np.take_along_axis(z, labels[:, None], axis=-1)[:, 0])


@pytest.mark.parametrize("share", [0.55, 0.75, 0.99])
@pytest.mark.parametrize("gap", [0.1, 3.0, 40.0])
def test_closed_form_of_two_classes(gap, share):
    # Logits `gap` apart, right with frequency q: the best temperature makes the probability q, so T = gap / logit(q).
    labels = (np.arange(100) >= round(100 * share)).astype(int)
    logits = np.tile(np.array([gap, 0.0], np.float32), (1, 100, 1))
    fitted = calibrate.temperature(logits, labels, pool="mixture")
    np.testing.assert_allclose(fitted.temperature, gap / np.log(share / (1 - share)), rtol=2e-5)
    np.testing.assert_allclose(np.exp(fitted(logits))[0, :, 0], share, rtol=1e-5)
    labels[0] = 1
    other = calibrate.temperature(logits, labels, pool="mixture").temperature
    assert not np.allclose(other, fitted.temperature, rtol=1e-2)


def test_is_scikit_learns_temperature_scaling():
    with jax.enable_x64(True):
        fitted = calibrate.temperature(LOGITS, LABELS, pool="mixture")
        got = np.exp(fitted(LOGITS)[0])
        # scikit-learn stops within about 1e-7 of the minimum.
        np.testing.assert_allclose(fitted.temperature, FIGURES["temperature"], rtol=1e-6)
        np.testing.assert_allclose(got, FIGURES["temperature: probabilities"], rtol=1e-5)
        assert not np.allclose(np.exp(combine.mixture(LOGITS)), FIGURES["temperature: probabilities"], rtol=1e-1)
    single = calibrate.temperature(LOGITS.astype(np.float32), LABELS, pool="mixture")
    np.testing.assert_allclose(single.temperature, FIGURES["temperature"], rtol=5e-6)


def test_is_the_minimum():
    fitted = calibrate.temperature(LOGITS, LABELS, pool="members")
    assert fitted.temperature.shape == (3,)
    for logits, best in zip(LOGITS, np.float64(fitted.temperature), strict=True):
        lowest = _loss(logits, LABELS, best)
        assert max(_loss(logits, LABELS, best * 1.001), _loss(logits, LABELS, best / 1.001)) > lowest
        assert min(_loss(logits, LABELS, best * 1.001), _loss(logits, LABELS, best / 1.001)) > lowest
        slope = (_loss(logits, LABELS, best * (1 + 1e-4)) - _loss(logits, LABELS, best * (1 - 1e-4))) / 2e-4
        assert abs(slope) < 1e-5 < abs(_loss(logits, LABELS, 1.01 * best) - lowest) / 0.01


def test_members_are_calibrated_each_alone():
    together = calibrate.temperature(LOGITS, LABELS, pool="members")
    for i in range(3):
        alone = calibrate.temperature(LOGITS[i : i + 1], LABELS, pool="mixture")
        np.testing.assert_allclose(alone.temperature[0], together.temperature[i], rtol=1e-5)
    broken = LOGITS.copy()
    broken[1] *= 5
    changed = calibrate.temperature(broken, LABELS, pool="members").temperature
    np.testing.assert_array_equal(changed[::2], together.temperature[::2])
    assert changed[1] > 2 * together.temperature[1]


def test_before_and_after_combination_differ():
    members, mixture = (calibrate.temperature(LOGITS, LABELS, pool=pool) for pool in ("members", "mixture"))
    first, second = members(LOGITS), mixture(LOGITS)
    assert first.shape == LOGITS.shape
    assert second.shape == (1, *LOGITS.shape[1:])
    # Each is the best of its kind: of the members one by one, and of the mixture.
    raw = scores.per_member(scores.nll, LOGITS, LABELS)
    assert (scores.per_member(scores.nll, first, LABELS) < raw).all()
    assert scores.nll(second, LABELS) < scores.nll(LOGITS, LABELS)
    # Which of the two is better depends on the data; they are not the same.
    assert abs(scores.nll(second, LABELS) - scores.nll(first, LABELS)) > 1e-2


def test_weights_of_the_mixture_are_kept():
    weights = np.array([3, 0, 1])
    spoilt = LOGITS.copy()
    spoilt[1] = np.nan
    fitted = calibrate.temperature(spoilt, LABELS, pool="mixture", weights=weights)
    twice = calibrate.temperature(LOGITS[[0, 0, 0, 2]], LABELS, pool="mixture")
    np.testing.assert_allclose(fitted.temperature, twice.temperature, rtol=1e-5)
    np.testing.assert_allclose(fitted(spoilt), twice(LOGITS[[0, 0, 0, 2]]), rtol=1e-4, atol=1e-5)
    assert not np.allclose(calibrate.temperature(LOGITS, LABELS, pool="mixture").temperature, fitted.temperature, 1e-2)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_scaled_logits_have_the_scaled_temperature(scale):
    # From a start at T = 1 the bracket has to be crossed; Newton's steps alone would run away.
    best = calibrate.temperature(LOGITS, LABELS, pool="members").temperature
    scaled = calibrate.temperature(LOGITS * scale, LABELS, pool="members").temperature
    np.testing.assert_allclose(scaled, best * scale, rtol=1e-4)


def test_most_likely_classes_stay():
    fitted = calibrate.temperature(LOGITS, LABELS, pool="members")
    np.testing.assert_array_equal(np.argmax(fitted(LOGITS), -1), np.argmax(LOGITS, -1))
    offset = fitted(LOGITS.astype(np.float32) + np.float32(1e3))
    np.testing.assert_allclose(offset, fitted(LOGITS), atol=1e-3)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    sure = np.tile(3 * np.eye(4, dtype=np.float32), (2, 1, 1))
    labels = np.arange(4)
    sure[0, 0] = sure[0, 1]
    with pytest.raises(ValueError, match="exists.\n  member 1: every label already is the most likely"):
        calibrate.temperature(sure, labels, pool="members")
    with pytest.raises(ValueError, match="optimal temperature exists.\n  the labels are no more likely than by chance"):
        calibrate.temperature(-sure, labels, pool="mixture")
    with pytest.raises(ValueError, match=r"finite `logits`.\n  got -inf at index \(1, 0, 2\), the first of 1 such"):
        calibrate.temperature(jnp.asarray(sure).at[1, 0, 2].set(-jnp.inf), labels, pool="mixture")
    with pytest.raises(ValueError, match="`pool` to be one of 'members', 'mixture', got 'ensemble'"):
        calibrate.temperature(LOGITS, LABELS, pool="ensemble")
    with pytest.raises(ValueError, match='`weights` only with `pool="mixture"`'):
        calibrate.temperature(LOGITS, LABELS, pool="members", weights=np.ones(3))
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'pool'"):
        calibrate.temperature(LOGITS, LABELS)
    with pytest.raises(TypeError, match="a concrete `labels`.\n  got a traced array\nFit outside `jax.jit`"):
        jax.jit(lambda y: calibrate.temperature(LOGITS, y, pool="mixture"))(LABELS)
    fitted = calibrate.temperature(LOGITS, LABELS, pool="members")
    with pytest.raises(ValueError, match="the members that it was fitted on.\n  expected 3 members, got 2"):
        fitted(LOGITS[:2])


def _overlapping(seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=40)
    return (rng.normal(size=(1, 40, 3)) + 0.7 * np.eye(3)[labels]).astype(np.float32), labels


def test_logits_of_any_size_have_their_temperature():
    # A search between fixed ends would return one of them.
    logits, labels = _overlapping()
    want = calibrate.temperature(logits, labels, pool="mixture").temperature
    for scale in (1e-2, 1e10, 1e30):
        got = calibrate.temperature((scale * logits).astype(np.float32), labels, pool="mixture").temperature
        np.testing.assert_allclose(got / scale, want, rtol=1e-4)  # log-probabilities of small logits are rounded
