"""What was fitted in one precision is called in another, also with 64-bit types, under strict promotion."""

import jax
import numpy as np
import pytest

from eqx_ensemble import conformal, resample

RNG = np.random.default_rng(0)
LOGITS, LABELS = 2 * RNG.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 3
NUMBERS = RNG.normal(size=(4, 40)).astype(np.float32)
TARGETS = RNG.normal(size=40).astype(np.float32)
DRAWN = np.array([np.arange(i, i + 20) for i in (0, 5, 15, 20)])


def _folds():
    return resample.folds(40, 4, key=jax.random.key(0))


def _fit_enbpi():
    return conformal.enbpi(NUMBERS[0], TARGETS, DRAWN, level=0.8)


FITTED = {
    "split": lambda: (conformal.split(NUMBERS[0], TARGETS, level=0.8), [NUMBERS[1]]),
    "normalised": lambda: (
        conformal.normalised(NUMBERS[0], 1 + NUMBERS[2] ** 2, TARGETS, level=0.8),
        [TARGETS**2 + 1] * 2,
    ),
    "cqr": lambda: (conformal.cqr(NUMBERS[0] - 1, NUMBERS[0] + 1, TARGETS, level=0.8), [NUMBERS[1], NUMBERS[1] + 1]),
    "cv_plus": lambda: (conformal.cv_plus(NUMBERS[0], TARGETS, _folds(), level=0.8), [NUMBERS[:, :5]]),
    "jackknife_plus": lambda: (
        conformal.jackknife_plus_after_bootstrap(NUMBERS[0], TARGETS, DRAWN, level=0.8),
        [NUMBERS[:, :5]],
    ),
    "enbpi": lambda: (_fit_enbpi(), [NUMBERS[:, :5]]),
    "enbpi, later": lambda: (_fit_enbpi().update(NUMBERS[:, :5].astype(float), np.zeros(5)), [NUMBERS[:, :5]]),
    "lac": lambda: (conformal.lac(LOGITS, LABELS, level=0.8), [LOGITS[:5]]),
    "aps": lambda: (conformal.aps(LOGITS, LABELS, level=0.8), [LOGITS[:5]]),
    "top_k": lambda: (conformal.top_k(LOGITS, LABELS, level=0.8), [LOGITS[:5]]),
    "class_conditional": lambda: (conformal.class_conditional(LOGITS, LABELS, level=0.8), [LOGITS[:5]]),
    "group_conditional": lambda: (
        conformal.group_conditional(LOGITS, LABELS, LABELS, level=0.8, num_groups=3),
        [LOGITS[:5], LABELS[:5]],
    ),
    "cross_conformal": lambda: (
        conformal.cross_conformal(LOGITS, LABELS, _folds(), level=0.8),
        [np.stack([LOGITS[:5] + i for i in range(4)])],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTED)
def test_another_precision(name):
    with jax.enable_x64(True):
        fitted, arguments = FITTED[name]()
        doubled = [x.astype(np.float64) if x.dtype == np.float32 else x for x in arguments]
        found, want = fitted(*doubled), fitted(*arguments)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
            assert x.dtype == (np.float64 if y.dtype == np.float32 else y.dtype)


NONE = np.zeros((1, 8), bool)  # rows that the one member was trained on
NUMBER = np.full(8, 0.1, np.float32)


def _interval(fit, *predictions):
    return lambda y: fit(*predictions, y)(*predictions)


def _later(y):
    fitted = conformal.enbpi(NUMBER, 0 * y, NONE, level=0.7, window=8)
    return fitted.update(NUMBER[None], y)(NUMBER[None])


ATOMS = {
    "split": _interval(lambda x, y: conformal.split(x, y, level=0.7), NUMBER),
    "normalised": _interval(lambda x, s, y: conformal.normalised(x, s, y, level=0.7), NUMBER, 3 * NUMBER),
    "cqr": _interval(lambda low, high, y: conformal.cqr(low, high, y, level=0.7), NUMBER - 1, NUMBER + 1),
    "jackknife_plus": lambda y: conformal.jackknife_plus_after_bootstrap(NUMBER, y, NONE, level=0.7)(NUMBER[None]),
    "enbpi": lambda y: conformal.enbpi(NUMBER, y, NONE, level=0.7)(NUMBER[None]),
    "enbpi, later": _later,
    "quantile": lambda y: (-np.inf, conformal.quantile(y, level=0.7)),
    "weighted_quantile": lambda y: (-np.inf, conformal.weighted_quantile(y, np.ones(8), np.ones(()), level=0.7)),
    "group_quantile": lambda y: (-np.inf, conformal.group_quantile(y, np.zeros(8, int), level=0.7, num_groups=1)),
    "risk_control_steps": lambda y: (-np.inf, conformal.risk_control_steps(y[:, None], np.ones((8, 1)), risk=0.3)),
    "risk_control": lambda y: (-np.inf, conformal.risk_control(np.zeros((8, 1)), y[:1], risk=0.3)),
}


@pytest.mark.parametrize("name", ATOMS)
def test_targets_that_float32_does_not_hold_are_inside(name):
    """All targets are one number, at the end of the interval."""
    for y in np.append(np.random.default_rng(1).normal(size=12), [0.1, 100.3]):
        lower, upper = ATOMS[name](np.full(8, y))
        assert np.all((np.asarray(lower, float) <= y) & (y <= np.asarray(upper, float))), y
        gaps = np.minimum(abs(np.asarray(lower) - y), abs(np.asarray(upper) - y))
        np.testing.assert_array_less(gaps, 1e-6 + 1e-6 * abs(y))  # by rounding, not more
